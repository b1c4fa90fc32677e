"""Unusual configurations of families that are decoded: transformers' own logits in fp32, and in
other weights those of transformers' modules with the matrices that the kernels hold."""

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.messages import VerifyItem
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.workers import kernels
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.sessions.results import First, Verdict
from dovetail.workers.verifier import Verifier
from support.architectures import VARIED, VOCABULARY, write_tiny
from support.decoded import logits_of
from support.models import reference_logits
from support.opening import opening
from support.packed import load_with_reference
from support.unusual import unusual

pytestmark = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")

EVERY = 30  # one in so many is tried every day
LENGTH = 44  # tokens that are read: more than most windows here


def rope(kind: str, **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **others}}


def by_type(full: Mapping[str, Any], sliding: Mapping[str, Any]) -> dict[str, Any]:
    both = {"full_attention": full, "sliding_attention": sliding}
    return {"rope_parameters": {kind: one["rope_parameters"] for kind, one in both.items()}}


def heads(heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "hidden_size": 8 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def sizes(hidden: int, units: int) -> dict[str, Any]:
    return {"hidden_size": hidden, "intermediate_size": units, "moe_intermediate_size": units}


def windows(window: int, *windowed: int) -> dict[str, Any]:
    kinds = ["sliding_attention" if i in windowed else "full_attention" for i in range(4)]
    return {"sliding_window": window, "use_sliding_window": True, "layer_types": kinds}


YARN = rope("yarn", factor=6.0, original_max_position_embeddings=16)
RAMP = rope(
    "yarn",
    factor=6.0,
    original_max_position_embeddings=16,
    attention_factor=1.7,
    beta_fast=8.0,
    beta_slow=2.0,
    truncate=False,
)
LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
LINEAR, DYNAMIC = rope("linear", factor=4.0), rope("dynamic", factor=4.0)


def longrope(pairs: int) -> dict[str, Any]:
    factors = {"short_factor": [1.3] * pairs, "long_factor": [3.0] * pairs}
    return rope("longrope", factor=2.0, original_max_position_embeddings=48, **factors)


HALF = rope("default", partial_rotary_factor=0.5)
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
ALONE = {"num_experts": 1, "num_local_experts": 1, "num_experts_per_tok": 1}
ODD = {"num_experts": 7, "num_local_experts": 7, "num_experts_per_tok": 3}
UNGROUPED = {"n_group": 1, "topk_group": 1, "n_routed_experts": 7, "num_experts_per_tok": 3}

UNUSUAL: list[tuple[str, dict[str, Any]]] = [
    *((kind, YARN) for kind in ("llama", "qwen3", "hunyuan_v1_dense", "olmo2")),
    *((kind, LLAMA3) for kind in ("llama", "granite", "nanochat")),
    *((kind, DYNAMIC) for kind in ("glm", "cohere", "starcoder2")),
    *((kind, LINEAR) for kind in ("ernie4_5", "apertus")),
    *((kind, longrope(8)) for kind in ("llama", "phi3")),
    ("stablelm", longrope(2)),  # a quarter of each head is rotated
    *((kind, HALF) for kind in ("phi3", "nemotron", "gpt_neox")),
    ("llama", RAMP),
    ("gemma3_text", by_type(YARN, LINEAR)),
    ("olmo3", by_type(LLAMA3, HALF)),
    ("granite_swa", VARIED["granite_swa"] | {"layer_rope_theta": [0] * 4}),
    *((kind, heads(6, 3, 10)) for kind in ("llama", "gemma2", "olmo2", "exaone4")),
    *((kind, heads(5, 1, 12)) for kind in ("qwen3", "gpt_oss", "nanochat")),
    *((kind, heads(4, 2, 80)) for kind in ("gemma3_text", "phi3")),
    *((kind, heads(2, 2, 2)) for kind in ("llama", "cohere")),
    *((kind, sizes(40, 56)) for kind in ("llama", "gemma2", "qwen3_moe")),
    *((kind, sizes(36, 52)) for kind in ("gpt_oss", "qwen3_next", "nemotron_h")),
    ("olmo2", sizes(40, 52)),  # heads have hidden / 4 numbers, an even number
    *((kind, sizes(72, 31)) for kind in ("llama", "cohere2", "lfm2", "nanochat")),
    *((kind, sizes(8, 8)) for kind in ("gemma3_text", "phi3", "falcon_h1")),
    ("qwen3_moe", {"moe_intermediate_size": 31}),
    ("mixtral", {"intermediate_size": 29}),
    ("gpt_oss", {"intermediate_size": 30}),
    ("deepseek_v3", {"moe_intermediate_size": 33}),
    ("nemotron_h", VARIED["nemotron_h"] | {"moe_latent_size": 27, "moe_intermediate_size": 21}),
    *((kind, {"vocab_size": 49}) for kind in ("llama", "gpt2", "gemma2", "deepseek_v3")),
    *((kind, windows(1, 0, 3)) for kind in ("mistral", "gemma2", "gpt_oss")),
    *((kind, windows(5, 1)) for kind in ("qwen3", "exaone4", "smollm3")),
    *((kind, windows(5, 1)) for kind in ("phi3", "mixtral", "qwen3_moe")),  # all layers have it
    *((kind, windows(200, 0, 1, 2, 3)) for kind in ("olmo3", "cohere2", "granite_swa")),
    *((kind, {"tie_word_embeddings": True}) for kind in ("llama", "qwen3_moe", "nemotron_h")),
    *((kind, {"tie_word_embeddings": False}) for kind in ("gemma2", "gpt2", "cohere")),
    *((kind, CAPS) for kind in ("gemma2", "gemma3_text", "nanochat")),
    *((kind, NO_CAPS) for kind in ("gemma2", "nanochat")),
    *((kind, ALONE) for kind in ("mixtral", "qwen3_moe", "granitemoe")),
    *((kind, ODD) for kind in ("mixtral", "olmoe", "qwen2_moe", "gpt_oss")),
    *((kind, UNGROUPED) for kind in ("glm4_moe", "deepseek_v3")),
    ("qwen3_moe", {"norm_topk_prob": False, "decoder_sparse_step": 2}),
    ("qwen2_moe", {"norm_topk_prob": True, "mlp_only_layers": [0, 2]}),
    ("deepseek_v3", {"first_k_dense_replace": 4}),
    ("glm4_moe", {"first_k_dense_replace": 0, "n_shared_experts": 2, "norm_topk_prob": False}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0}),
    *((kind, {"n_shared_experts": 0}) for kind in ("deepseek_v3", "dots1", "solar_open")),
    *((kind, {"num_shared_experts": 0}) for kind in ("afmoe", "exaone_moe", "hy_v3")),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3_next", {"linear_key_head_dim": 5, "linear_value_head_dim": 7}),
]
"""Model types, and what is unusual of each configuration."""


WEIGHTS: dict[str, dict[str, Any]] = {
    "fp32": {"weights": "fp32"},
    "half": {"weights": "half"},
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
    "int4, activations fp32": {"weights": "int4", "activations": "fp32"},
}
OTHERS = [name for name in WEIGHTS if name != "fp32"]
"""One of them after the other is tried beside fp32: a matrix in integers has any sizes and fields
that are not its own."""
TOLERANCE = 3e-4
DRAWS = 12
"""Texts that are read at most. Where activations are rounded to integers, one that lies between two
may go to either with the least difference, which moves its row, and those that attend to it, by
some percent: so each position has to agree in one of the texts."""
REPLY = 24
DOZEN = 12
CASES = int(os.environ.get("CONFIGURATIONS", "40"))
"""Configurations that are drawn at random; CONFIGURATIONS_FROM is the number of the first."""
FIRST_CASE = int(os.environ.get("CONFIGURATIONS_FROM", "0"))


def text(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (LENGTH,), generator=generator).tolist()


def built(
    kind: str, folder: Path, fields: Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> bool:
    """Write a tiny checkpoint; False where transformers builds none of these fields."""
    try:
        return write_tiny(kind, folder, dtype=dtype, **fields)
    except (ValueError, RuntimeError, AssertionError, AttributeError, TypeError):
        return False


def check_logits(folder: Path, how: Mapping[str, Any]) -> None:
    """Hold the kernels' logits against those of transformers' modules with the same matrices."""
    model, reference = load_with_reference(folder, **how)
    least = torch.full((LENGTH,), torch.inf)
    for seed in range(DRAWS):
        found, expected = logits_of(model, text(seed)), reference(text(seed))
        assert bool(torch.isfinite(found).all())
        least = torch.minimum(least, (found - expected).norm(dim=-1) / expected.norm(dim=-1))
        if float(least.max()) < TOLERANCE:
            return
    wrong = (least >= TOLERANCE).nonzero().flatten().tolist()
    raise AssertionError(f"positions {wrong} differ by {float(least.max()):.1e} in every text")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(
            place, id=f"{kind} {place}", marks=[] if place % EVERY == 0 else [pytest.mark.slow]
        )
        for place, (kind, _) in enumerate(UNUSUAL)
    ],
)
def test_an_unusual_configuration_gives_transformers_logits(place: int, tmp_path: Path) -> None:
    kind, fields = UNUSUAL[place]
    assert write_tiny(kind, tmp_path / "m", **fields)
    assert write_tiny(kind, tmp_path / "half", dtype=torch.bfloat16, **fields)
    model = load_language_model(str(tmp_path / "m"), weights="fp32", device="cpu")
    assert model.backend == "kernels", model.choice
    found, expected = logits_of(model, text(7)), reference_logits(tmp_path / "m", text(7))
    shares = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(shares.max()) < TOLERANCE
    name = [*OTHERS][place % len(OTHERS)]
    check_logits(tmp_path / ("half" if name == "half" else "m"), WEIGHTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(FIRST_CASE, FIRST_CASE + CASES))
def test_a_configuration_drawn_at_random_gives_transformers_logits_or_one_sentence(
    number: int, tmp_path: Path
) -> None:
    kind, fields = unusual(number)
    for name in ("fp32", OTHERS[number % len(OTHERS)]):
        how = WEIGHTS[name]
        dtype = torch.bfloat16 if name == "half" else torch.float32
        if not built(kind, tmp_path / name, fields, dtype):
            pytest.skip(f"transformers builds no {kind} of {fields}")
        try:
            check_logits(tmp_path / name, how)
        except CheckpointError as error:
            said = str(error)
        else:
            continue
        assert said.startswith(str(tmp_path / name))


def branches(of: random.Random, right: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and parents of a tree along the tokens that follow, with others beside each, and now
    and then none of them right."""
    tokens, parents, at = [], [], -1
    for token in right:
        offered = [of.randrange(3, VOCABULARY) for _ in range(of.randint(0, 2))]
        offered += [token] * (of.random() < 0.9)
        places = [*range(len(tokens), len(tokens) + len(offered))]
        tokens, parents = [*tokens, *offered], [*parents, *[at] * len(offered)]
        if not places:
            break
        at = places[-1] if of.random() < 0.9 else places[0]
    return tuple(tokens), tuple(parents)


def decode(
    model: LanguageModel, sampling: Sampling, right: Sequence[int] = (), seed: int = 0
) -> list[int]:
    """The tokens behind a prompt: one at a time, or with trees along those that are right."""
    verifier, of, prompt = Verifier(model, Spans()), random.Random(seed), text(7)[:12]
    tree = TreeSettings(policy="dynamic", gamma=16, depth=5)
    order = opening(1, prompt, key=bytes(16), capacity=90, sampling=sampling, tree=tree)
    (first,) = verifier.open(order)
    assert isinstance(first, First)
    found = [first.token]
    for number in range(1, REPLY + 1):
        tokens, parents = branches(of, right[len(found) :][: of.randint(0, 5)])
        item = VerifyItem(
            session=1, round=number, prefix=len(prompt) + len(found), tokens=tokens, parents=parents
        )
        (verdict,) = verifier.verify([item])
        assert isinstance(verdict, Verdict)
        found += [*(tokens[node] for node in verdict.item.accepted), verdict.item.bonus]
        if len(found) >= REPLY:
            break
    return found[:REPLY]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(FIRST_CASE, FIRST_CASE + 7 * DOZEN, 7))
def test_trees_change_no_token_of_a_configuration_drawn_at_random(
    number: int, tmp_path: Path
) -> None:
    kind, fields = unusual(number)
    if not built(kind, tmp_path / "m", fields):
        pytest.skip(f"transformers builds no {kind} of {fields}")
    for weights in ("fp32", "int8", "int4"):
        try:
            model = load_language_model(str(tmp_path / "m"), weights=weights, device="cpu")
        except CheckpointError as error:
            pytest.skip(str(error))
        for temperature in (0.0, 1.0):
            sampling = Sampling(temperature=temperature)
            alone = decode(model, sampling)
            for seed in range(4):
                assert decode(model, sampling, alone, seed) == alone
