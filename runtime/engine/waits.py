"""Why a worker is idle, and when proposals are expected."""

from collections.abc import Iterable, Mapping, Sequence

from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.session.state import State
from dovetail.runtime.telemetry.event_log import Waits

LATE = 0.25  # an overdue proposal is expected to take another such share of its elapsed time


def waits(worker: Worker, requests: Iterable[RunningRequest]) -> Waits:
    """Return what a worker waits for: nothing while it owes an answer; else what its sessions wait
    for."""
    if worker.turns.owed:
        return ""
    states = {one.session.state for one in requests if worker in one.workers}
    if states & {State.VERIFYING, State.OPENING, State.WAITING}:
        return "target"
    if State.DRAFTING in states:
        return "draft"
    return "coordinator" if states else "no work"


def due_s(target: Worker, requests: Mapping[int, RunningRequest], now_ns: int) -> Sequence[float]:
    """Return the seconds until each proposal for a target is expected, by draft."""
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
    """Return the seconds until each proposal of a draft is expected, in order, up to the first one
    delayed by a prefill."""
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
