"""Files and folders that a long run writes; whether they are writable is checked at its start.
`generate` continues both of its files after an interruption: `--record` writes a line a round,
`{"id", "turn", "record"}`, where `record` is a `messages.RoundRecord`; `--out` a line a prompt. A
round number that does not increase starts its reply again."""

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import click

from dovetail.protocol.errors import UserError
from dovetail.protocol.files import append, refusal
from dovetail.protocol.messages import Result, RoundRecord


class _Folder(click.Path):
    """A folder, which may be missing."""

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
"""The exceptions of reading a foreign line."""

OUT_FOLDER = _Folder(file_okay=False, path_type=Path)


def check_output(path: Path | None, what: str) -> None:
    """Raise `UserError` if `path` cannot be written; None is allowed. An existing file keeps its
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
    """Open a file of lines for appending, locked; `what` names its content. `take` gets each
    complete line, and raises ValueError, KeyError or TypeError for a foreign one; `torn` returns
    whether an incomplete last line is ours, which is then cut off. `UserError` for any other
    file."""
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
                    f"{path} line {number} is not from an earlier run: choose another {option}"
                ) from None
        file.truncate(whole)
        yield file


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
"""The text that `Answers.write` puts before and after the id."""
ID = re.compile(rb'(?:[^"\\]|\\.)*')


class Answers:
    """The open file and the ids of finished prompts."""

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
