"""The configurations of draft heads in GGUF files, with the keys of public checkpoints of heads."""

from collections.abc import Callable, Mapping

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.gguf.architectures.dense import (
    Configuration,
    rotation,
    widths_of,
)
from dovetail.workers.models.checkpoints.gguf.facts import GUESSES, KV_HEADS, Facts

TAPS = "target_layers"


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


HEADS: Mapping[str, Callable[[Facts], Configuration]] = {"eagle3": eagle3}
"""Architecture of llama.cpp -> the function that makes the configuration of a draft head."""
REFUSED = {
    "dflash": "is a draft that fills several positions in a pass (DFlash)",
    **dict.fromkeys(
        ("gemma4-assistant", "gemma4_mtp"),
        "is a draft that attends to its target's keys and values",
    ),
}
"""Architectures of drafts that are not read here -> what they are."""


def refuse_head(facts: Facts) -> None:
    """`CheckpointError` for a file that holds a draft of a kind that is not read here."""
    what = REFUSED.get(facts.architecture, "")
    if facts.whole(GUESSES, 0) and not any(name.startswith("blk.0.") for name in facts.tensors):
        what = "has only layers that predict further tokens (multi-token prediction)"
    if what:
        where = f"{facts.model.file} (architecture {facts.architecture})"
        raise CheckpointError(f"{where} {what}, which is not supported; use another draft")
