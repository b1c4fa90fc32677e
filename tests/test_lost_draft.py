"""A draft worker that dies or falls silent in the middle of replies: the target goes on alone, and
writes what it writes without a draft."""

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dovetail.launch.processes.supervise import Child
from dovetail.protocol.messages import Emitted, Finished
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.inflated import inflated
from support.losslessness import difference
from support.patience import PATIENCE_S
from support.stacks import PROMPTS, complete_all, growing, started, submit
from support.vocabularies import fewer_merges

TREE = TreeSettings(policy="dynamic", insist=True, gamma=4, depth=3, width=2)
TOKENS = 160
TEMPERATURES = (0.0, 1.0)


def ask(client: Client, tree: TreeSettings | None = TREE, tokens: int = TOKENS) -> list[int]:
    """A greedy request and a sampled one that are long enough for something to happen meanwhile."""
    samplings = [
        Sampling(temperature=temperature, min_tokens=tokens) for temperature in TEMPERATURES
    ]
    return [
        submit(client, PROMPTS[0], sampling=sampling, tokens=tokens, seed=3, tree=tree)
        for sampling in samplings
    ]


def interrupted(
    client: Client, interrupt: Callable[[], object]
) -> list[tuple[Finished, list[bool]]]:
    """Replies during which something happens, once there are drafted tokens in both; with each,
    which of all its tokens were drafted."""
    drafted, ends, done = (
        {request: list[bool]() for request in ask(client)},
        dict[int, Finished](),
        False,
    )
    while len(ends) < len(drafted):
        reply = client.receive(PATIENCE_S)
        assert isinstance(reply, Emitted | Finished), reply
        if isinstance(reply, Finished):
            ends[reply.request] = reply
            continue
        drafted[reply.request] += reply.drafted
        if not done and all(map(any, drafted.values())):
            assert not ends
            interrupt()
            done = True
    return [(ends[request], flags) for request, flags in drafted.items()]


def check_end_alone(
    replies: Sequence[tuple[Finished, list[bool]]], alone: Sequence[Finished]
) -> None:
    """The tokens are those of the target alone, and the last of them were not drafted."""
    for (finished, drafted), reference in zip(replies, alone, strict=True):
        assert difference(finished, reference.result.token_ids) is None
        assert len(drafted) == TOKENS
        assert not any(drafted[-8:]), "the reply was over before the draft"


def kill(draft: Child) -> None:
    draft.process.kill()
    draft.process.wait()


def kill_while_it_is_waited_for(draft: Child) -> None:
    """A stopped worker owes its answer for certain when it dies."""
    draft.process.send_signal(signal.SIGSTOP)
    kill(draft)


@pytest.mark.slow
@pytest.mark.parametrize("end", [kill, kill_while_it_is_waited_for])
def test_replies_whose_draft_is_killed_are_those_of_the_target_alone(
    end: Callable[[Child], None],
) -> None:
    with started({**inflated("64MiB", "dovetail"), "draft.device": "cpu"}) as (stack, client):
        alone = complete_all(client, ask(client, tree=None))
        check_end_alone(interrupted(client, lambda: end(stack.workers[1])), alone)
        assert [worker.roles for worker in client.status().workers] == [("target",)]
        for later, reference in zip(complete_all(client, ask(client)), alone, strict=True):
            assert (later.result.token_ids, later.result.drafted_tokens) == (
                reference.result.token_ids,
                0,
            )


@pytest.mark.slow
def test_a_draft_that_falls_silent_is_done_without_until_it_speaks_again() -> None:
    with started({**inflated("64MiB", "dovetail"), "draft.device": "cpu"}) as (stack, client):
        alone, draft = complete_all(client, ask(client, tree=None)), stack.workers[1].process
        check_end_alone(interrupted(client, lambda: draft.send_signal(signal.SIGSTOP)), alone)
        draft.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + PATIENCE_S
        drafted = False
        while not drafted:
            assert time.monotonic() < deadline, "it answers again, and nobody asks it"
            again = complete_all(client, ask(client))
            drafted = all(later.result.drafted_tokens for later in again)
            assert [
                difference(later, reference.result.token_ids)
                for later, reference in zip(again, alone, strict=True)
            ] == [None, None]


MANY = 900
"""Tokens of replies that go on until another draft is there."""


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["dovetail", "small", "another vocabulary"])
def test_drafting_goes_on_in_replies_that_run_when_another_draft_worker_is_there(
    draft: str, tmp_path: Path
) -> None:
    draft = str(fewer_merges(tmp_path / "draft")) if draft == "another vocabulary" else draft
    with growing({**inflated("256MiB", draft), "draft.device": "cpu"}) as (stack, client, another):
        alone = complete_all(client, ask(client, tree=None, tokens=MANY))
        drafted, ends = (
            {request: list[bool]() for request in ask(client, tokens=MANY)},
            dict[int, Finished](),
        )
        lost_at: list[int] = []
        while len(ends) < len(drafted):
            reply = client.receive(PATIENCE_S)
            assert isinstance(reply, Emitted | Finished), reply
            if isinstance(reply, Finished):
                ends[reply.request] = reply
                continue
            drafted[reply.request] += reply.drafted
            if not lost_at and all(map(any, drafted.values())):
                kill(stack.workers[1])
                another("draft")
                lost_at = [len(flags) for flags in drafted.values()]
        for (request, flags), reference, begun in zip(drafted.items(), alone, lost_at, strict=True):
            assert difference(ends[request], reference.result.token_ids) is None
            without = next(
                place for place in range(begun, len(flags)) if not any(flags[place : place + 16])
            )
            assert any(flags[without:]), "no token was drafted after the loss"
