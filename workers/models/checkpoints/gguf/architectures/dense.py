"""The configurations of GGUF files of models with RMS norms and without experts, but Mixtral."""

from collections.abc import Callable, Mapping

from dovetail.workers.models.checkpoints.gguf.architectures.common import (
    FULL,
    SLIDING,
    Configuration,
    factors_of,
    has_bias,
    pattern,
    with_rms,
)
from dovetail.workers.models.checkpoints.gguf.facts import Facts


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


def phi3(facts: Facts) -> Configuration:
    found = with_rms(facts)
    original = facts.whole("rope.scaling.original_context_length", 0)
    attention = facts.real("rope.scaling.attn_factor", 1.0)
    if "rope_factors_short.weight" in facts.tensors:
        names = "rope_factors_short.weight", "rope_factors_long.weight"
        if (kind := found["rope_parameters"]["rope_type"]) != "default":
            raise facts.refusal(f"it has both rope_factors and a scaling of kind {kind}")
        found["rope_parameters"].update(factors_of(facts, *names, attention))
    elif attention != 1.0:
        raise facts.refusal(f"it scales attention by {attention} and has no rope_factors")
    return {
        **found,
        "model_type": "phi3",
        "hidden_act": "silu",
        "original_max_position_embeddings": original or found["max_position_embeddings"],
        "sliding_window": facts.whole("attention.sliding_window", 0) or None,
        "pad_token_id": None,
    }


def olmo2(facts: Facts) -> Configuration:
    """OLMo 2, or OLMo 3 if there are windows, whose layers do not scale their rotation."""
    found = {**with_rms(facts), "model_type": "olmo2", "hidden_act": "silu"}
    if not (window := facts.whole("attention.sliding_window", 0)):
        return found
    full = found["rope_parameters"]
    base = facts.positive("rope.freq_base_swa", full["rope_theta"])
    return {
        **found,
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": pattern(facts, 4),
        "rope_parameters": {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": base}},
        "pad_token_id": None,
    }


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
    _no_states(facts)
    return {
        **found,
        **granite_factors(facts, found["head_dim"], None),
        "model_type": "granite",
        "hidden_act": "silu",
        "intermediate_size": facts.whole(
            "expert_shared_feed_forward_length", found["intermediate_size"]
        ),
        "attention_bias": has_bias(facts, "attn_q"),
    }


def granite_factors(facts: Facts, head: int, logits: float | None) -> Configuration:
    """Return Granite's factors; `logits`: the default of theirs."""
    return {
        "attention_multiplier": facts.real("attention.scale", 0.0) or head**-0.5,
        "embedding_multiplier": facts.real("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": facts.real("residual_scale", 0.0) or 1.0,
        "logits_scaling": facts.positive("logit_scale", logits),
    }


def _no_states(facts: Facts) -> None:
    """Remove what files of Granite 4 without states state about states and experts."""
    for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        facts.whole(f"ssm.{key}", 0)
    if facts.architecture == "granite" and facts.whole("expert_count", 0):
        raise facts.refusal("it says of experts, which its architecture has none of")
    facts.whole("expert_used_count", 0)
    if not facts.truth("rope.scaling.finetuned", True):
        raise facts.refusal("it rotates nothing (rope.scaling.finetuned)")


def mistral3(facts: Facts) -> Configuration:
    """Mistral Small 3, and Ministral 3, whose queries grow with their position."""
    found = {**with_rms(facts), "hidden_act": "silu", "sliding_window": None}
    if "attention.temperature_scale" not in facts:
        return {**found, "model_type": "mistral"}
    rope = found["rope_parameters"]
    if rope["rope_type"] != "yarn":
        raise facts.refusal("its queries grow, and its rotation is not scaled by yarn")
    rope["llama_4_scaling_beta"] = facts.real("attention.temperature_scale")
    if magnitude := facts.real("rope.scaling.yarn_log_multiplier", 0.0):
        rope |= {"mscale": 1.0, "mscale_all_dim": magnitude}
    return {**found, "model_type": "ministral3", "rope_parameters": rope}


def qwen2vl(facts: Facts) -> Configuration:
    """The language model only: for text, all sections of the rotation have equal positions."""
    facts.numbers("rope.dimension_sections")
    return qwen2(facts)


def qwen3vl(facts: Facts) -> Configuration:
    """The language model only: for text, all sections of the rotation have equal positions."""
    facts.numbers("rope.dimension_sections")
    facts.whole("n_deepstack_layers", 0)
    return qwen3(facts)


def seed_oss(facts: Facts) -> Configuration:
    return {
        **with_rms(facts),
        "model_type": "seed_oss",
        "hidden_act": "silu",
        "attention_bias": has_bias(facts, "attn_q"),
        "attention_out_bias": has_bias(facts, "attn_output"),
        "mlp_bias": has_bias(facts, "ffn_down"),
        **dict.fromkeys(("attention_dropout", "residual_dropout"), 0.0),
    }


def hunyuan_dense(facts: Facts) -> Configuration:
    """The base of the rotation has been scaled."""
    return {
        **with_rms(facts),
        "model_type": "hunyuan_v1_dense",
        "hidden_act": "silu",
        "attention_bias": has_bias(facts, "attn_q"),
    }


def glm4(facts: Facts) -> Configuration:
    """Files of its models that read images order the rows of heads differently."""
    if any(facts.numbers("rope.dimension_sections", [])):
        raise facts.refusal("it is the language model of one that reads images")
    return {
        **with_rms(facts),
        "model_type": "glm4",
        "hidden_act": "silu",
        "attention_bias": has_bias(facts, "attn_q"),
        "pad_token_id": None,
    }


def ernie4_5(facts: Facts) -> Configuration:
    found = {**with_rms(facts), "model_type": "ernie4_5", "hidden_act": "silu"}
    return {**found, "use_bias": has_bias(facts, "attn_q")}


def arcee(facts: Facts) -> Configuration:
    return {**with_rms(facts), "model_type": "arcee", "hidden_act": "relu2"}


def exaone4(facts: Facts) -> Configuration:
    """If there is a window, three of four layers have it, and only they rotate."""
    found = {**with_rms(facts), "model_type": "exaone4", "hidden_act": "silu"}
    window = facts.whole("attention.sliding_window", 0)
    kinds = pattern(facts, 4)
    return {
        **found,
        "sliding_window": window or None,
        "layer_types": kinds if window else [FULL] * len(kinds),
    }


DENSE: Mapping[str, Callable[[Facts], Configuration]] = {
    **{
        make.__name__: make
        for make in (
            *(llama, mistral3, qwen2, qwen2vl, qwen3, qwen3vl, phi3, olmo2, smollm3),
            *(granite, seed_oss, glm4, ernie4_5, arcee, exaone4),
        )
    },
    "hunyuan-dense": hunyuan_dense,
}
"""Architecture of llama.cpp -> the function that makes its configuration."""
