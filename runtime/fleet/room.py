"""Room on a target in tokens: its sessions', and what a request needs. Pure."""

from collections.abc import Mapping

from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.fleet.beginnings import prompts_on_target
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.session.request import Request


def tokens_of(request: Request) -> int:
    """Return the rows of the target's cache that a request may take, with its tree."""
    return request.capacity + request.most_nodes


def held_on(target: Worker, running: Mapping[int, RunningRequest]) -> int:
    """Return the tokens that a target's sessions may take, moving ones included."""
    there = {one.session.number: tokens_of(one.claim) for one in _on(target, running)}
    return sum(there.values()) - target.shelf.shared.saved(there)


def has_room(
    target: Worker, request: Request, running: Mapping[int, RunningRequest], *, reuse: bool
) -> bool:
    """Return whether a request fits with those there; an idle target takes any."""
    held = held_on(target, running)
    return (
        target.limits.room is None
        or not held
        or held + needs(request, target, running, reuse=reuse) <= target.limits.room
    )


def needs(
    request: Request, target: Worker, running: Mapping[int, RunningRequest], *, reuse: bool
) -> int:
    """Return the additional tokens of a request. `reuse`: rows of others may be shared."""
    if not (reuse and request.may_reuse):
        return tokens_of(request)
    begun = prompts_on_target(running, target, request.owner)
    base = target.shelf.find(request.packed, owner=request.owner, running=begun)
    if base is None or not base.shared:
        return tokens_of(request)
    there = [one.session.number for one in _on(target, running)]
    return tokens_of(request) - target.shelf.shared.saved_by(base.session, base.tokens, there)


def _on(target: Worker, running: Mapping[int, RunningRequest]) -> list[RunningRequest]:
    return [one for one in running.values() if one.target is target and one.loss is None]
