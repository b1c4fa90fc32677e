"""Every described family on the kernels: the function of transformers in all weights and in trees,
the same bytes wherever a token is computed, and wrong descriptions that the proof finds."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dovetail.protocol.errors import CheckpointError, SettingsError
from dovetail.workers import kernels
from dovetail.workers.kernels.layer_plan import HeadNorm, Score
from dovetail.workers.models import loading
from dovetail.workers.models.backends import fused
from dovetail.workers.models.backends.stages.engines import TorchEngine
from dovetail.workers.models.families.description import Experts, Family, Growth, LayerSpec, Rope
from dovetail.workers.models.families.names import DESCRIBED
from dovetail.workers.models.families.registry import FAMILIES
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from dovetail.workers.models.states import LAST
from support.architectures import ROPE, VARIED, VOCABULARY, write_tiny, write_varied
from support.decoded import extend, in_a_tree
from support.models import reference_logits

pytestmark = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")

PROMPT, PATH = 40, 12
TYPES = {"fp32": torch.float32, "half": torch.bfloat16, "int8": torch.float32}
TOLERANCE = {"fp32": 1e-4, "half": 1e-4, "int8": 0.3}
NEW = (
    *("smollm3", "glm4", "granite", "olmo3", "exaone4", "cohere2", "apertus"),
    *("qwen3_moe", "glm4_moe", "gpt_oss", "gemma4_text", "gemma4_text small", "llama4_text"),
    *("ministral3", "gpt_neox", "nemotron", "olmo", "gpt2", "opt", "bitnet"),
    *("laguna", "phimoe", "dbrx", "gemma3n_text"),
    *("qwen3_5_text", "qwen3_next", "lfm2", "granitemoehybrid"),
    *("lfm2_moe", "bamba", "falcon_h1", "nemotron_h", "lfm3", "olmo_hybrid", "kimi_linear"),
    *("deepseek_v2", "deepseek_v3"),
)
"""Families that between them take every branch of a description."""
FOUND = r"layer \d+ .*(differ|described|mask of position|reads (keys )?other|chooses other experts)"
NEW_IN_ALL_WEIGHTS = [
    pytest.param(kind, weights, marks=[] if weights == "fp32" else pytest.mark.slow)
    for kind in NEW
    for weights in TYPES
]
"""Weights are a matter of the matrices, which those families have in every place."""


def test_commands_know_the_described_families_without_torch() -> None:
    assert set(FAMILIES) == DESCRIBED


def tokens() -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, VOCABULARY, (PROMPT + PATH,), generator=generator).tolist()


def load(kind: str, folder: Path, weights: str, **given: Any) -> LanguageModel:
    write_varied(kind, folder, dtype=TYPES[weights])
    return load_language_model(
        str(folder), weights=weights, device="cpu", backend="kernels", **given
    )


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], LanguageModel]:
    """Models by type and weights, each written and loaded once."""
    return cache(lambda kind, weights: load(kind, tmp_path_factory.mktemp("model"), weights))


def read(model: LanguageModel, ids: list[int], chunks: list[int]) -> Tensor:
    """The logits [T, V] of all tokens, read in chunks."""
    cache = model.new_cache(len(ids))
    parts = [extend(model, cache, ids[cache.length :][:count]) for count in chunks]
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        *NEW_IN_ALL_WEIGHTS,
        *(
            pytest.param(kind, "fp32", marks=pytest.mark.slow)
            for kind in (*FAMILIES, *(kind for kind in VARIED if " " in kind))
            if kind not in NEW
        ),
    ],
)
def test_a_described_family_is_computed_by_the_kernels_as_by_transformers(
    kind: str, weights: str, loaded: Callable[[str, str], LanguageModel]
) -> None:
    model = loaded(kind, weights)
    assert model.backend == "kernels"
    ids = tokens()
    plain, tree = read(model, ids, [len(ids)]), in_a_tree(model, ids, PROMPT)
    assert torch.equal(plain, tree), "a token in a tree is the token in a text, to the last byte"
    expected = reference_logits(model.checkpoint.folder, ids)
    shares = (plain - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(shares.mean() if weights == "int8" else shares.max()) < TOLERANCE[weights]


@pytest.mark.parametrize(
    ("kind", "weights"), [case for case in NEW_IN_ALL_WEIGHTS if "half" not in case.values]
)
def test_a_row_has_the_same_bytes_in_any_chunk(
    kind: str, weights: str, loaded: Callable[[str, str], LanguageModel]
) -> None:
    model, ids = loaded(kind, weights), tokens()
    whole = read(model, ids, [len(ids)])
    for chunks in ([1] * len(ids), [7] * 8, [17, 1, 34]):
        assert torch.equal(read(model, ids, chunks), whole)


def test_of_several_states_per_token_heads_read_the_first_and_a_gpu_computes_none(
    loaded: Callable[[str, str], LanguageModel],
) -> None:
    model, ids = loaded("gemma3n_text", "fp32"), torch.tensor(tokens())
    segment = Segment(model.new_cache(len(ids)), 0, len(ids))
    rows = ids, torch.arange(len(ids)), [segment]
    _, states = model.forward_with_states(*rows, wanted={0, 1, model.layers, LAST})
    assert {part.shape for part in states.values()} == {(len(ids), model.hidden_size)}
    embedded = model.back_end._model.get_input_embeddings()(ids)  # type: ignore[attr-defined]
    assert torch.equal(states[0], embedded)
    plan = model.back_end._layers[0].plan  # type: ignore[attr-defined]
    with pytest.raises(SettingsError, match=r"computes no layers with several .* use the CPU"):
        TorchEngine(torch.device("cpu")).take(plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        *("gpt_oss", "apertus", "gpt_neox", "gemma3n_text", "gemma4_text", "gemma4_text small"),
        *("bamba", "falcon_h1", "youtu"),
    ],
)
def test_every_tensor_of_a_checkpoint_counts(kind: str, tmp_path: Path) -> None:
    ids, file = tokens(), tmp_path / "model" / "model.safetensors"
    before = read(load(kind, tmp_path / "model", "fp32"), ids, [len(ids)])
    stored = load_file(file)
    # xIELU's least exponent is next to 0, and the last layer's factor stands before a norm
    last = VARIED.get(kind, {}).get("num_hidden_layers", 4) - 1
    of_no_matter = ("act_fn.eps", f"layers.{last}.layer_scalar")
    for name, tensor in stored.items():
        if name.endswith(of_no_matter):
            continue
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2))
        save_file({**stored, name: tensor + 0.05 * tensor.abs().mean() * noise}, file)
        changed = load_language_model(str(tmp_path / "model"), weights="fp32", device="cpu")
        after = read(changed, ids, [len(ids)])
        assert float((after - before).norm()) > 1e-4 * float(before.norm()), name


def spoilt(spec: LayerSpec, how: str) -> LayerSpec:
    said: Any = spec.attention
    attention: dict[str, dict[str, Any]] = {
        "rope": {"rope": Rope() if said.rope is None else None},
        "plain pairs": {"rope": Rope()},
        "pairs": {"rope": Rope(interleaved=True)},
        "backward": {"rope": Rope(backward=True)},
        "window": {"window": getattr(said, "window", 0) + 1},
        "scale": {"scale": said.scale * 1.5},
        "place": {"norm_place": HeadNorm.HEAD_AFTER_ROPE},
        "growth": {"growth": Growth(0.5, 17)},
        "ahead": {"growth": Growth(0.5, 16)},
        "chunk": {"chunk": 9},
        "reads": {"reads": 2},
        "epsilon": {"epsilon": 1e-2},
        "norm": {"query_norm": None},
    }
    router: dict[str, dict[str, Any]] = {
        "weights": {"normalised": False},
        "factor": {"scale": 1.1},
        "correction": {"correction": None},
        "score": {"score": Score.SOFTMAX},
        "groups": {"groups": 1, "chosen_groups": 1},
    }
    if how in attention:
        return replace(spec, attention=replace(said, **attention[how]))
    if how == "residual":
        return replace(spec, residual_scale=0.9)
    if how == "parallel":
        return replace(spec, parallel=True)
    if how == "plus one":
        return replace(spec, norms=replace(spec.norms, plus_one=True))
    assert isinstance(spec.mlp, Experts)
    if how == "shared":
        return replace(spec, mlp=replace(spec.mlp, shared=None))
    return replace(spec, mlp=replace(spec.mlp, router=replace(spec.mlp.router, **router[how])))


def spoilt_layer(family: Family, how: str, config: Any, index: int) -> LayerSpec:
    """A description that is wrong of the last layer alone."""
    spec = family.layer(config, index)
    return spoilt(spec, how) if index == config.num_hidden_layers - 1 else spec


WRONG = {
    "smollm3": ["rope"],
    "llama": ["pairs", "backward", "residual", "parallel", "plus one"],
    "mistral": ["window"],
    "qwen2": ["scale"],
    "qwen3": ["place"],
    "ministral3": ["growth"],
    "llama4_text": ["ahead", "chunk"],
    "gemma4_text small": ["reads"],
    "youtu": ["plain pairs", "scale", "epsilon", "growth", "norm"],
    "glm4_moe": ["weights", "factor", "correction", "score", "groups", "shared"],
}
GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 1, "norm_topk_prob": True}
"""Fields of glm4_moe by which groups matter."""


@pytest.mark.parametrize(("kind", "how"), [(kind, how) for kind in WRONG for how in WRONG[kind]])
def test_a_wrong_description_of_one_layer_is_found(
    kind: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES[kind.split()[0]]
    wrong = replace(family, layer=partial(spoilt_layer, family, how))
    monkeypatch.setattr(fused, "FAMILIES", {kind.split()[0]: wrong})
    monkeypatch.setattr(loading, "try_library", lambda *_: None)  # which may refuse it first
    fields = GROUPED if kind == "glm4_moe" else VARIED.get(kind, {})
    write_tiny(kind.split()[0], tmp_path, **fields)
    with pytest.raises(CheckpointError, match=FOUND):
        load_language_model(str(tmp_path), weights="fp32", device="cpu", backend="kernels")


@pytest.mark.parametrize(
    "kind",
    [
        *("stablelm", "gpt2", "olmo_hybrid"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt_neox", "lfm3")),
    ],
)
def test_what_a_configuration_switches_is_described(kind: str, tmp_path: Path) -> None:
    fields = {
        "stablelm": {"use_parallel_residual": True, "use_qkv_bias": True},
        "gpt2": {"scale_attn_by_inverse_layer_idx": True},
        "olmo_hybrid": VARIED["olmo_hybrid"]
        | {"linear_allow_neg_eigval": False, "rope_parameters": ROPE},
        "lfm3": VARIED["lfm3"] | {"use_sandwich_norm": False, "use_attention_gate": False},
        "gpt_neox": {"use_parallel_residual": False},
    }[kind]
    write_tiny(kind, tmp_path / "model", **fields)
    model = load_language_model(
        str(tmp_path / "model"), weights="fp32", device="cpu", backend="kernels"
    )
    ids = tokens()
    expected = reference_logits(tmp_path / "model", ids)
    shares = (read(model, ids, [len(ids)]) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(shares.max()) < TOLERANCE["fp32"]


@pytest.mark.parametrize(
    ("kind", "field", "words"),
    [
        ("opt", {"do_layer_norm_before": False}, "no norms after residual sums"),
        ("dbrx", {"attn_config": {"rope_theta": 5e5}}, "add rope_theta 500000.0 to rope_param"),
        ("afmoe", {"route_norm": False}, r"route_norm is False, .* \(it computes with True\)"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope is False, which transformers ign"),
        ("phi", {"qk_layernorm": True}, "no layer norms of queries"),
        ("cohere", {"use_qk_norm": True}, "no layer norms of queries"),
    ],
)
def test_what_the_kernels_cannot_compute_of_a_family_is_named(
    kind: str, field: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_tiny(kind, tmp_path / "model", **field)
    with pytest.raises(CheckpointError, match=words):
        load_language_model(
            str(tmp_path / "model"), weights="fp32", device="cpu", backend="kernels"
        )


@pytest.mark.parametrize("given", [{"device": "cpu", "backend": "library"}, {"device": "meta"}])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("youtu", "its attention over latents is not computed by torch"),
        ("qwen3_5_text", "layers with a state are not computed by torch's library"),
    ],
)
def test_what_the_kernels_alone_compute_is_refused_elsewhere_in_a_sentence(
    kind: str, words: str, given: dict[str, str], tmp_path: Path
) -> None:
    write_tiny(kind, tmp_path, **VARIED.get(kind, {}))
    with pytest.raises(CheckpointError, match=words):
        load_language_model(str(tmp_path), weights="fp32", **given)
