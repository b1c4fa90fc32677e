"""The config.json that stands for a GGUF file: what its keys say, in transformers' words, for each
architecture of llama.cpp that is read here.

Where llama.cpp has a constant in its code and no key in the file (Gemma's query scale, the rotation
of every fourth layer of SmolLM 3), so has this.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dovetail.workers.models.checkpoints.gguf.facts import HEADS, KV_HEADS, Facts
from dovetail.workers.models.checkpoints.gguf.files import numbers_of
from dovetail.workers.models.checkpoints.gguf.kinds import BF16, F16, F32

Configuration = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
LOCAL_BASE = 10000.0
"""Gemma 3's base of rotation in layers with a window, where the file says none."""
ROTATED_IN_PART = frozenset(("phi3", "glm4moe", "qwen35", "qwen35moe", "minimax-m2"))
"""Architectures whose model in transformers can rotate a part of a head."""
BIG_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose queries are scaled by another width."""


def common(facts: Facts, kv_heads: int | None = None) -> Configuration:
    """Return what all architectures but GPT-2 have in common; `kv_heads`: where the file has them
    layer by layer."""
    hidden, heads = facts.whole("embedding_length"), facts.whole(HEADS)
    if not 0 < heads <= hidden:
        raise facts.refusal(f"it has {heads} heads in a width of {hidden}")
    head = facts.whole("attention.key_length", hidden // heads)
    if facts.whole("attention.value_length", head) != head:
        raise facts.refusal("its values are of another width than its keys")
    return {
        **everywhere(facts),
        "hidden_size": hidden,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": facts.whole(KV_HEADS, heads) if kv_heads is None else kv_heads,
        "head_dim": head,
        "intermediate_size": facts.whole(
            "feed_forward_length"
            if "feed_forward_length" in facts
            else "expert_feed_forward_length"
        ),
        "max_position_embeddings": facts.whole("context_length"),
        "rope_parameters": rotation(facts, head),
    }


def everywhere(facts: Facts) -> Configuration:
    """Return what every architecture has."""
    matrix = facts.tensors.get("blk.0.ffn_down.weight")
    kinds = {F16: "float16", BF16: "bfloat16"}
    return {
        "dtype": kinds.get(F32 if matrix is None else matrix.kind, "float32"),
        "vocab_size": facts.need("token_embd.weight").shape[0],
        "tie_word_embeddings": "output.weight" not in facts.tensors,
    }


def rotation(facts: Facts, head: int) -> Configuration:
    """Return the parameters of the rotation of queries and keys: its base, its scaling, and the
    factors that `rope_freqs` divides frequencies by."""
    rotated = facts.whole("rope.dimension_count", head)
    found: Configuration = {
        "rope_type": "default",
        "rope_theta": facts.positive("rope.freq_base", 10000.0),
    }
    if not 0 < rotated <= head or rotated % 2:
        raise facts.refusal(f"it rotates {rotated} numbers of a head of {head}")
    if rotated != head and facts.architecture not in ROTATED_IN_PART:
        raise facts.refusal(
            f"it rotates {rotated} numbers of a head of {head}, where its architecture has all"
        )
    if rotated != head:
        found["partial_rotary_factor"] = rotated / head
    kind = facts.text("rope.scaling.type", "none")
    if "rope_freqs.weight" in facts.tensors:
        if kind != "none":
            raise facts.refusal(f"it has both rope_freqs and a scaling of kind {kind}")
        return {**found, **_factors(facts, "rope_freqs.weight", "rope_freqs.weight")}
    if kind == "linear":
        return {**found, "rope_type": "linear", "factor": facts.positive("rope.scaling.factor")}
    if kind == "yarn":
        return {**found, **_yarn(facts)}
    if kind not in ("none", "longrope"):
        raise facts.refusal(f"its rotation is scaled in the way {kind[:50]!r}, not known here")
    return found


def _factors(facts: Facts, short: str, long: str, attention: float = 1.0) -> Configuration:
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
        else facts.whole("rope.scaling.original_context_length"),
    }


def _yarn(facts: Facts) -> Configuration:
    if facts.real("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise facts.refusal("its yarn mixes in another measure than all (yarn_ext_factor)")
    found: Configuration = {
        "rope_type": "yarn",
        "factor": facts.real("rope.scaling.factor"),
        "original_max_position_embeddings": facts.whole("rope.scaling.original_context_length"),
        "beta_fast": facts.real("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": facts.real("rope.scaling.yarn_beta_slow", 1.0),
    }
    for key in ("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"):
        if key in facts and (factor := facts.real(key)) != 1.0:
            raise facts.refusal(f"its yarn scales attention by {factor} (key {key})")
    return found


def with_rms(facts: Facts) -> Configuration:
    """Return what architectures with RMS norms have in common."""
    return {**common(facts), "rms_norm_eps": facts.real("attention.layer_norm_rms_epsilon")}


def llama(facts: Facts) -> Configuration:
    """Llama and Mistral; with experts, Mixtral."""
    found = {
        **with_rms(facts),
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in facts.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in facts.tensors,
    }
    if not facts.whole("expert_count", 0):
        facts.whole("expert_used_count", 0)
        return found
    return {
        **found,
        "model_type": "mixtral",
        "num_local_experts": facts.whole("expert_count"),
        "num_experts_per_tok": facts.whole("expert_used_count"),
    }


def qwen2(facts: Facts) -> Configuration:
    return {**with_rms(facts), "model_type": "qwen2", "hidden_act": "silu"}


def qwen3(facts: Facts) -> Configuration:
    return {**with_rms(facts), "model_type": "qwen3", "hidden_act": "silu"}


def gemma(facts: Facts) -> Configuration:
    return {**with_rms(facts), "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}


def gemma2(facts: Facts) -> Configuration:
    found = with_rms(facts)
    layers = range(found["num_hidden_layers"])
    return {
        **found,
        **_gemmas(facts, found),
        "model_type": "gemma2",
        "sliding_window": facts.whole("attention.sliding_window", 4096),
        "layer_types": [FULL if index % 2 else SLIDING for index in layers],
        "attn_logit_softcapping": facts.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.real("final_logit_softcapping", 30.0),
    }


def gemma3(facts: Facts) -> Configuration:
    """Five of six layers have a window, and a rotation of their own that is not scaled."""
    found = with_rms(facts)
    window = facts.whole("attention.sliding_window", 0)
    layers = range(found["num_hidden_layers"])
    cap = facts.real("final_logit_softcapping", 0.0)
    base = facts.positive("rope.freq_base_swa", LOCAL_BASE)
    full = found["rope_parameters"]
    if "rope.freq_base" not in facts:
        full = {**full, "rope_theta": 1_000_000.0}
    return {
        **found,
        **_gemmas(facts, found),
        "model_type": "gemma3_text",
        "sliding_window": window or found["max_position_embeddings"],
        "layer_types": [SLIDING if window and (index + 1) % 6 else FULL for index in layers],
        "rope_parameters": {
            FULL: full,
            SLIDING: {"rope_type": "default", "rope_theta": base},
        },
        "final_logit_softcapping": cap or None,
    }


def _gemmas(facts: Facts, found: Configuration) -> Configuration:
    """The scale of queries, by the head's width or, of the largest model, by a share of the whole,
    and the activation."""
    large = found["num_hidden_layers"] == BIG_GEMMA[facts.architecture]
    width = found["hidden_size"] // found["num_attention_heads"] if large else found["head_dim"]
    return {"query_pre_attn_scalar": width, "hidden_activation": "gelu_pytorch_tanh"}


def phi3(facts: Facts) -> Configuration:
    found = with_rms(facts)
    original = facts.whole("rope.scaling.original_context_length", 0)
    attention = facts.real("rope.scaling.attn_factor", 1.0)
    if "rope_factors_short.weight" in facts.tensors:
        names = "rope_factors_short.weight", "rope_factors_long.weight"
        found["rope_parameters"].update(_factors(facts, *names, attention))
    return {
        **found,
        "model_type": "phi3",
        "hidden_act": "silu",
        "original_max_position_embeddings": original or found["max_position_embeddings"],
        "sliding_window": facts.whole("attention.sliding_window", 0) or None,
        "pad_token_id": None,
    }


def gpt2(facts: Facts) -> Configuration:
    return {
        **everywhere(facts),
        "model_type": "gpt2",
        "n_embd": facts.whole("embedding_length"),
        "n_layer": facts.whole("block_count"),
        "n_head": facts.whole(HEADS),
        "n_positions": facts.whole("context_length"),
        "n_inner": facts.whole("feed_forward_length"),
        "layer_norm_epsilon": facts.real("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def starcoder2(facts: Facts) -> Configuration:
    return {
        **common(facts),
        "model_type": "starcoder2",
        "norm_epsilon": facts.real("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": "blk.0.attn_q.bias" in facts.tensors,
        "sliding_window": None,
        **dict.fromkeys(("residual_dropout", "embedding_dropout"), 0.0),
    }


def olmo2(facts: Facts) -> Configuration:
    return {**with_rms(facts), "model_type": "olmo2", "hidden_act": "silu"}


def smollm3(facts: Facts) -> Configuration:
    found = with_rms(facts)
    layers = range(found["num_hidden_layers"])
    return {
        **found,
        "model_type": "smollm3",
        "hidden_act": "silu",
        "use_sliding_window": False,
        "no_rope_layers": [int((index + 1) % 4 > 0) for index in layers],
        "pad_token_id": None,
    }


def granite(facts: Facts) -> Configuration:
    found = with_rms(facts)
    return {
        **found,
        "model_type": "granite",
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in facts.tensors,
        "attention_multiplier": facts.real("attention.scale", 0.0) or found["head_dim"] ** -0.5,
        "embedding_multiplier": facts.real("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": facts.real("residual_scale", 0.0) or 1.0,
        "logits_scaling": facts.positive("logit_scale", 1.0),
    }


def with_convolutions(facts: Facts) -> Configuration:
    """Return what architectures have in common whose layers without key heads are convolutions."""
    heads = facts.numbers(KV_HEADS)
    if len({count for count in heads if count}) != 1 or len(heads) != facts.layers:
        raise facts.refusal("its layers have several numbers of key heads, or none")
    return {
        **common(facts, max(heads)),
        "norm_eps": facts.real("attention.layer_norm_rms_epsilon"),
        "layer_types": [FULL if count else "conv" for count in heads],
        "conv_L_cache": facts.whole("shortconv.l_cache"),
        "conv_bias": False,
    }


def lfm2(facts: Facts) -> Configuration:
    """The width of MLPs is in the file as it is, and not to be adjusted."""
    found = with_convolutions(facts)
    return {**found, "model_type": "lfm2", "block_auto_adjust_ff_dim": False}


DENSE: Mapping[str, Callable[[Facts], Configuration]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "phi3": phi3,
    "gpt2": gpt2,
    "starcoder2": starcoder2,
    "olmo2": olmo2,
    "smollm3": smollm3,
    "granite": granite,
    "lfm2": lfm2,
}
"""Architecture of llama.cpp -> function that makes its configuration."""
