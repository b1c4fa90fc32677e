"""Target and draft with states in their layers, in real processes: the same tokens with and without
speculation, and after a worker was killed."""

from pathlib import Path

import pytest

from dovetail.protocol.messages import Emitted, Failed, Finished
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.architectures import VOCABULARY, write_tiny
from support.kernels import needs_kernels
from support.stacks import SILENCE_S, complete_all, growing

pytestmark = [needs_kernels, pytest.mark.slow]

TREE = TreeSettings(policy="dynamic", insist=True, gamma=12, depth=4, width=4)
TOKENS = 60
SIZES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "max_position_embeddings": 256,
}


def ask(client: Client, temperature: float, *, speculate: bool) -> int:
    return client.submit(
        tokens=tuple(range(3, VOCABULARY)),
        sampling=Sampling(temperature=temperature),
        max_tokens=TOKENS,
        seed=3,
        end=(),
        tree=TREE,
        speculate=speculate,
    )


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_a_lost_worker_and_speculation_change_no_token(weights: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny("qwen3_5_text", folder, **SIZES)
    flags = {
        "target.model": str(folder),
        "target.weights": weights,
        "draft.model": str(folder),
        "draft.weights": "int8",
        "draft.device": "cpu",
    }
    with growing(flags) as (stack, client, another):
        temperatures = (0.0, 1.0)
        alone = complete_all(client, [ask(client, t, speculate=False) for t in temperatures])
        asked = [ask(client, t, speculate=True) for t in temperatures]
        tokens: dict[int, list[int]] = {request: [] for request in asked}
        ends: dict[int, Finished] = {}
        killed = False
        while len(ends) < len(asked):
            reply = client.receive(SILENCE_S)
            assert reply is not None, "nothing was heard"
            assert not isinstance(reply, Failed), reply
            if isinstance(reply, Emitted):
                tokens[reply.request] += reply.tokens
            if isinstance(reply, Finished):
                ends[reply.request] = reply
            if not killed and all(len(heard) > 10 for heard in tokens.values()):
                another("target")
                stack.workers[0].process.kill()
                killed = True
        assert killed
        for request, plain in zip(asked, alone, strict=True):
            assert ends[request].result.token_ids == plain.result.token_ids
