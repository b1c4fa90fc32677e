"""Files and folders that are written at the end of a long run: whether they can be is found out at
its beginning."""

import os
from pathlib import Path
from typing import Any

import click

from dovetail.protocol.errors import UserError
from dovetail.protocol.files import refusal


class _Folder(click.Path):
    """A folder, which need not be there."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        if Path(value).is_file():
            self.fail(f"{value} is a file: name a folder", param, ctx)
        return super().convert(value, param, ctx)


OUT_FOLDER = _Folder(file_okay=False, path_type=Path)


def check_output(path: Path | None, what: str) -> None:
    """`UserError` if there cannot be a file at `path`; None is fine. A file that is there keeps its
    content, and none is left where there was none."""
    try:
        if path is not None:
            known = path.exists()
            path.open("ab").close()
            if not known:
                path.unlink()
    except OSError as error:
        raise UserError(f"cannot write {what} to {path}: {refusal(error)}") from None
