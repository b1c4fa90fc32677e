"""The file that `generate --prompts` writes: one line a prompt, so that a run that was interrupted
goes on where it stopped.

A line is written whole, after the prompt's last turn; only the end of the last line can be missing,
and then that line is dropped and its prompt done again. A file that holds anything else is
somebody's, and stays as it is.
"""

import fcntl
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dovetail.protocol.errors import UserError
from dovetail.protocol.files import append, refusal
from dovetail.protocol.messages import Result

BEGIN, MIDDLE = b'{"id": "', b'", "results": ['
"""The text that `Answers.write` puts before and behind the id."""
ID = re.compile(rb'(?:[^"\\]|\\.)*')


class WorkerEvents:
    """The open file and the ids that are done."""

    def __init__(self, file: IO[bytes], path: Path, done: set[str]) -> None:
        self._file, self._path, self.done = file, path, done

    def write(self, id: str, results: Sequence[Result]) -> None:
        """Append a prompt's results, one for each of its turns."""
        line = json.dumps(
            {"id": id, "results": [result.model_dump() for result in results]}, ensure_ascii=False
        )
        append(self._file, self._path, "the answers", line.encode() + b"\n")
        self.done.add(id)


@contextmanager
def open_answers(path: Path) -> Iterator[WorkerEvents]:
    """Open for appending, held against a second run; a torn last line is dropped. `UserError` if
    the file is something else."""
    if path.exists() and not path.is_file():
        raise UserError(
            f"{path} is not a regular file, and a run that is continued reads it again: name a "
            "file with --out"
        )
    try:
        file = path.open("a+b")
    except OSError as error:
        raise UserError(f"cannot write the answers to {path}: {refusal(error)}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another run is writing its answers to {path}: wait for it, or choose another "
                "--out"
            ) from None
        yield WorkerEvents(file, path, _repair(path, file))


def _repair(path: Path, file: IO[bytes]) -> set[str]:
    """The ids in the file, whose last line is cut off if it is one of ours, torn. Nothing is
    changed before all lines have been looked at."""
    file.seek(0)
    done: set[str] = set()
    whole = 0
    for number, line in enumerate(file, start=1):
        id = _answered(line)
        if id is None and not _torn(line):
            raise UserError(
                f"{path} line {number} is not an answer of an earlier run: choose another --out, "
                "or remove the line"
            )
        if id is not None:
            done.add(id)
            whole += len(line)
    file.truncate(whole)
    file.seek(0, 2)
    return done


def _answered(line: bytes) -> str | None:
    """The id in a whole line of ours."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    ours = (
        line.endswith(b"\n")
        and isinstance(content, dict)
        and isinstance(content.get("id"), str)
        and isinstance(content.get("results"), list)
    )
    return content["id"] if ours else None


def _torn(line: bytes) -> bool:
    """Return whether this is the beginning of a line that `Answers.write` began."""
    if line.endswith(b"\n"):
        return False
    if not line.startswith(BEGIN):
        return BEGIN.startswith(line)
    id = ID.match(line, len(BEGIN))
    rest = line[id.end() if id else len(BEGIN) :]
    return rest.startswith(MIDDLE) or MIDDLE.startswith(rest) or rest == b"\\"
