"""Counts of the sessions that run, by their workers; what a worker waits for, and how long."""

from collections.abc import Iterable, Mapping, Sequence

from dovetail.runtime.control.loads import Load, load_of
from dovetail.runtime.engine.running import RUNNING, RunningRequest
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.session.state import State
from dovetail.runtime.telemetry.event_log import Waits

LATE = 0.25
"""A proposal that is overdue is expected to take such a share of what it has taken yet."""


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


def due_s(target: Worker, requests: Mapping[int, RunningRequest], now_ns: int) -> Sequence[float]:
    """Return in how many seconds each proposal for a target's sessions is expected, draft by
    draft."""
    drafts, drafting = dict[bytes, Worker](), State.DRAFTING
    for running in requests.values():
        if (
            running.session.state is drafting
            and running.target is target
            and (draft := running.draft) is not None
            and draft is not target
        ):
            drafts[draft.peer] = draft
    due = list[float]()
    for draft in drafts.values():
        due += _due_of(draft, target, requests, now_ns)
    return due


def _due_of(
    draft: Worker, target: Worker, requests: Mapping[int, RunningRequest], now_ns: int
) -> Sequence[float]:
    """Return in how many seconds each proposal of a draft is expected, in their order, as far as
    nothing else has to be read before."""
    begins_s = ends_s = 0.0
    together, due = draft.turns.together, list[float]()
    room = together
    for number, order in draft.turns.orders:
        running = requests.get(number)
        if not order or running is None:
            break
        sent, wait_s = running.sent, running.controller.order_s
        if not room or (together > 1 and not sent and begins_s == 0.0):
            begins_s, room = ends_s, together
        room -= 1
        if sent:
            elapsed_s = (now_ns - running.mark_ns) / 1e9
            wait_s = max(wait_s - elapsed_s, LATE * elapsed_s)
        wait_s += begins_s
        ends_s = max(ends_s, wait_s)
        if running.target is target:
            due.append(wait_s)
    return due
