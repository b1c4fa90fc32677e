"""Counts of the sessions that run, by their workers, and what a worker waits for."""

from collections.abc import Iterable, Mapping

from dovetail.runtime.control.loads import Load, load_of
from dovetail.runtime.engine.running import RUNNING, RunningRequest
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.session.state import State
from dovetail.runtime.telemetry.event_log import Waits


class Census:
    """Counts the sessions that run on the same workers as another one. What was counted holds until
    `forget` is called, since many ask while one message is handled."""

    def __init__(self, running: Mapping[int, RunningRequest]) -> None:
        """`running`: the sessions by their numbers."""
        self._running = running
        self._counted: dict[tuple[int, int, bool], Load] = {}

    def forget(self) -> None:
        """Count anew from now on, because sessions may have begun, ended or moved."""
        self._counted.clear()

    def load(self, running: RunningRequest, *, opening: bool = False) -> Load:
        """Return how much runs on a session's workers, the session itself among it. `opening`:
        sessions whose prompts are being read count, too."""
        key = id(running.target), id(running.draft), opening
        if (known := self._counted.get(key)) is None:
            known = self._counted[key] = self._count(running, opening)
        return known

    def _count(self, running: RunningRequest, opening: bool) -> Load:
        states = {*RUNNING, State.READY, *((State.OPENING,) if opening else ())}
        on_target = on_draft = 0
        for other in self._running.values():
            if other.session.state in states:
                on_target += other.target is running.target
                on_draft += other.draft is running.draft
        return load_of(max(1, on_target), max(1, on_draft if running.draft is not None else 0))


def waits(worker: Worker, requests: Iterable[RunningRequest]) -> Waits:
    """Return what a worker waits for: nothing while it owes an answer; else what the sessions wait
    for that it holds."""
    if worker.turns.owed:
        return ""
    states = {one.session.state for one in requests if worker in one.workers}
    if states & {State.VERIFYING, State.OPENING, State.WAITING}:
        return "target"
    if State.DRAFTING in states:
        return "draft"
    return "coordinator" if states else "no work"
