"""Recorded forms of sessions, of events' arguments and of actions. Pure."""

from datetime import datetime
from typing import Any

from dovetail.protocol.arrays import Array
from dovetail.protocol.messages import VERSION, Message, VerifiedItem
from dovetail.runtime.control.rounds import Plan
from dovetail.runtime.record import recording
from dovetail.runtime.session.actions import Action, Ask, Emit, Finish, NextRound, Note, Score
from dovetail.runtime.session.draft_sync import DraftSync, Joining
from dovetail.runtime.session.request import Base
from dovetail.runtime.session.session import Session
from dovetail.runtime.telemetry.metrics import RoundTimes

MAX_WORDS = 4096  # most characters of an exception


def begun(session: Session, began: datetime) -> dict[str, Any]:
    """Return the first entry of a recording."""
    request = session.request
    wanted = {
        "prompt": request.packed,
        "key": request.key,
        "seed": request.seed,
        "sampling": request.sampling.model_dump(),
        "max_tokens": request.max_tokens,
        "tree": request.tree.model_dump(),
        "end": request.end,
        "vocabulary_size": request.vocabulary_size,
        "stop": request.stop,
        "record": request.record,
        "logprobs": request.logprobs,
        "scored": request.scored,
    }
    return {
        "type": "recording",
        "format": recording.FORMAT,
        "protocol": VERSION,
        "began": f"{began:%Y-%m-%d %H:%M:%S} UTC",
        "session": session.number,
        "epoch": session.epoch,
        "request": wanted,
        "fingerprint": session.fingerprint,
        "draft": None if session.draft_sync is None else _drafting(session.draft_sync),
        "target_base": _base(session.target_base),
        "tokens": tuple(session.tokens),
        "margins": tuple(session.margins),
        "logprobs": tuple(one.model_dump() for one in session.logprobs),
        "scores_told": session.scores_told,
    }


def _drafting(draft_sync: DraftSync) -> dict[str, Any]:
    return {
        "tokens": draft_sync.tokens,
        "reads": draft_sync.reads and draft_sync.reads.model_dump(),
        "base": _base(draft_sync.base),
    }


def _base(base: Base | None) -> dict[str, Any] | None:
    return None if base is None else vars(base)


def plain(value: Any, *, timed: bool) -> Any:
    """Return the recorded form of a step's argument; None if it is the current message, or its
    features. `timed`: record the times of rounds."""
    match value:
        case Message() | Array():
            return None
        case VerifiedItem():
            return value.round
        case RoundTimes():
            return vars(value) if timed else None
        case Base() | Plan():
            return vars(value)
        case Joining():
            return {"reads": value.reads and value.reads.model_dump(), "base": _base(value.base)}
        case _:
            return value


def outline(action: Action) -> tuple[Any, ...]:
    """Return the recorded form of an action; commands are recorded when sent."""
    match action:
        case Ask():
            return ("ask", action.role, action.command.type)
        case Emit():
            return ("emit", action.tokens, action.drafted, action.text)
        case Score():
            return ("score", action.start, len(action.logprobs))
        case Note():
            return ("note", action.record.round)
        case NextRound():
            return ("next_round",)
        case Finish():
            return ("finish", action.reason)
