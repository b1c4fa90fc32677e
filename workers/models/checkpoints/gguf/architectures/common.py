"""What the config.json of llama.cpp's architectures has in common. Constants of llama.cpp's code
without a key in the file (Gemma's query scale, SmolLM 3's unrotated layers) are constants here,
too."""

import math
from typing import Any

from dovetail.workers.models.checkpoints.gguf.facts import HEADS, KV_HEADS, Facts
from dovetail.workers.models.checkpoints.gguf.files import numbers_of
from dovetail.workers.models.checkpoints.gguf.kinds import BF16, F16, F32

Configuration = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
BASE = 10000.0  # the default base of rotation: llama.cpp's, for every architecture
UNTIED = frozenset(
    (
        *("dots1", "gpt-oss", "gptneox", "minimax-m2", "nemotron", "olmo2", "olmoe", "phi2"),
        *("qwen2moe", "stablelm"),
    )
)
"""Architectures that llama.cpp does not load without output.weight; elsewhere the embedding
replaces it."""
ROTATED_IN_PART = frozenset(
    (
        *("phi3", "glm4", "glm4moe", "qwen3next", "qwen35", "qwen35moe", "minimax-m2"),
        *("stablelm", "phi2", "gptneox", "nemotron", "granitehybrid"),
    )
)
"""Architectures whose model in transformers can rotate a part of a head."""


def common(facts: Facts, kv_heads: int | None = None) -> Configuration:
    """Return what all architectures but GPT-2's have; `kv_heads`: if the file has a list."""
    sizes = sizes_of(facts)
    return {
        **sizes,
        "num_key_value_heads": facts.whole(KV_HEADS, sizes["num_attention_heads"])
        if kv_heads is None
        else kv_heads,
        "intermediate_size": facts.whole(
            "feed_forward_length"
            if "feed_forward_length" in facts
            else "expert_feed_forward_length"
        ),
        "rope_parameters": rotation(facts, sizes["head_dim"]),
    }


def sizes_of(facts: Facts) -> Configuration:
    """Return sizes that do not differ from layer to layer."""
    hidden, heads = facts.whole("embedding_length"), facts.whole(HEADS)
    if not 0 < heads <= hidden:
        raise facts.refusal(f"it has {heads} heads in a width of {hidden}")
    head = facts.whole("attention.key_length", hidden // heads)
    if facts.whole("attention.value_length", hidden // heads) != head:
        raise facts.refusal("its values are of another width than its keys")
    return {
        **everywhere(facts),
        "hidden_size": hidden,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": heads,
        "head_dim": head,
        "max_position_embeddings": facts.whole("context_length"),
    }


def everywhere(facts: Facts) -> Configuration:
    """Return what all architectures have in common."""
    if facts.architecture in UNTIED:
        facts.need("output.weight")
    matrix = facts.tensors.get("blk.0.ffn_down.weight")
    kinds = {F16: "float16", BF16: "bfloat16"}
    return {
        "dtype": kinds.get(F32 if matrix is None else matrix.kind, "float32"),
        "vocab_size": facts.need("token_embd.weight").shape[0],
        "tie_word_embeddings": "output.weight" not in facts.tensors,
    }


def rotation(facts: Facts, head: int) -> Configuration:
    """Return the rotation of queries and keys: base, scaling, and factors of `rope_freqs`."""
    rotated = facts.whole("rope.dimension_count", head)
    found: Configuration = {
        "rope_type": "default",
        "rope_theta": facts.positive("rope.freq_base", BASE),
    }
    if not 0 < rotated <= head or rotated % 2:
        raise facts.refusal(f"it rotates {rotated} numbers of a head of {head}")
    if rotated != head and facts.architecture not in ROTATED_IN_PART:
        raise facts.refusal(f"it rotates {rotated} numbers of a head of {head}, not all")
    if facts.architecture in ROTATED_IN_PART:  # for some, transformers has its own share
        found["partial_rotary_factor"] = rotated / head
    unsaid = "linear" if facts.real("rope.scaling.factor", 1.0) != 1.0 else "none"
    kind = facts.text("rope.scaling.type", unsaid)
    if kind == "none":  # Hunyuan's, whose scaling is in its base
        facts.whole("rope.scaling.original_context_length", 0)
        if (factor := facts.real("rope.scaling.factor", 1.0)) != 1.0:
            raise facts.refusal(f"it scales its rotation by {factor} in no way")
    if "rope_freqs.weight" in facts.tensors:
        if kind != "none":
            raise facts.refusal(f"it has both rope_freqs and a scaling of kind {kind}")
        return {**found, **factors_of(facts, "rope_freqs.weight", "rope_freqs.weight")}
    if kind == "linear":
        return {**found, "rope_type": "linear", "factor": facts.positive("rope.scaling.factor")}
    if kind == "yarn":
        return {**found, **_yarn(facts)}
    if kind not in ("none", "longrope"):
        raise facts.refusal(f"its rotation is scaled in the way {kind[:50]!r}, not known here")
    return found


def factors_of(facts: Facts, short: str, long: str, attention: float = 1.0) -> Configuration:
    """Factors of frequencies, one table for texts up to the original length and one beyond."""
    lists = [numbers_of(facts.model, facts.need(name).name) for name in (short, long)]
    same = short == long
    return {
        "rope_type": "longrope",
        "short_factor": lists[0],
        "long_factor": lists[1],
        "attention_factor": attention,
        "original_max_position_embeddings": facts.whole("context_length")
        if same
        else _original(facts),
    }


def _original(facts: Facts) -> int:
    """Return the context length before the rotation was scaled."""
    return facts.whole("rope.scaling.original_context_length", facts.whole("context_length"))


def _yarn(facts: Facts) -> Configuration:
    if facts.real("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise facts.refusal("its yarn mixes in another measure than all (yarn_ext_factor)")
    found: Configuration = {
        "rope_type": "yarn",
        "factor": facts.positive("rope.scaling.factor"),
        "original_max_position_embeddings": _original(facts),
        "beta_fast": facts.real("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": facts.real("rope.scaling.yarn_beta_slow", 1.0),
    }
    usual = 0.1 * math.log(found["factor"]) + 1 if found["factor"] > 1 else 1.0
    for key in ("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"):
        own = (1.0, usual) if "yarn" in key else (1.0,)  # llama.cpp replaces it by the usual value
        if key in facts and min(abs(facts.real(key) - factor) for factor in own) > 1e-5:
            raise facts.refusal(f"its yarn scales attention by {facts.real(key)} (key {key})")
    return found


def with_rms(facts: Facts) -> Configuration:
    """Return what architectures with RMS norms have in common."""
    return {**common(facts), "rms_norm_eps": facts.epsilon("attention.layer_norm_rms_epsilon")}


def pattern(facts: Facts, every: int) -> list[str]:
    """Return the types of layers: all but every n-th have a window; n = 0: all."""
    key, layers = "attention.sliding_window_pattern", range(facts.layers)
    if facts.is_list(key):
        windows = facts.numbers(key)[: len(layers)]
    else:
        every = facts.whole(key, every)
        windows = [int(every == 0 or (index + 1) % every > 0) for index in layers]
    if len(windows) != len(layers):
        raise facts.refusal(f"it has window flags for {len(windows)} layers")
    return [SLIDING if window else FULL for window in windows]


def has_bias(facts: Facts, name: str) -> bool:
    """Return whether a linear of the first layer has a bias."""
    return f"blk.0.{name}.bias" in facts.tensors
