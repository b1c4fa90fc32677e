"""Files and folders that a long run writes: its beginning finds out whether they can be written."""

import fcntl
import os
from collections.abc import Callable, Iterator
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


FOREIGN = (*(ValueError, KeyError, TypeError, AttributeError), *(OverflowError, RecursionError))
"""What reading a line raises that is not one of ours."""

OUT_FOLDER = _Folder(file_okay=False, path_type=Path)


def check_output(path: Path | None, what: str) -> None:
    """Raise `UserError` if `path` cannot be written; None is fine. An existing file keeps its
    content, and no new one is left."""
    try:
        if path is not None:
            known = path.exists()
            path.open("ab").close()
            if not known:
                path.unlink()
    except OSError as error:
        raise UserError(f"cannot write {what} to {path}: {refusal(error)}") from None


@contextmanager
def continued(
    path: Path,
    what: str,
    take: Callable[[bytes], None],
    torn: Callable[[bytes], bool],
    option: str = "--out",
) -> Iterator[IO[bytes]]:
    """Open a file of lines for appending, locked; `what` names its content. `take` gets each whole
    line, and raises ValueError, KeyError or TypeError for a foreign one; `torn` returns whether an
    incomplete last line is ours, and is cut off. `UserError` for any other file."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a regular file, which {option} needs to continue a run")
    try:
        file = path.open("a+b")
    except OSError as error:
        raise UserError(f"cannot write the {what} to {path}: {refusal(error)}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another run is writing its {what} to {path}: choose another {option}"
            ) from None
        file.seek(0)
        whole = 0
        for number, line in enumerate(file, start=1):
            try:
                if line.endswith(b"\n"):
                    take(line)
                    whole += len(line)
                elif not torn(line):
                    raise ValueError
            except FOREIGN:
                raise UserError(
                    f"{path} line {number} is not of an earlier run: choose another {option}"
                ) from None
        file.truncate(whole)
        yield file
