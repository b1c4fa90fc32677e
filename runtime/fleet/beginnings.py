"""Finds running sessions whose rows other requests of an owner can begin with. Pure."""

from collections.abc import Iterator, Mapping

from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.session.kept import TOKEN_BYTES, Kept
from dovetail.runtime.session.request import Request
from dovetail.runtime.session.state import State

WORTH_WAITING = 64  # fewest tokens of a beginning to wait for: reading fewer is hardly longer


def prompts_on_target(
    running: Mapping[int, RunningRequest], target: Worker, owner: str
) -> Iterator[Kept]:
    """Yield the prompts of an owner's sessions on a target, with the rows read."""
    done = target.turns.done()
    for number, one in running.items():
        request = one.session.request
        if request.owner == owner and one.target is target and one.loss is None and not one.trial:
            tokens = len(request.prompt)
            rows = done.get(number, 0) if one.session.state is State.OPENING else tokens
            yield Kept(number, request.packed, rows, tokens, owner)


def prompts_on_draft(
    running: Mapping[int, RunningRequest], draft: Worker, owner: str
) -> Iterator[Kept]:
    """Yield the prompts of an owner's sessions that a draft has prefilled, each with its rows."""
    for number, one in running.items():
        sync, request = one.session.draft_sync, one.session.request
        if (
            request.owner == owner
            and one.draft is draft
            and not one.trial
            and sync is not None
            and sync.complete
            and not draft.turns.reads(number)
        ):
            tokens = len(request.prompt)
            yield Kept(number, request.packed, min(sync.tokens, tokens), tokens, owner)


def comes_later(request: Request, target: Worker, running: Mapping[int, RunningRequest]) -> bool:
    """Return whether a request should wait: its beginning is being read for another session of its
    owner, and it can share those rows."""
    if not (request.may_reuse and target.limits.shares):
        return False
    there = list(prompts_on_target(running, target, request.owner))
    base = target.shelf.find(request.packed, owner=request.owner, running=there)
    if base is not None and base.session in running and _draft_reads(running[base.session]):
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
