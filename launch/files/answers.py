"""The file that `generate --prompts` writes: one line a prompt, so that an interrupted run
continues where it stopped. A line is written after the prompt's last turn; only the end of the last
line can be missing, and then that line is dropped and its prompt repeated. A file with any other
content is left as it is.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dovetail.launch.files.outputs import held_file
from dovetail.protocol.errors import UserError
from dovetail.protocol.files import append
from dovetail.protocol.messages import Result

BEGIN, MIDDLE = b'{"id": "', b'", "results": ['
"""The text that `Answers.write` puts before and behind the id."""
ID = re.compile(rb'(?:[^"\\]|\\.)*')


class Answers:
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
def open_answers(path: Path) -> Iterator[Answers]:
    """Open for appending, held against a second run; a torn last line is dropped. `UserError` if
    the file is something else."""
    with held_file(path, "answers") as file:
        yield Answers(file, path, _repair(path, file))


def _repair(path: Path, file: IO[bytes]) -> set[str]:
    """The ids in the file, whose last line is cut off if it is one of ours, torn. Nothing is
    changed before all lines have been looked at."""
    done: set[str] = set()
    whole = 0
    for number, line in enumerate(file, start=1):
        id = _answered(line)
        if id is None and not _torn(line):
            raise UserError(
                f"{path} line {number} is not an answer of an earlier run: choose another --out"
            )
        if id is not None:
            done.add(id)
            whole += len(line)
    file.truncate(whole)
    file.seek(0, 2)
    return done


def _answered(line: bytes) -> str | None:
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
