"""The file that `generate --prompts` writes: one line a prompt, so that a run that was interrupted goes on where it stopped.

A line is written whole, after the prompt's last turn; only the end of the last line can be missing, and then that line is dropped and its prompt done again.
"""

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Result


class Answers:
    """The open file and the ids that are done."""

    def __init__(self, file: IO[bytes], done: set[str]) -> None:
        self._file, self.done = file, done

    def write(self, id: str, results: Sequence[Result]) -> None:
        """Append a prompt's results, one for each of its turns."""
        line = json.dumps({"id": id, "results": [result.model_dump() for result in results]}, ensure_ascii=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        self.done.add(id)


@contextmanager
def open_answers(path: Path) -> Iterator[Answers]:
    """Open for appending, held against a second run; a torn last line is dropped. `UserError` if the file is something else."""
    try:
        file = path.open("a+b")
    except OSError as error:
        raise UserError(f"cannot write the answers to {path}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another run is writing its answers to {path}: wait for it, or choose another --out") from None
        yield Answers(file, _repair(path, file))


def _repair(path: Path, file: IO[bytes]) -> set[str]:
    """The ids in the file, whose last line is cut off if it is torn."""
    file.seek(0)
    done: set[str] = set()
    whole = 0
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            done.add(str(json.loads(line)["id"]))
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} line {number} is no answer of an earlier run: choose another --out, or remove the line") from None
        whole += len(line)
    file.truncate(whole)
    file.seek(0, 2)
    return done
