"""The file that `generate --record` writes: a line a round, `{"id", "turn", "record"}`, for the
analysis of what was offered, verified and accepted.

`id` is the prompt's in its file, empty for a single prompt; `record` has the fields of
`messages.RoundRecord`. An interrupted run of a file of prompts continues in the same file: a round
that is not later than the one before it starts its reply again.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from dovetail.protocol.errors import UserError
from dovetail.protocol.files import append, refusal
from dovetail.protocol.messages import RoundRecord


class RecordFile:
    """The open file."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path = file, path

    def write(self, id: str, turn: int, record: RoundRecord) -> None:
        line = json.dumps(
            {"id": id, "turn": turn, "record": record.model_dump(mode="json")}, ensure_ascii=False
        )
        append(self._file, self._path, "the records", line.encode() + b"\n")


@contextmanager
def open_records(path: Path, *, go_on: bool = False) -> Iterator[RecordFile]:
    """Open for writing; `go_on`: what an earlier run wrote stays, but for a torn last line.
    `UserError` if the file is something else."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a regular file: name one with --record")
    whole = _whole_bytes(path) if path.exists() else 0
    try:
        file = path.open("r+b" if path.exists() else "w+b")
    except OSError as error:
        raise UserError(f"cannot write the records to {path}: {refusal(error)}") from None
    with file:
        file.truncate(whole if go_on else 0)
        file.seek(0, 2)
        yield RecordFile(file, path)


def rounds_in(path: Path) -> Iterator[tuple[str, int, RoundRecord]]:
    """The prompt, the turn and the record of each round in a file, without a torn last line;
    `UserError` names a line that is not a round."""
    for number, line in enumerate(_read(path), start=1):
        if line.endswith(b"\n"):
            yield _round(line, f"{path} line {number}")


def _read(path: Path) -> Sequence[bytes]:
    try:
        return path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise UserError(f"the records in {path} cannot be read: {error.strerror}") from None


def _round(line: bytes, where: str) -> tuple[str, int, RoundRecord]:
    try:
        content = json.loads(line)
        return (
            str(content["id"]),
            int(content["turn"]),
            RoundRecord.model_validate_json(json.dumps(content["record"])),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, ValidationError):
        raise UserError(f"{where} is not a round of `dovetail generate --record`") from None


def _whole_bytes(path: Path) -> int:
    """Return how long the file is without a torn last line, all of whose lines are rounds."""
    for _ in rounds_in(path):
        pass
    return sum(len(line) for line in _read(path) if line.endswith(b"\n"))
