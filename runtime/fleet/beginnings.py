"""Rows of running sessions that other requests of the same scope can share, and the room on a
target. Shared rows count once. Pure."""

from collections.abc import Iterator, Mapping

from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.session.request import TOKEN_BYTES, Kept, Request
from dovetail.runtime.session.state import State


def tokens_of(request: Request) -> int:
    """Return the rows of the target's cache that a request may take, including its tree."""
    return request.capacity + request.most_nodes


def held_on(target: Worker, running: Mapping[int, RunningRequest]) -> int:
    """Return the tokens that a target's sessions may take, including moving ones."""
    there = {one.session.number: tokens_of(one.claim) for one in _on(target, running)}
    return sum(there.values()) - target.shelf.shared.saved(there)


def has_room(
    target: Worker, request: Request, running: Mapping[int, RunningRequest], *, reuse: bool
) -> bool:
    """Return whether a request fits next to present sessions; any fits on an idle target."""
    held = held_on(target, running)
    return (
        target.limits.room is None
        or not held
        or held + needs(request, target, running, reuse=reuse) <= target.limits.room
    )


def needs(
    request: Request, target: Worker, running: Mapping[int, RunningRequest], *, reuse: bool
) -> int:
    """Return the additional tokens of a request. `reuse`: rows of other sessions may be shared."""
    if not (reuse and request.may_reuse):
        return tokens_of(request)
    begun = prompts_on_target(running, target, request.scope)
    base = target.shelf.find(request.packed, scope=request.scope, running=begun)
    if base is None or base.session is None or not base.shared:
        return tokens_of(request)
    there = [one.session.number for one in _on(target, running)]
    return tokens_of(request) - target.shelf.shared.saved_by(base.session, base.tokens, there)


def _on(target: Worker, running: Mapping[int, RunningRequest]) -> list[RunningRequest]:
    return [one for one in running.values() if one.target is target and one.loss is None]


WORTH_WAITING = 64  # fewest tokens of a prefix worth waiting for


def prompts_on_target(
    running: Mapping[int, RunningRequest], target: Worker, scope: str
) -> Iterator[Kept]:
    """Yield the prompts of a scope's sessions on a target, with the number of rows read."""
    done = target.turns.done()
    for number, one in running.items():
        request = one.session.request
        if request.scope == scope and one.target is target and one.loss is None and not one.trial:
            tokens = len(request.prompt)
            rows = done.get(number, 0) if one.session.state is State.OPENING else tokens
            yield Kept(number, request.packed, rows, tokens, scope)


def prompts_on_draft(
    running: Mapping[int, RunningRequest], draft: Worker, scope: str
) -> Iterator[Kept]:
    """Yield the prompts of a scope's sessions on a draft, each with its prefilled rows."""
    for number, one in running.items():
        sync, request = one.session.draft_sync, one.session.request
        if (
            request.scope == scope
            and one.draft is draft
            and not one.trial
            and sync is not None
            and sync.complete
            and not draft.turns.reads(number)
        ):
            tokens = len(request.prompt)
            yield Kept(number, request.packed, min(sync.tokens, tokens), tokens, scope)


def comes_later(request: Request, target: Worker, running: Mapping[int, RunningRequest]) -> bool:
    """Return whether a request should wait: its prefix is being read for another session of its
    scope, and it can share those rows."""
    if not (request.may_reuse and target.limits.shares):
        return False
    there = list(prompts_on_target(running, target, request.scope))
    base = target.shelf.find(request.packed, scope=request.scope, running=there)
    begun = None if base is None else running.get(base.session or 0)
    if begun is not None and _draft_reads(begun):
        return True
    worth = WORTH_WAITING + (0 if base is None else base.tokens)
    begins = request.packed[: TOKEN_BYTES * worth]
    return worth < len(request.prompt) and any(
        prompt.rows < prompt.tokens and prompt.log.startswith(begins) for prompt in there
    )


def _draft_reads(running: RunningRequest) -> bool:
    """Return whether the draft of a session prefills its prompt with features."""
    draft, number = running.draft, running.session.number
    if draft is None or draft.hello.reads is None or number in draft.turns.postponed:
        return False
    sync = running.session.draft_sync
    return draft.turns.reads(number) or (sync is not None and not sync.complete)
