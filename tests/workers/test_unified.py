"""Two roles in one process: whose turn it is, and what is refused."""

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from dovetail.protocol.errors import SettingsError
from dovetail.protocol.messages import Close, Closed, Command, Event, Hello
from dovetail.protocol.settings import DraftSettings, MemorySettings, TargetSettings
from dovetail.protocol.spans import Spans
from dovetail.workers.sessions.prefix_cache import KeptSessions, Left
from dovetail.workers.unified import InTurn, Turns, open_unified
from support.models import tiny_llama
from support.patience import PATIENCE_S

CLOSE = Close(epoch=1, session=1)


class Answering:
    """A worker that answers a command in two parts, and notes whether anybody else was at work
    meanwhile."""

    def __init__(
        self, at_work: set[str], name: str, started: threading.Event, leave: threading.Event
    ) -> None:
        self.stale, self.sessions, self.spans = 0, 0, Spans()
        self._at_work, self._name, self._started, self._leave = at_work, name, started, leave
        self.alone = True

    def hello(self, epoch: int) -> Hello:
        raise AssertionError("it introduces itself to nobody here")

    def handle(self, command: Command) -> Iterable[Event]:
        return self._answers()

    def _answers(self) -> Iterator[Event]:
        for part in range(2):
            self._work()
            yield Closed(epoch=1, session=part)

    def _work(self) -> None:
        self._at_work.add(self._name)
        self.alone &= self._at_work == {self._name}
        self._started.set()
        assert self._leave.wait(PATIENCE_S)
        self._at_work.discard(self._name)

    def idle(self) -> bool:
        self._work()
        return True

    def suspend(self) -> KeptSessions[Left]:
        self._work()
        return KeptSessions(0)


def pair() -> tuple[InTurn, InTurn, list[Answering], list[threading.Event], list[threading.Event]]:
    """Two workers that take turns; for each an event that says that it has begun, and one that lets
    it go on."""
    at_work: set[str] = set()
    started, leave = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]
    workers = [
        Answering(at_work, name, started[i], leave[i]) for i, name in enumerate(("target", "draft"))
    ]
    turns = Turns()
    return InTurn(workers[0], turns), InTurn(workers[1], turns), workers, started, leave


def test_the_roles_do_one_command_at_a_time() -> None:
    target, draft, workers, started, leave = pair()
    leave[1].set()
    ran = threading.Thread(target=lambda: list(target.handle(CLOSE)))
    ran.start()
    assert started[0].wait(PATIENCE_S)
    assert not draft.idle()  # it is the target's turn
    waits = threading.Thread(target=lambda: list(draft.handle(CLOSE)))
    waits.start()
    assert not started[1].wait(0.3)
    leave[0].set()
    for thread in (ran, waits):
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert all(worker.alone for worker in workers)


def test_an_answer_that_is_never_fetched_keeps_nobody_waiting() -> None:
    """The link was lost as the first one was sent: both roles forget their sessions all the
    same."""
    target, draft, _, _, leave = pair()
    for event in leave:
        event.set()
    half_done = iter(target.handle(CLOSE))
    next(half_done)
    target.suspend()
    draft.suspend()
    assert draft.idle()


def test_what_cannot_share_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, intermediate_size=128)
    target = TargetSettings(model=str(folder), backend="library")
    with pytest.raises(
        SettingsError,
        match=r"draft\.share = true needs a target and a substitute that the C\+\+ kernels "
        r"compute, and the settings choose the library",
    ):
        open_unified(
            target,
            DraftSettings(kind="substitute"),
            name="unified",
            threads=1,
            memory=MemorySettings(),
        )
    with pytest.raises(SettingsError, match=r"leave draft\.share or draft\.model out"):
        open_unified(
            target,
            DraftSettings(kind="substitute", model="x"),
            name="unified",
            threads=1,
            memory=MemorySettings(),
        )
