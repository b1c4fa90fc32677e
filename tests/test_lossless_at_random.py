"""The promise at random: whatever is sampled, whichever draft proposes and however its trees are
shaped, the tokens are those of the target alone.

`LOSSLESS_CASES` says how many cases each draft gets, `LOSSLESS_SEED` which. Each is decoded with
its whole tree in every round, and with as much of it as pays. A difference is told with its case;
its group by itself repeats it.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pytest

from dovetail.launch.settings.models import head_folder
from dovetail.protocol.settings import HEAD_KINDS, Sampling, TreeSettings, misfit
from dovetail.protocol.settings.tree import POLICIES
from dovetail.runtime.client import Client
from support.losslessness import difference, given_up
from support.stacks import PROMPTS, complete_all, running, submit

CASES, SEED = int(os.environ.get("LOSSLESS_CASES", "24")), int(os.environ.get("LOSSLESS_SEED", "0"))
DRAFTS = ("small", "ngram", *(kind for kind in HEAD_KINDS if head_folder(kind).is_dir()))
TOGETHER = 4
"""The requests of a group, which run at a time: their rows share the passes of the target."""


@dataclass(frozen=True)
class Case:
    """A request, and how it is drafted for."""

    turns: tuple[str, ...]
    sampling: Sampling
    tokens: int
    seed: int
    tree: TreeSettings


def cases(draft: str, seed: int, group: int, insist: bool) -> Iterator[Case]:
    """Cases that this draft can do, without end."""
    random = np.random.default_rng([seed, group, *draft.encode()])
    while True:
        sampling = some_sampling(random)
        tokens = max(sampling.min_tokens, int(random.integers(2, 80)))
        case = Case(
            some_turns(random),
            sampling,
            tokens,
            int(random.integers(1 << 32)),
            some_tree(random, insist),
        )
        if misfit(case.sampling, case.tree, draft) is None:
            yield case


def some_turns(random: np.random.Generator) -> tuple[str, ...]:
    """One turn, or three of which the second is an answer."""
    return tuple(
        PROMPTS[i][0] for i in random.integers(len(PROMPTS), size=random.choice([1, 1, 3]))
    )


def some_tree(random: np.random.Generator, insist: bool) -> TreeSettings:
    gamma, depth, width = (int(random.integers(1, most + 1)) for most in (48, 12, 12))
    sharpening = "auto" if random.random() < 0.5 else float(random.uniform(0.3, 2.0))
    return TreeSettings(
        policy=str(random.choice(tuple(POLICIES))),
        insist=insist,
        gamma=gamma,
        depth=depth,
        width=width,
        sharpening=sharpening,
    )


def some_sampling(random: np.random.Generator) -> Sampling:
    """Each processor in about a third of the cases; a quarter is greedy."""
    chosen = {
        "temperature": float(random.uniform(0.05, 1.8)),
        "top_k": int(random.integers(1, 60)),
        "top_p": float(random.uniform(0.3, 1.0)),
        "min_p": float(random.uniform(0.0, 0.3)),
        "repetition_penalty": float(random.uniform(0.8, 1.6)),
        "presence_penalty": float(random.uniform(-1.0, 2.0)),
        "frequency_penalty": float(random.uniform(-1.0, 2.0)),
        "logit_bias": tuple(
            (int(token), float(random.uniform(-10.0, 5.0)))
            for token in sorted(random.choice(4096, 5, replace=False))
        ),
        "min_tokens": int(random.integers(80)),
    }
    wanted = {
        name: value
        for name, value in chosen.items()
        if random.random() < (0.75 if name == "temperature" else 0.35)
    }
    return Sampling.model_validate(wanted)


@pytest.fixture(scope="module")
def client(draft: str, insist: bool) -> Iterator[Client]:
    """Of processes of their own for those that insist, which never have a late proposal."""
    with running({"draft.kind": draft, "draft.device": "cpu"}) as connected:
        yield connected


@pytest.mark.slow
@pytest.mark.parametrize("insist", [True, False], ids=["whole trees", "what pays"], scope="module")
@pytest.mark.parametrize("draft", DRAFTS, scope="module")
@pytest.mark.parametrize("group", range(-(-CASES // TOGETHER)))
def test_random_requests_give_the_tokens_of_the_target_alone(
    client: Client, draft: str, insist: bool, group: int
) -> None:
    before = client.status().stale
    some = list(islice(cases(draft, SEED, group, insist), TOGETHER))
    alone, drafted = (
        complete_all(
            client,
            [
                submit(
                    client,
                    c.turns,
                    sampling=c.sampling,
                    tokens=c.tokens,
                    seed=c.seed,
                    tree=c.tree if speculate else None,
                )
                for c in some
            ],
        )
        for speculate in (False, True)
    )
    differences = [
        difference(finished, reference.result.token_ids)
        for finished, reference in zip(drafted, alone, strict=True)
    ]
    assert differences == [None] * TOGETHER, "\n".join(
        f"{case}: {how}" for case, how in zip(some, differences, strict=True) if how
    )
    status = client.status()
    if insist:
        assert (status.stale, status.reasons) == (0, ())
    late = sum(given_up(finished, c.tree) for finished, c in zip(drafted, some, strict=True))
    assert 0 <= status.stale - before <= late
    assert status.reasons == ()
