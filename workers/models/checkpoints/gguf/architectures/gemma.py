"""The configurations of GGUF files of Gemma."""

from collections.abc import Callable, Mapping
from itertools import takewhile

from dovetail.workers.models.checkpoints.gguf.architectures.common import (
    BASE,
    FULL,
    SLIDING,
    Configuration,
    pattern,
    sizes_of,
    with_rms,
)
from dovetail.workers.models.checkpoints.gguf.facts import KV_HEADS, Facts
from dovetail.workers.models.checkpoints.gguf.files import numbers_of

LOCAL_BASE = 10000.0  # the default base of rotation of layers with a window
FINAL_CAP = 30.0  # the default cap of logits of Gemma 2 and 4; Gemma 3 has none
BIG_GEMMA = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models, which scale queries otherwise
UNROTATED = 1e30  # frequencies of numbers that are not rotated are divided by this
EXPERTS = "expert_feed_forward_length"


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
        "final_logit_softcapping": facts.real("final_logit_softcapping", FINAL_CAP),
    }


def gemma3(facts: Facts) -> Configuration:
    """Five of six layers have a window, and their own rotation that is not scaled."""
    found = with_rms(facts)
    window = facts.whole("attention.sliding_window", 0)
    layers = range(found["num_hidden_layers"])
    cap = facts.real("final_logit_softcapping", 0.0)
    base = facts.positive("rope.freq_base_swa", LOCAL_BASE)
    return {
        **found,
        **_gemmas(facts, found),
        "model_type": "gemma3_text",
        "sliding_window": window or found["max_position_embeddings"],
        "layer_types": [SLIDING if window and (index + 1) % 6 else FULL for index in layers],
        "rope_parameters": {
            FULL: found["rope_parameters"],
            SLIDING: {"rope_type": "default", "rope_theta": base},
        },
        "final_logit_softcapping": cap or None,
    }


def _gemmas(facts: Facts, found: Configuration) -> Configuration:
    """The scale of queries, by the head's width or the largest model's share, and the
    activation."""
    large = found["num_hidden_layers"] == BIG_GEMMA[facts.architecture]
    width = found["hidden_size"] // found["num_attention_heads"] if large else found["head_dim"]
    return {"query_pre_attn_scalar": width, "hidden_activation": "gelu_pytorch_tanh"}


def gemma4(facts: Facts) -> Configuration:
    """Windowed layers have other heads and rotations; the last may share keys, and each have own
    inputs."""
    facts.numbers("attention.sliding_window_pattern")
    sizes, kinds = sizes_of(facts), pattern(facts, 6)
    head, shared = sizes["head_dim"], facts.whole("attention.shared_kv_layers", 0)
    local = facts.whole("attention.key_length_swa")
    whole_values = facts.whole("attention.value_length_swa") == local
    rotated = (
        facts.whole("rope.dimension_count", head),
        facts.whole("rope.dimension_count_swa", local),
    )
    if not whole_values or rotated != (head, local) or not 0 <= shared < facts.layers:
        raise facts.refusal(
            f"it rotates {rotated} numbers of heads of {head} and {local}, or its values are of "
            f"another width, or {shared} layers read keys of others"
        )
    own, widths = (
        facts.whole("embedding_length_per_layer_input"),
        facts.each("feed_forward_length"),
    )
    wide = widths[-1] == 2 * widths[0]
    expected = [
        widths[0] * (1 + (wide and at >= facts.layers - shared)) for at in range(len(kinds))
    ]
    if widths != expected:
        raise facts.refusal(f"its MLPs have the widths {sorted(set(widths))}")
    key_heads = dict(zip(kinds, facts.each(KV_HEADS), strict=True))
    if facts.each(KV_HEADS) != [key_heads[kind] for kind in kinds]:
        raise facts.refusal("layers of one kind have several numbers of key heads")
    last = [at for at in range(facts.layers - shared) if kinds[at] == FULL]
    local_base = facts.positive("rope.freq_base_swa", LOCAL_BASE)
    found = {
        **sizes,
        "model_type": "gemma4_text",
        "rms_norm_eps": facts.epsilon("attention.layer_norm_rms_epsilon"),
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": widths[0],
        "use_double_wide_mlp": wide,
        "head_dim": local,
        "global_head_dim": head,
        "num_key_value_heads": key_heads.get(SLIDING, key_heads.get(FULL)),
        "num_global_key_value_heads": key_heads.get(FULL),
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": any(f"blk.{at}.attn_v.weight" not in facts.tensors for at in last),
        "sliding_window": facts.whole("attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": {
            FULL: _proportional(facts, head),
            SLIDING: {"rope_type": "default", "rope_theta": local_base},
        },
        "final_logit_softcapping": facts.real("final_logit_softcapping", FINAL_CAP) or None,
        "hidden_size_per_layer_input": own,
    }
    if own:
        table = facts.need("per_layer_token_embd.weight")
        found["vocab_size_per_layer_input"] = table.shape[0]
    return {**found, **_experts(facts)}


def _proportional(facts: Facts, head: int) -> Configuration:
    """The rotation of full layers: only the first numbers of a head, with the whole's
    frequencies."""
    factors = numbers_of(facts.model, facts.need("rope_freqs.weight").name)
    rotated = len(list(takewhile(lambda factor: factor == 1.0, factors)))
    if len(factors) != head // 2 or any(factor < 0.99 * UNROTATED for factor in factors[rotated:]):
        raise facts.refusal("its rope_freqs are other than 1 and infinite ones")
    return {
        "rope_type": "proportional",
        "partial_rotary_factor": 2 * rotated / head,
        "rope_theta": facts.positive("rope.freq_base", BASE),
    }


def _experts(facts: Facts) -> Configuration:
    """Experts next to the MLP; files of models without experts may still have their number."""
    count, used = facts.whole("expert_count", 0), facts.whole("expert_used_count", 0)
    width = facts.whole(EXPERTS, 0)
    if "blk.0.ffn_gate_inp.weight" not in facts.tensors:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": used,
        "moe_intermediate_size": width,
    }


GEMMAS: Mapping[str, Callable[[Facts], Configuration]] = {
    make.__name__: make for make in (gemma, gemma2, gemma3, gemma4)
}
"""Architecture of llama.cpp -> function that makes its configuration."""
