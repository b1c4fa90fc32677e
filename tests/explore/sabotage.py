"""Faults inside the coordinator: at one session, whose next step raises, or in one of the rooms
that handle what arrives and what is due, once."""

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dovetail.runtime.engine.coordinator import Coordinator
from dovetail.runtime.engine.running import RunningRequest


class Sabotage(Exception):
    """A fault of the coordinator's that was meant to be."""


class Panic(BaseException):
    """A fault of the coordinator's that was meant to be and, like a panic of a library, is no
    `Exception`."""


SABOTAGED = (
    *(
        ("session", name)
        for name in (
            "verified",
            "drafted",
            "opened",
            "prefilled",
            "sent",
            "draft_lost",
            "target_lost",
            "recovered",
            "cancel",
            "result",
        )
    ),
    *(
        ("session", name)
        for name in (
            "next_round",
            "_commit",
            "_decided",
            "_verify",
            "_join",
            "_finish",
            "_open_target",
            "_open_draft",
        )
    ),
    *(
        ("live", name)
        for name in (
            "answered",
            "left",
            "waits",
            "awaits",
            "report_round",
            "round_ended",
            "interrupted",
            "over",
        )
    ),
    *(("controller", name) for name in ("learn", "plan", "sends", "rate", "leave", "work_with")),
    ("detokenizer", "push"),
    ("detokenizer", "flush"),
)
"""Methods of the coordinator about one session that a fault may be planted in."""


HANDLERS = {
    "_answers": (
        "_drafted _verified _opened _prefilled _part_read _scored _refed _probed _fed _verdict "
        "_passed _answer _go_on_alone _failed _open_anew _verify_without_tree"
    ),
    "_intake": "take _submit _change",
    "_starting": "_start _run admit",
    "_peers": "admitted join probe look_after strike newcomer",
    "_sessions": "start plan cancel close_on _next_round",
    "_dispatch": "ask resume _left _close _postpone _release",
    "_moving": (
        "seek drop_draft draft_failed lose_target disconnect resettle tick make_room "
        "move refuge has_room suits _recover"
    ),
    "_changes": "swap dismiss step lost failed",
    "_rebalancing": "look step",
    "_placement": "target draft pair target_base reader",
    "_post": "to_worker to_client",
    "_shared.failing": "failed",
    "_census": "load",
    "registry": "admit warnings misfits",
    "_observing": "begin event",
}
"""Rooms of the coordinator, and what in each of them is done about what arrives or is due. What
contains a fault and cleans up behind it, such as `Sessions.fail`, is not among them."""
HANDLED = tuple((room, name) for room, names in HANDLERS.items() for name in names.split())


@dataclass(frozen=True)
class Planted:
    """A fault that waits in a room of the coordinator: where, and what takes it away."""

    words: str
    remove: Callable[[], object]


def sabotage_handler(
    coordinator: Coordinator, which: int, failed: Callable[[str], None]
) -> Planted:
    """Have a room of the coordinator raise the next time that it does what `which` says, once.
    Calls `failed` before, with the words for it."""
    room, name = HANDLED[which % len(HANDLED)]
    owner: Any = coordinator
    for part in room.split("."):
        owner = getattr(owner, part)
    assert callable(getattr(owner, name)), f"{room} has no {name}"
    error = (Sabotage, Panic)[which // len(HANDLED) % 2](f"{room}.{name}")

    def remove() -> None:
        owner.__dict__.pop(name, None)

    def fail(*_: object, **__: object) -> None:
        remove()
        failed(planted.words)
        raise error

    owner.__dict__[name] = fail
    planted = Planted(f"{room}.{name}", remove)
    return planted


def sabotage_session(live: RunningRequest, which: int, failed: Callable[[str], None]) -> str:
    """Have the coordinator fail at a session, the next time that it does with it what `which` says,
    and from then on. Return what that is; `failed` hears of it when it happens."""
    owner, name = SABOTAGED[which % len(SABOTAGED)]
    about: Any = {
        "session": live.session,
        "live": live,
        "controller": live.controller,
        "detokenizer": live.session.reply.detokenizer,
    }[owner]
    error = (Sabotage, Panic)[which % 2](f"{owner}.{name}")

    def fail(*_: object, **__: object) -> None:
        failed(f"{owner}.{name}")
        raise error

    fail.__name__ = name
    setattr(about, name, fail)
    return f"{owner}.{name}"


class Loud(logging.Handler):
    """Records that say that the coordinator is at fault."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []
        self.contained = 0  # faults that were meant to be

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], Sabotage | Panic):
            self.contained += 1
            return
        self.said.append(logging.Formatter().format(record))

    def hear(self, error: BaseException) -> None:
        """Take what a call raised that the loop had planned."""
        if isinstance(error, Sabotage | Panic):
            self.contained += 1
        else:
            self.said.append("".join(traceback.format_exception(error)))


@contextmanager
def hushed(handler: logging.Handler) -> Iterator[None]:
    """The coordinator's log goes to this handler alone."""
    log = logging.getLogger("dovetail.coordinator")
    before = log.handlers, log.propagate, log.level
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.handlers, log.propagate = before[:2]
        log.setLevel(before[2])
