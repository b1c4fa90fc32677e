"""The rounds of a file that `generate --record` wrote, reply by reply."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dovetail.launch.files.outputs import read_round
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import RoundRecord


@dataclass(frozen=True)
class RecordedReply:
    """The rounds of one reply, in their order: the answer to the turn of this number of a
    prompt."""

    id: str
    turn: int
    rounds: tuple[RoundRecord, ...]


def rounds_in(path: Path) -> Iterator[tuple[str, int, RoundRecord]]:
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise UserError(f"the records in {path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if line.endswith(b"\n"):
            try:
                yield read_round(line)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                raise UserError(f"{path} line {number} is not a round") from None


def read_records(path: Path) -> list[RecordedReply]:
    """The replies of a file, in the order in which they began; `UserError` names the line that is
    no round."""
    replies: dict[tuple[str, int], list[RoundRecord]] = {}
    for id, turn, record in rounds_in(path):
        rounds = replies.setdefault((id, turn), [])
        if rounds and record.round <= rounds[-1].round:
            rounds.clear()
        rounds.append(record)
    if not replies:
        raise UserError(f"{path} holds no rounds: `dovetail generate --record {path}` writes them")
    return [RecordedReply(id, turn, tuple(rounds)) for (id, turn), rounds in replies.items()]
