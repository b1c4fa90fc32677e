"""Real processes whose draft is on a pretended GPU write what the target writes alone, and as much
of it is drafted as by the CPU's draft."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dovetail.protocol.messages import Finished
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from pretended.device import POSSIBLE, PROFILES, capped, lacking
from support.losslessness import difference
from support.stacks import PROMPTS, complete_all, running

pytestmark = pytest.mark.skipif(
    not POSSIBLE, reason="this version of torch cannot be told of a device from Python"
)

TREE = TreeSettings(policy="dynamic", insist=True, gamma=15, depth=8, width=10)
TOKENS = 14
HEAD = {"draft.kind": "dovetail", "draft.device": "pretended"}


def replies(client: Client, tree: TreeSettings | None) -> list[Finished]:
    """A greedy reply and a sampled one side by side, then the greedy one again, which goes on from
    what is kept; the draft grows ahead."""
    found = []
    for temperatures in ((0.0, 1.0), (0.0,)):
        samplings = [
            Sampling(temperature=temperature, min_tokens=TOKENS) for temperature in temperatures
        ]
        how = (
            {"tree": TreeSettings(), "speculate": False}
            if tree is None
            else {"tree": tree, "ahead": True}
        )
        found += complete_all(
            client,
            [
                client.submit(turns=PROMPTS[0][:1], sampling=s, max_tokens=TOKENS, seed=5, **how)
                for s in samplings
            ],
        )
    return found


@contextmanager
def pretended(kind: str) -> Iterator[Client]:
    """A client of processes whose draft, of this kind, is on a pretended GPU."""
    if kind == "substitute":
        pytest.importorskip(
            "hqq", reason="hqq is not installed: pip install 'dovetail-llm[subspec]'"
        )
    with running({"draft.kind": kind, "draft.device": "pretended"}) as client:
        yield client
        worker = next(worker for worker in client.status().workers if worker.roles == ("draft",))
        assert worker.device == "pretended:0"
        assert not client.status().faults


def check(there: list[Finished], alone: list[Finished]) -> None:
    """Check that the replies that were drafted there are the target's own, and that much was
    drafted."""
    for one, reference in zip(there, alone, strict=True):
        assert difference(one, reference.result.token_ids) is None
        assert one.result.draft_failure is None
        assert one.result.tau is not None
        assert one.result.tau > 1.5


def test_a_head_there_drafts_and_changes_nothing() -> None:
    with pretended("dovetail") as client:
        check(replies(client, TREE), replies(client, None))


@pytest.mark.slow
def test_a_draft_whose_memory_runs_out_changes_nothing() -> None:
    """The draft's device has room for its head and five sessions, or for three that draft."""
    sampling = Sampling(min_tokens=TOKENS)
    found = []
    with capped(11_000_000), running(HEAD) as client:
        for how in ({"tree": TREE, "ahead": True}, {"tree": TreeSettings(), "speculate": False}):
            asked = [
                client.submit(turns=turns[:1], sampling=sampling, max_tokens=TOKENS, seed=5, **how)
                for turns in PROMPTS[:6]
            ]
            found.append(complete_all(client, asked))
    there, alone = found
    for one, reference in zip(there, alone, strict=True):
        assert difference(one, reference.result.token_ids) is None
    failures = [one.result.draft_failure for one in there]
    assert any(failure and "the worker is out of memory" in failure.error for failure in failures)
    assert max(one.result.tau or 0.0 for one in there) > 1.5


@pytest.mark.slow
def test_a_target_under_a_hard_cap_serves_whoever_it_admits() -> None:
    """The others wait for their turn, and no pass fails for want of memory."""
    placed = {"target.device": "pretended", "target.weights": "half", "memory.vram": "96MB"}
    with running({**placed, "draft.kind": "dovetail"}) as client:
        asked = [
            client.submit(turns=turns[:1], max_tokens=TOKENS, seed=5, tree=TREE)
            for turns in PROMPTS[:6]
        ]
        found = complete_all(client, asked)
        status = client.status()
    target = next(worker for worker in status.workers if worker.roles == ("target",))
    assert target.placement.startswith("pretended:0 ")
    assert not status.faults
    assert all(one.result.token_ids and one.result.draft_failure is None for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dovetail", "substitute"])
def test_a_draft_there_drafts_as_well_as_one_here(kind: str) -> None:
    with pretended(kind) as client:
        there = replies(client, TREE)
        check(there, replies(client, None))
    with running({"draft.kind": kind, "draft.device": "cpu"}) as client:
        here = replies(client, TREE)
    for one, other in zip(there, here, strict=True):
        assert one.result.tau is not None
        assert other.result.tau is not None
        assert one.result.tau > 0.8 * other.result.tau


PLACED = {
    "draft": {"draft.kind": "dovetail", "draft.device": "pretended"},
    "small draft": {"draft.kind": "small", "draft.device": "pretended"},
    "split": {"target.split.device": "pretended", "target.split.layers": "2"},
    "streamed": {"target.device": "pretended", "target.resident": "0"},
    "unified": {"draft.kind": "substitute", "draft.share": "true", "target.device": "pretended"},
}
"""Settings that put a draft or a target there."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placed", "maker"), [*zip(PLACED, itertools.cycle(sorted(PROFILES)), strict=False)]
)
def test_what_gpus_of_other_makers_lack_changes_no_token(placed: str, maker: str) -> None:
    """A substitute's codes need int4 there, which some of AMD's and Apple's have."""
    lacks = PROFILES[maker] - ({"int4"} if placed == "unified" else set())
    if placed == "unified":
        pytest.importorskip(
            "hqq", reason="hqq is not installed: pip install 'dovetail-llm[subspec]'"
        )
    with lacking(lacks), running(PLACED[placed]) as client:
        there, alone = replies(client, TREE), replies(client, None)
        workers = client.status().workers
        assert any("pretended" in f"{worker.device} {worker.placement}" for worker in workers)
        assert not client.status().faults
    check(there, alone)
