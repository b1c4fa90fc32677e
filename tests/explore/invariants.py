"""The promises that every schedule must keep, each a function that raises `Broken`.

Knows no faults and no scheduler: what it looks at is handed in.
"""

import gc
from collections.abc import Mapping, Sequence
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, NoReturn

from dovetail.protocol.messages import Failed
from dovetail.runtime.engine.coordinator import Coordinator
from dovetail.runtime.engine.running import MOST_LOSSES, RunningRequest
from dovetail.runtime.engine.shared import WaitingRequest
from dovetail.runtime.fleet.peers import ClientPeer, Worker
from dovetail.runtime.session.session import Session
from explore.clock import Time
from explore.processes import Process
from explore.told import Told
from explore.wires import FaultyHub

if TYPE_CHECKING:
    from explore.coordinators import Machine


class Broken(AssertionError):
    """A promise that was not kept: its name, and how."""

    def __init__(self, promise: str, how: str, form: str = "") -> None:
        """`form` tells ways apart in which it may be broken."""
        super().__init__(f"{promise}: {how}")
        self.promise = f"{promise}: {form}" if form else promise


def committed_prefix_only_grows(before: Sequence[int], now: Sequence[int]) -> None:
    """Check that a session's committed tokens begin with all that it had committed before."""
    if tuple(now[: len(before)]) != tuple(before):
        _broken(
            committed_prefix_only_grows, f"committed are {[*now]}, and before it was {[*before]}"
        )


def every_request_ends_exactly_once(told: Told, request: int) -> None:
    """Nothing is said of a request that has ended."""
    if told.end is not None:
        _broken(
            every_request_ends_exactly_once, f"request {request} has ended, and more is told of it"
        )


def every_request_ends(requests: Mapping[int, Told]) -> None:
    """A request whose client waits for it has been told its end."""
    waits = [request for request, told in requests.items() if told.open]
    if waits:
        _broken(every_request_ends, f"requests {waits} did not end")


def nothing_told_differs(told: Told) -> None:
    """Tokens, text and log-probabilities so far are the beginning of the undisturbed reply: none
    is twice, none is left out, none is another."""
    reply = told.undisturbed
    if tuple(told.tokens) != reply.tokens[: len(told.tokens)]:
        _broken(nothing_told_differs, f"told {told.tokens}, undisturbed {reply.tokens}")
    if not reply.text.startswith(told.text):
        _broken(nothing_told_differs, f"told {told.text!r}, undisturbed {reply.text!r}")
    for what, ours, theirs in (
        ("log-probabilities", told.logprobs, reply.logprobs),
        ("log-probabilities of the prompt", told.scored, reply.scored),
    ):
        if tuple(ours) != theirs[: len(ours)]:
            _broken(nothing_told_differs, f"{what} differ from the undisturbed ones")


def the_end_is_what_was_told(told: Told) -> None:
    """The result of a request repeats what its client was told, and is the undisturbed reply unless
    the client cancelled it."""
    result, margins = told.result, told.finished.margins
    if (list(result.token_ids), result.text, len(margins)) != (
        told.tokens,
        told.text,
        len(told.tokens),
    ):
        _broken(
            the_end_is_what_was_told, f"the result has {result.token_ids}, told was {told.tokens}"
        )
    if told.cancelled and result.finish_reason == "cancelled":
        return
    if told.reply() != told.undisturbed:
        _broken(the_end_is_what_was_told, f"{told.reply()}, undisturbed {told.undisturbed}")


def a_cancel_is_heeded(told: Told) -> None:
    """A request that its client has cancelled brings no tokens that were not there by then, unless
    the coordinator failed at the cancel."""
    if told.most is not None and len(told.tokens) > told.most and not told.sabotaged:
        _broken(a_cancel_is_heeded, f"cancelled at {told.most}, {len(told.tokens)} came")


def an_error_has_a_reason(
    told: Told,
    reply: Failed,
    *,
    bare_s: float | None,
    patience_s: float,
    has_place: bool,
    losses: int,
) -> None:
    """A request fails only where there is no target; one that has begun, where there was none for
    as long as it waits, or one after the other was lost, or those that are there are full; or where
    the coordinator failed at it. `bare_s`: since when there is no target; None: there is one.
    `losses`: targets that were lost since it came."""
    if told.sabotaged and reply.code == "internal":
        return
    if told.cancelled and reply.code == "cancelled" and (told.again or not told.tokens):
        return  # while it waited for room
    if reply.code == "no_target" and not told.tokens:
        if bare_s is None and not told.late:
            _broken(an_error_has_a_reason, f"refused, and there is a target: {reply.text}")
    elif losses < MOST_LOSSES:
        if reply.code != "worker_lost":
            _broken(an_error_has_a_reason, f"{reply.code}: {reply.text}", reply.code)
        if (bare_s or 0.0) < patience_s and has_place and not told.late:
            _broken(
                an_error_has_a_reason,
                f"it failed after {bare_s or 0.0:g} s without a target: {reply.text}",
            )


def no_fault_is_told(said: Sequence[str]) -> None:
    """The coordinator's log has no error but those that were planted."""
    if said:
        _broken(no_fault_is_told, "\n".join(said))


def nothing_leaks(lead: "Machine", processes: Sequence[Process], *, in_memory: bool = True) -> None:
    """When all requests have ended and the last timer has passed, nobody holds anything of them:
    sessions, rows, kept beginnings, queue entries, messages for clients, timers, objects.
    `in_memory`: objects that were made for requests are there, and somebody may refer to them."""
    coordinator = lead.coordinator
    assert coordinator is not None
    if found := [*held(lead, processes), *_kept_otherwise(coordinator, processes)]:
        _broken(nothing_leaks, f"something is left of requests that have ended: {found}")
    if in_memory and (objects := _left_in_memory(coordinator, lead)):
        _broken(nothing_leaks, f"something is left in memory of what has gone: {objects}")


def held(lead: "Machine", processes: Sequence[Process]) -> list[str]:
    """Return in words what coordinators and workers hold of requests."""
    coordinator = lead.coordinator
    assert coordinator is not None
    workers, clients = coordinator.registry.workers.values(), coordinator.registry.clients.values()
    shared = coordinator._shared
    counts: dict[str, int] = {
        "sessions": len(coordinator.requests),
        "requests in the queue": len(shared.queue),
        "sessions of workers": sum(worker.sessions for worker in workers),
        "answers that are owed": sum(len(worker.turns.owed) for worker in workers),
        "commands that wait": sum(len(worker.turns.waiting) for worker in workers),
        "prompts that are put off": sum(len(worker.turns.postponed) for worker in workers),
        "logs that are read in part": sum(len(worker.turns._reading) for worker in workers),
        "void sessions": sum(len(worker.turns.void) for worker in workers),
        "beginnings that are pinned": sum(len(worker.shelf._pinned) for worker in workers),
        "messages for clients": sum(len(client.outbox) for client in clients),
        "requests of clients": sum(
            len(client.sessions) + len(client.reading) for client in clients
        ),
        "last words": len(coordinator._post._farewells),
        "workers to part with": len(coordinator._peers._gone),
        "sessions to settle": len(coordinator._sessions._unsettled),
        "notes": len(shared.notes),
        "changes of workers": coordinator._changes.under_way + coordinator._rebalancing.under_way,
        "timers": lead.hub.timers,
        "connections of nobody": len(lead.hub._wires) - len(processes),
        "sessions that workers hold": sum(
            len(process.worker.logs) + len(process.worker.begun)
            for process in processes
            if process.worker is not None
        ),
    }
    return [f"{count} {what}" for what, count in counts.items() if count]


def _kept_otherwise(coordinator: Coordinator, processes: Sequence[Process]) -> list[str]:
    """Return in words where the prefix cache and its worker do not agree on what is kept."""
    found = []
    for process in processes:
        if process.wire is None or process.worker is None:
            continue
        worker = coordinator.registry.workers.get(process.wire.peer)
        if worker is None:
            continue
        ours, theirs = {*worker.shelf._kept}, {*process.worker.kept}
        if theirs - ours:
            found.append(f"{worker.name} keeps {theirs - ours}, which the coordinator forgot")
        if shared := {*worker.shelf.shared._groups} - ours:
            found.append(f"rows of {shared} count as shared on {worker.name}")
        if worker.shelf.tokens > worker.shelf.limit:
            found.append(f"{worker.name} is to keep {worker.shelf.tokens} tokens")
    return found


OF_REQUESTS = RunningRequest, Session, WaitingRequest
STRANGERS = Time, FaultyHub, Process, ModuleType, type  # types that are not the coordinator's own


def _left_in_memory(coordinator: Coordinator, lead: "Machine") -> list[str]:
    """Return what the coordinator still refers to of requests, and of peers that have gone."""
    here = {id(worker) for worker in coordinator.registry.workers.values()}
    here |= {id(client) for client in coordinator.registry.clients.values()}
    seen = {id(coordinator), id(lead)}
    left, found = list[object]([coordinator]), list[str]()
    while left:
        for one in _referents(left.pop()):
            if id(one) in seen or isinstance(one, STRANGERS):
                continue
            seen.add(id(one))
            if isinstance(one, OF_REQUESTS) or (
                isinstance(one, Worker | ClientPeer) and id(one) not in here
            ):
                found.append(type(one).__name__)
            elif gc.is_tracked(one):
                left.append(one)
    return found


def _referents(one: object) -> Sequence[object]:
    """Return what an object refers to; of a function, what it has closed over."""
    if isinstance(one, FunctionType):
        return [cell.cell_contents for cell in one.__closure__ or ()]
    return gc.get_referents(one)


def _broken(promise: object, how: str, form: str = "") -> NoReturn:
    raise Broken(promise.__name__, how, form)  # type: ignore[attr-defined]
