"""Prompts that are read beside running streams, in the passes that verify their trees, over real
processes: every reply is the one that it is with nobody beside."""

import itertools
import random
from collections.abc import Sequence

import pytest

from dovetail.launch.settings.models import head_folder
from dovetail.protocol.messages import Emitted, Failed, Finished
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.cases import everyday
from support.kernels import needs_kernels
from support.patience import PATIENCE_S
from support.stacks import running

pytestmark = needs_kernels

TREE = TreeSettings(policy="dynamic", insist=True)
STREAM, REPLY = 96, 24
WORDS = 4000


def words(count: int, seed: int) -> tuple[int, ...]:
    drawn = random.Random(seed)
    return tuple(drawn.randrange(2, WORDS) for _ in range(count))


LONG = [words(count, seed) for seed, count in enumerate((300, 200, 40))]


def ask(client: Client, prompt: Sequence[int], tokens: int, temperature: float) -> int:
    return client.submit(
        tokens=tuple(prompt),
        sampling=Sampling(temperature=temperature),
        max_tokens=tokens,
        seed=5,
        end=(),
        tree=TREE,
    )


def replies(client: Client, temperature: float, *, cancel: bool) -> list[Finished]:
    """A stream, and as it has begun all prompts; `cancel`: one more is given up."""
    stream = ask(client, words(8, 9), STREAM, temperature)
    others: list[int] = []
    ends: dict[int, Finished] = {}
    while not others or not {stream, *others} <= ends.keys():
        reply = client.receive(PATIENCE_S)
        assert reply is not None
        assert not isinstance(reply, Failed), reply
        if isinstance(reply, Emitted) and not others:
            given_up = ask(client, words(400, 10), REPLY, temperature) if cancel else None
            others = [ask(client, prompt, REPLY, temperature) for prompt in LONG]
            if given_up is not None:
                client.cancel(given_up)
        if isinstance(reply, Finished):
            ends[reply.request] = reply
    return [ends[request] for request in (stream, *others)]


@pytest.mark.parametrize(
    ("draft", "temperatures"),
    everyday(itertools.product(["small", "dovetail"], [(0.0,), (1.0,)]), ("small", (1.0,))),
)
def test_replies_are_the_same_with_and_without_neighbours(
    draft: str, temperatures: Sequence[float]
) -> None:
    chosen = (
        {"draft.kind": "small"} if draft == "small" else {"draft.model": str(head_folder(draft))}
    )
    with running({"draft.device": "cpu", "coordinator.reuse": "false", **chosen}) as client:
        for temperature in temperatures:
            alone = [
                client.complete(ask(client, prompt, tokens, temperature))
                for prompt, tokens in ((words(8, 9), STREAM), *((prompt, REPLY) for prompt in LONG))
            ]
            beside = replies(client, temperature, cancel=True)
            for expected, found in zip(alone, beside, strict=True):
                assert found.result.token_ids == expected.result.token_ids
                assert found.margins == expected.margins
                assert found.result.accepted_tokens > 0
