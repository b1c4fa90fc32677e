"""The file that `generate --prompts` writes: a line is written after a prompt's last turn, so that
an interrupted run continues where it stopped."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dovetail.launch.files.outputs import continued
from dovetail.protocol.files import append
from dovetail.protocol.messages import Result

BEGIN, MIDDLE = b'{"id": "', b'", "results": ['
"""The text that `Answers.write` puts before and after the id."""
ID = re.compile(rb'(?:[^"\\]|\\.)*')


class Answers:
    """The open file and the ids that are done."""

    def __init__(self, file: IO[bytes], path: Path, done: set[str]) -> None:
        self._file, self._path, self.done = file, path, done

    def write(self, id: str, results: Sequence[Result]) -> None:
        """Append a prompt's results, one for each of its turns."""
        told = {"id": id, "results": [result.model_dump() for result in results]}
        line = json.dumps(told, ensure_ascii=False).encode() + b"\n"
        append(self._file, self._path, "the answers", line)
        self.done.add(id)


@contextmanager
def open_answers(path: Path) -> Iterator[Answers]:
    done: set[str] = set()

    def take(line: bytes) -> None:
        content = json.loads(line)
        if not isinstance(content["id"], str) or not isinstance(content["results"], list):
            raise TypeError
        done.add(content["id"])

    with continued(path, "answers", take, _torn) as file:
        yield Answers(file, path, done)


def _torn(line: bytes) -> bool:
    """Return whether this is the beginning of a line that `Answers.write` began."""
    if not line.startswith(BEGIN):
        return BEGIN.startswith(line)
    id = ID.match(line, len(BEGIN))
    rest = line[id.end() if id else len(BEGIN) :]
    return rest.startswith(MIDDLE) or MIDDLE.startswith(rest) or rest == b"\\"
