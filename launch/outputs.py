"""Files that are written at the end of a long run: whether they can be is found out at its beginning."""

from pathlib import Path

from dovetail.protocol.errors import UserError


def check_output(path: Path | None, what: str) -> None:
    """`UserError` if there cannot be a file at `path`; None is fine. A file that is there keeps its content, one that is not is made."""
    try:
        if path is not None:
            path.open("ab").close()
    except OSError as error:
        raise UserError(f"cannot write {what} to {path}: {error.strerror}") from None
