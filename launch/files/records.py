"""The file that `generate --record` writes: a line per round, `{"id", "turn", "record"}`, to
analyse what was offered, verified and accepted.

`id` is the prompt's in its file, empty for a single prompt; `record` has the fields of
`messages.RoundRecord`. An interrupted run of a file of prompts continues in the same file: a round
number that does not increase begins its reply anew."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dovetail.launch.files.outputs import continued
from dovetail.protocol.files import append
from dovetail.protocol.messages import RoundRecord


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
