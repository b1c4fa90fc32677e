"""The configurations of GGUF files of models with layer norms."""

from collections.abc import Callable, Mapping

from dovetail.workers.models.checkpoints.gguf.architectures.common import (
    Configuration,
    common,
    everywhere,
    has_bias,
    pattern,
)
from dovetail.workers.models.checkpoints.gguf.facts import HEADS, KV_HEADS, Facts

EPSILON = "attention.layer_norm_epsilon"
OLMO_EPSILON = 1e-5  # the epsilon of OLMo's norms, a constant of transformers


def gpt2(facts: Facts) -> Configuration:
    return {
        **everywhere(facts),
        "model_type": "gpt2",
        "n_embd": facts.whole("embedding_length"),
        "n_layer": facts.whole("block_count"),
        "n_head": facts.whole(HEADS),
        "n_positions": facts.whole("context_length"),
        "n_inner": facts.whole("feed_forward_length"),
        "layer_norm_epsilon": facts.epsilon("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def starcoder2(facts: Facts) -> Configuration:
    return {
        **common(facts),
        "model_type": "starcoder2",
        "norm_epsilon": facts.epsilon("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": "blk.0.attn_q.bias" in facts.tensors,
        "sliding_window": None,
        **dict.fromkeys(("residual_dropout", "embedding_dropout"), 0.0),
    }


def starcoder(facts: Facts) -> Configuration:
    """One key head for all queries, or as many as query heads."""
    heads = facts.whole(HEADS)
    key_heads = facts.whole(KV_HEADS, heads)
    if key_heads not in (1, heads):
        raise facts.refusal(f"it has {key_heads} heads of keys for {heads} of queries")
    return {
        **gpt2(facts),
        "model_type": "gpt_bigcode",
        "multi_query": key_heads == 1,
        "activation_function": "gelu_pytorch_tanh",
    }


def stablelm(facts: Facts) -> Configuration:
    """Halves are parallel if an MLP has no norm, whatever the file's flag."""
    facts.truth("use_parallel_residual", True)
    return {
        **common(facts),
        "model_type": "stablelm",
        "hidden_act": "silu",
        "layer_norm_eps": facts.epsilon(EPSILON),
        "use_qkv_bias": has_bias(facts, "attn_q"),
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in facts.tensors,
        "qk_layernorm": False,
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
    }


def phi2(facts: Facts) -> Configuration:
    return {
        **common(facts),
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "layer_norm_eps": facts.epsilon(EPSILON),
        "qk_layernorm": False,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attention_dropout"), 0.0),
    }


def gptneox(facts: Facts) -> Configuration:
    return {
        **common(facts),
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "layer_norm_eps": facts.epsilon(EPSILON),
        "attention_bias": has_bias(facts, "attn_qkv"),
        "use_parallel_residual": facts.truth("use_parallel_residual"),
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
    }


def nemotron(facts: Facts) -> Configuration:
    facts.epsilon("attention.layer_norm_rms_epsilon", 0.0)  # files have it twice
    return {
        **common(facts),
        "model_type": "nemotron",
        "hidden_act": "relu2",
        "norm_eps": facts.epsilon(EPSILON),
        "attention_bias": has_bias(facts, "attn_q"),
        "mlp_bias": has_bias(facts, "ffn_down"),
    }


def olmo(facts: Facts) -> Configuration:
    """Norms have no weights."""
    if (epsilon := facts.epsilon(EPSILON)) != OLMO_EPSILON:
        raise facts.refusal(f"its norms have the epsilon {epsilon}, and OLMo's {OLMO_EPSILON}")
    return {**common(facts), "model_type": "olmo", "hidden_act": "silu", "pad_token_id": None}


def jais2(facts: Facts) -> Configuration:
    return {
        **common(facts),
        "model_type": "jais2",
        "hidden_act": "relu2",
        "layer_norm_eps": facts.epsilon(EPSILON),
        "attention_bias": has_bias(facts, "attn_q"),
        "mlp_bias": has_bias(facts, "ffn_down"),
    }


def cohere2(facts: Facts) -> Configuration:
    """Three of four layers have a window, and only they rotate."""
    return {
        **common(facts),
        "model_type": "cohere2",
        "hidden_act": "silu",
        "layer_norm_eps": facts.epsilon(EPSILON),
        "logit_scale": facts.positive("logit_scale"),
        "sliding_window": facts.whole("attention.sliding_window"),
        "layer_types": pattern(facts, 4),
        "attention_bias": has_bias(facts, "attn_q"),
    }


LAYER_NORMED: Mapping[str, Callable[[Facts], Configuration]] = {
    make.__name__: make
    for make in (
        gpt2,
        starcoder,
        starcoder2,
        stablelm,
        phi2,
        gptneox,
        nemotron,
        olmo,
        jais2,
        cohere2,
    )
}
"""Architecture of llama.cpp -> function that makes its configuration."""
