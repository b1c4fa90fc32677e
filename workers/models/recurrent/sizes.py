"""The sizes of layers with a state, as a config.json tells them; needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NUMBER_BYTES = 4
"""States are fp32, whatever the weights are."""
WAITING = 32
"""Rows whose factors a session has at a time, about, beside those of a tree."""


@dataclass(frozen=True)
class StateSizes:
    """The layers with a state of a model."""

    layers: int
    given: int
    """Outputs of the matrix before a mixer."""
    taken: int
    """Inputs of the matrix behind it."""
    gated: bool
    """True if the attention of the other layers has gates, as many as numbers of queries."""
    state: int
    """Numbers of a state."""
    row: int
    """Numbers of the factors of a row."""

    def session_bytes(self, tree_rows: int) -> int:
        """Return what a session takes in one layer: its state and a checkpoint of it, and factors
        of rows that wait and of a tree."""
        return NUMBER_BYTES * (2 * self.state + (WAITING + tree_rows) * self.row)


def state_sizes(config: Mapping[str, Any]) -> StateSizes | None:
    """Return the sizes of layers with a state; None for a model without any that is known here."""
    types = config.get("layer_types") or config.get("layers_block_type") or ()
    kinds = ("linear_attention", "mamba", "conv")
    if not isinstance(types, list | tuple) or not (count := sum(t in kinds for t in types)):
        return None
    hidden = int(config["hidden_size"])
    if "linear_num_value_heads" in config:
        key_dim, heads = int(config["linear_key_head_dim"]), int(config["linear_num_value_heads"])
        keys = int(config["linear_num_key_heads"]) * key_dim
        values = heads * int(config["linear_value_head_dim"])
        given = 2 * keys + 2 * values + 2 * heads
        row = 3 * keys + 2 * values + heads
        return StateSizes(count, given, values, True, values * key_dim, row)
    if "mamba_n_heads" in config:
        heads, values = int(config["mamba_n_heads"]), int(config.get("mamba_expand", 2)) * hidden
        keys = int(config["mamba_n_groups"]) * int(config["mamba_d_state"])
        given = 2 * values + 2 * keys + heads
        row = 2 * values + 3 * keys + heads
        return StateSizes(count, given, values, False, values * int(config["mamba_d_state"]), row)
    return StateSizes(count, 3 * hidden, hidden, False, 0, hidden)
