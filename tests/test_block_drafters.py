"""Drafters that predict several positions in one pass, in real processes: they change no token."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from dovetail.protocol.messages import Finished
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.block_heads import write_drafter
from support.cases import everyday
from support.losslessness import difference
from support.models import tiny_llama
from support.parallel_heads import write_parallel_head
from support.stacks import complete_all, running

TREES = {
    "chain": TreeSettings(policy="goodput", insist=True, gamma=3, depth=3, width=1),
    "tree": TreeSettings(policy="dynamic", insist=True, gamma=15, depth=4, width=6),
    "levels": TreeSettings(policy="beam", insist=True, gamma=9, depth=3, width=3),
}
PROMPTS: Sequence[tuple[int, ...]] = (
    (2, 3, 5, 7, 11),
    (13, 17, 19, 21) * 4,
    (23, 29, 31, 37, 41, 43, 2),
)
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.0, top_p=0.95),
    "penalised": Sampling(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5),
}


def replies(
    client: Client,
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    tree: TreeSettings | None,
) -> list[Finished]:
    """Return the ends of requests that run side by side; without a tree: of the target alone."""
    asked = {"sampling": sampling, "max_tokens": 24, "seed": 1, "end": ()}
    requests = [
        client.submit(
            tokens=prompt, tree=tree or TREES["tree"], speculate=tree is not None, **asked
        )
        for prompt in prompts
    ]
    return complete_all(client, requests)


@pytest.mark.parametrize(
    "name",
    everyday(
        ["dflash-z-lab", "dspark-deepspec", "dflash2", "dflash-mixed", "peagle"], "dspark-deepspec"
    ),
)
def test_a_block_drafter_changes_no_token_of_several_sessions_and_of_their_next_turns(
    tmp_path: Path, name: str
) -> None:
    target = tiny_llama(tmp_path / "target", layers=3)
    write = write_parallel_head if name == "peagle" else partial(write_drafter, name=name)
    drafter = write(tmp_path / "draft")
    accepted = 0
    with running(
        {"target.model": str(target), "draft.model": str(drafter), "draft.device": "cpu"}
    ) as client:
        for sampling, tree in zip(SAMPLINGS.values(), TREES.values(), strict=True):
            prompts = PROMPTS
            for _ in range(2):
                alone, drafted = (replies(client, prompts, sampling, one) for one in (None, tree))
                for own, other in zip(drafted, alone, strict=True):
                    assert difference(own, other.result.token_ids) is None
                    assert own.result.drafted_tokens > 0
                    accepted += own.result.accepted_tokens
                prompts = [
                    (*prompt, *end.result.token_ids, 9)
                    for prompt, end in zip(prompts, drafted, strict=True)
                ]
            assert any(end.result.reused_tokens > 0 for end in drafted)
    assert accepted > 0
