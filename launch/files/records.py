"""The files of `generate`, both continued after an interruption: `--record` writes a line a round,
`{"id", "turn", "record"}`, where `record` is a `messages.RoundRecord`; `--out` a line a prompt. A
round that is not later than the one before starts its reply again."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dovetail.launch.files.outputs import continued
from dovetail.protocol.files import append
from dovetail.protocol.messages import Result, RoundRecord


class RecordFile:
    """The open file."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path = file, path

    def write(self, id: str, turn: int, record: RoundRecord) -> None:
        told = {"id": id, "turn": turn, "record": record.model_dump(mode="json")}
        line = json.dumps(told, ensure_ascii=False).encode() + b"\n"
        append(self._file, self._path, "the records", line)


@contextmanager
def open_records(path: Path, *, go_on: bool = False) -> Iterator[RecordFile]:
    """Open for writing; `go_on`: keep what an earlier run wrote."""

    def take(line: bytes) -> None:
        read_round(line)

    with continued(path, "records", take, lambda _: True, "--record") as file:
        if not go_on:
            file.truncate(0)
        yield RecordFile(file, path)


def read_round(line: bytes) -> tuple[str, int, RoundRecord]:
    """Return the prompt, the turn and the record of a line; ValueError, KeyError, TypeError or
    OverflowError for any other."""
    content = json.loads(line)
    record = RoundRecord.model_validate_json(json.dumps(content["record"]))
    return str(content["id"]), int(content["turn"]), record


BEGIN, MIDDLE = b'{"id": "', b'", "results": ['
"""The text that `Answers.write` puts before and behind the id."""
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
