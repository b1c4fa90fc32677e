"""The prompts of running sessions, with whose rows other requests of the same owner can begin.
Workers and sessions are looked at, and nothing is changed."""

from collections.abc import Callable, Iterator, Mapping

from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.fleet.prefix_cache import common_tokens
from dovetail.runtime.session.kept import Kept
from dovetail.runtime.session.request import Request
from dovetail.runtime.session.state import State

WORTH_WAITING = 64
"""The fewest tokens of a beginning for which a request waits: to read fewer takes hardly longer
than the pass that it would wait for."""


def prompts(
    running: Mapping[int, RunningRequest],
    worker: Worker,
    owner: str,
    rows: Callable[[RunningRequest], int],
) -> Iterator[Kept]:
    """Yield the prompts of an owner's sessions that run on a worker, each with its number of
    `rows`."""
    for number, one in running.items():
        request = one.session.request
        if request.owner == owner and worker in one.workers and not one.trial:
            yield Kept(number, request.packed, rows(one), len(request.prompt), owner)


def read_by_target(running: RunningRequest) -> int:
    """Return how many rows of its prompt the target of a session has."""
    if running.session.state is State.OPENING:
        return running.target.turns.done(running.session.number)
    return len(running.session.request.prompt)


def read_by_draft(running: RunningRequest) -> int:
    """Return how many rows of its prompt the draft of a session has: all or none."""
    sync, draft = running.session.draft_sync, running.draft
    if sync is None or draft is None or not sync.complete:
        return 0
    prompt = len(running.session.request.prompt)
    return 0 if draft.turns.reads(running.session.number) else min(sync.tokens, prompt)


def comes_later(request: Request, target: Worker, running: Mapping[int, RunningRequest]) -> bool:
    """Return whether a request should wait before it begins on a target: its beginning is being
    read for another session of its owner, by this target or by that session's draft, and it can
    share those rows once they are there."""
    if not (request.may_reuse and target.limits.shares):
        return False
    there = list(prompts(running, target, request.owner, read_by_target))
    base = target.shelf.find(request.packed, owner=request.owner, running=there)
    if base is not None and base.session in running and _draft_reads(running[base.session]):
        return True
    worth = WORTH_WAITING + (0 if base is None else base.tokens)
    return any(
        prompt.rows < prompt.tokens
        and worth <= min(common_tokens(request.packed, prompt.log), len(request.prompt) - 1)
        for prompt in there
    )


def _draft_reads(running: RunningRequest) -> bool:
    """Return whether the draft of a session reads its prompt, and features with it."""
    draft, number = running.draft, running.session.number
    if draft is None or draft.hello.reads is None or number in draft.turns.postponed:
        return False
    sync = running.session.draft_sync
    return draft.turns.reads(number) or (sync is not None and not sync.complete)
