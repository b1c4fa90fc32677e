"""Files and folders that a long run writes: its beginning finds out whether they can be written."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

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


@contextmanager
def held_file(path: Path, what: str) -> Iterator[IO[bytes]]:
    """Open a file of --out for appending and reading, held against a second run; `what` it holds is
    for the errors, such as "answers"."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a regular file, which --out needs to continue a run")
    try:
        file = path.open("a+b")
    except OSError as error:
        raise UserError(f"cannot write the {what} to {path}: {refusal(error)}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another run is writing its {what} to {path}: choose another --out"
            ) from None
        file.seek(0)
        yield file
