"""The configurations of draft heads in GGUF files, with the keys of public checkpoints of heads."""

from collections.abc import Callable, Mapping
from math import isclose

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.gguf.architectures.dense import (
    FULL,
    SLIDING,
    Configuration,
    rotation,
    widths_of,
)
from dovetail.workers.models.checkpoints.gguf.facts import KV_HEADS, Facts

TAPS, MASK = "target_layers", "tokenizer.ggml.mask_token_id"
BLOCK_ROWS = 16  # llama.cpp's default


def eagle3(facts: Facts) -> Configuration:
    """EAGLE-3: its decoder layer reads the concatenated embedding and state."""
    widths, taps = widths_of(facts), facts.numbers(TAPS)
    if facts.layers != 1 or len(taps) != 3:
        reads = f"{facts.layers} layers that read {len(taps)} of its target's ({TAPS})"
        raise facts.refusal(f"it has {reads}, instead of one that reads three")
    facts.whole(KV_HEADS, widths["num_attention_heads"])
    return {
        **widths,
        "model_type": "eagle3",
        "intermediate_size": facts.whole("feed_forward_length"),
        "rope_parameters": rotation(facts, widths["head_dim"]),
        "rms_norm_eps": facts.epsilon("attention.layer_norm_rms_epsilon"),
        "target_hidden_size": facts.whole("target_hidden_size", widths["hidden_size"]),
        "eagle_aux_hidden_state_layer_ids": taps,
        "norm_before_residual": facts.truth("norm_before_residual", False),
        "norm_before_fc": facts.truth("norm_before_fc", False),
    }


def dflash(facts: Facts) -> Configuration:
    """DFlash, DSpark and DFlash-2, which differ in their tensors."""
    if facts.whole("hyper_connection.count", 0):
        raise facts.refusal("it has hyper-connections (DeepSeek-V4), which no draft here has")
    widths, mask = widths_of(facts), facts.model.facts.get(MASK)
    head, layers = widths["head_dim"], facts.layers
    if mask is None:
        raise facts.refusal(f"key {MASK} is missing")
    if not isclose(scale := facts.real("attention.scale", head**-0.5), head**-0.5, rel_tol=1e-6):
        raise facts.refusal(f"its attention has the scale {scale}, instead of {head**-0.5}")
    if any(facts.numbers("rope.dimension_sections", ())[1:]):
        raise facts.refusal("its positions have several dimensions")
    pattern = facts.numbers("attention.sliding_window_pattern", [0] * layers)
    rotated = rotation(facts, head)
    found = {
        **widths,
        "model_type": "dflash",
        "num_key_value_heads": facts.whole(KV_HEADS, widths["num_attention_heads"]),
        "intermediate_size": facts.whole("feed_forward_length"),
        "rope_parameters": rotated,
        "rms_norm_eps": facts.epsilon("attention.layer_norm_rms_epsilon"),
        "hidden_act": facts.text("hidden_activation", "silu"),
        "aux_hidden_state_layer_ids": facts.numbers(TAPS),
        "block_size": facts.whole("block_size", BLOCK_ROWS),
        "mask_token_id": mask,
        "is_causal": facts.truth("attention.causal", False),
        "layer_types": [SLIDING if slides else FULL for slides in pattern],
        "sliding_window": facts.whole("attention.sliding_window", 0) or None,
        "attention_value_scale": facts.real("attention.value_scale", 1.0),
        "input_embedding_scale": facts.real("embedding_scale", 1.0),
        "sample_from_anchor": facts.truth("sample_from_anchor", True)
        and "markov_w1.weight" in facts.tensors,
    }
    facts.truth("has_confidence_head", True)
    if "selector_hidden.weight" not in facts.tensors:
        return found
    facts.whole("selector_rank", 0)
    return {
        **found,
        "output_multiplier": facts.real("logit_scale", 1.0),
        "final_logit_softcapping": facts.real("final_logit_softcapping", 0.0) or None,
        "selector_top_k": facts.whole("selector_top_k"),
        "conv_kernel_size": facts.whole("conv_kernel_size"),
        "conv_group_size": facts.whole("conv_group_size"),
    }


HEADS: Mapping[str, Callable[[Facts], Configuration]] = {"eagle3": eagle3, "dflash": dflash}
"""Architecture of llama.cpp -> the function that makes the configuration of a draft head."""
REFUSED = {
    **dict.fromkeys(
        ("gemma4-assistant", "gemma4_mtp"),
        "is a draft that attends to its target's keys and values",
    ),
}
"""Architectures of drafts that are not read here -> what they are."""


def refuse_head(facts: Facts) -> None:
    """`CheckpointError` for a file that holds a draft of a kind that is not read here."""
    if what := REFUSED.get(facts.architecture, ""):
        where = f"{facts.model.file} (architecture {facts.architecture})"
        raise CheckpointError(f"{where} {what}: only safetensors are read, with --draft.share true")
