"""Targets and drafts with states in their layers, with attention over latents, experts or inputs of
the layers, in real processes and wherever layers are: the same tokens with and without speculation,
from kept sessions, and after a worker was killed."""

from pathlib import Path

import pytest

from dovetail.protocol.messages import Emitted, Failed, Finished
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.architectures import VARIED, VOCABULARY, write_tiny
from support.heads import write_head
from support.kernels import needs_kernels
from support.patience import PATIENCE_S
from support.stacks import complete_all, growing

pytestmark = [needs_kernels, pytest.mark.slow]

TREE = TreeSettings(policy="dynamic", insist=True, gamma=12, depth=4, width=4)
TOKENS = 60


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


PLACED = {
    "whole": {},
    "split": {"target.split.device": "cpu", "target.split.layers": "3", "target.resident": "1"},
    "streamed": {"target.resident": "1"},
    "read": {"target.prefill": "cpu"},
    "mixer": {"target.split.device": "cpu", "target.split.experts_on_cpu": "true"},
}


@pytest.mark.parametrize(
    ("kind", "weights", "placed", "draft"),
    [
        ("qwen3_5_text", "fp32", "whole", "small"),
        ("qwen3_5_text", "int8", "whole", "small"),
        ("qwen3_5_text", "fp32", "split", "eagle"),
        ("falcon_h1", "int8", "streamed", "small"),
        ("nemotron_h", "fp32", "read", "ngram"),
        ("qwen3_next", "fp32", "mixer", "small"),
        ("deepseek_v3", "fp32", "split", "eagle3"),
        ("youtu", "int8", "streamed", "small"),
        ("deepseek_v2", "int8", "mixer", "ngram"),
        ("qwen3_moe", "fp32", "whole", "shared"),
        ("qwen3_5_text", "int8", "whole", "shared"),
        ("gemma4_text small", "fp32", "whole", "shared"),
        ("deepseek_v3", "fp32", "streamed", "shared"),
        ("gpt_oss", "fp32", "whole", "substitute"),
        ("bamba", "int8", "whole", "substitute"),
    ],
)
def test_a_lost_worker_and_speculation_change_no_token(
    kind: str, weights: str, placed: str, draft: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    write_tiny(kind.split()[0], folder, **(VARIED[kind] | {"max_position_embeddings": 256}))
    flags = {"target.model": str(folder), "target.weights": weights, **PLACED[placed]}
    flags |= {"coordinator.recovery_s": "600"}  # a substitute and its target are loaded again
    if draft == "small":
        flags |= {"draft.model": str(folder), "draft.weights": "int8", "draft.device": "cpu"}
    elif draft in ("shared", "substitute"):
        pytest.importorskip(
            "hqq", reason="hqq is not installed: pip install 'dovetail-llm[subspec]'"
        )
        flags |= {"draft.kind": "substitute", "draft.share": str(draft == "shared").lower()}
        flags |= {"draft.device": "cpu"}
    elif draft == "ngram":
        flags |= {"draft.kind": "ngram"}
    else:
        head = write_head(tmp_path / "head", draft, hidden=64, vocabulary=VOCABULARY)
        flags |= {"draft.kind": draft, "draft.model": str(head), "draft.device": "cpu"}
    with growing(flags) as (stack, client, another):
        temperatures = (0.0, 1.0)
        alone = complete_all(client, [ask(client, t, speculate=False) for t in temperatures])
        asked = [ask(client, t, speculate=True) for t in temperatures]
        tokens: dict[int, list[int]] = {request: [] for request in asked}
        ends: dict[int, Finished] = {}
        killed = False
        while len(ends) < len(asked):
            reply = client.receive(PATIENCE_S)
            assert reply is not None, "nothing was heard"
            assert not isinstance(reply, Failed), reply
            if isinstance(reply, Emitted):
                tokens[reply.request] += reply.tokens
            if isinstance(reply, Finished):
                ends[reply.request] = reply
            if not killed and all(len(heard) > 10 for heard in tokens.values()):
                another("unified" if draft == "shared" else "target")
                stack.workers[0].process.kill()
                killed = True
        assert killed
        for request, plain in zip(asked, alone, strict=True):
            assert ends[request].result.token_ids == plain.result.token_ids
        again = complete_all(client, [ask(client, t, speculate=True) for t in temperatures])
        for finished, plain in zip(again, alone, strict=True):
            assert finished.result.token_ids == plain.result.token_ids
            assert finished.result.draft_failure is None
            assert draft == "ngram" or finished.result.accepted_tokens > 0
