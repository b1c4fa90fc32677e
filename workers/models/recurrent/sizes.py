"""The sizes of layers with a state, from a config.json; needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.protocol.calibration import STATELESS, StateTraffic

NUMBER_BYTES = 4  # states are fp32, whatever the weights are
WAITING = 32  # approximate number of rows whose factors a session holds, besides a tree's
STEP = 4096  # rows from one checkpoint of a long session to the next (`states.py`)
COLUMNS = 16  # parts of states and factors are padded to multiples of this
RECURRENT = ("linear_attention", "mamba", "conv", "hybrid")
ATTENDING = ("full_attention", "attention", "hybrid")
PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # nemotron-H's kinds of layers


@dataclass(frozen=True)
class StateSizes:
    """The layers with a state of a model."""

    layers: int
    attending: int  # layers with keys and values; some may have a state too, and some neither
    given: int  # outputs of the matrix before a mixer
    taken: int  # inputs of the matrix after it
    gated: bool  # True if attention has gates, as many as numbers of queries
    state: int  # numbers of a state
    row: int  # numbers of the factors of a row

    def session_bytes(self, tree_rows: int) -> int:
        """Return a session's bytes in a layer: state, checkpoint, factors of waiting rows and a
        tree."""
        return NUMBER_BYTES * (2 * self.state + (WAITING + tree_rows) * self.row)

    @property
    def traffic(self) -> StateTraffic:
        """Return the memory traffic of a pass over rows of one session, in all layers."""
        return StateTraffic(*(NUMBER_BYTES * self.layers * part for part in (self.state, self.row)))

    @property
    def token_bytes(self) -> int:
        """Return the memory per row of a session for periodic checkpoints in one layer."""
        return -(-NUMBER_BYTES * self.state // STEP)


def layer_kinds(config: Mapping[str, Any]) -> Sequence[str]:
    """Return the kind of each layer of a model with several, or with states; else ()."""
    if isinstance(pattern := config.get("hybrid_override_pattern"), str):
        return [PATTERN.get(letter, letter) for letter in pattern]
    types = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(types, list | tuple):
        return types
    count, kind = int(config.get("num_hidden_layers") or 0), config.get("model_type")
    if kind == "falcon_h1":
        return ["hybrid"] * count
    if kind == "bamba":
        indices = config.get("attn_layer_indices") or ()
        return ["attention" if i in indices else "mamba" for i in range(count)]
    if config.get("full_attn_idxs") is not None:
        return ["attention" if i in config["full_attn_idxs"] else "conv" for i in range(count)]
    if "linear_num_value_heads" in config:
        every = int(config.get("full_attention_interval") or 4)
        return ["linear_attention" if (i + 1) % every else "attention" for i in range(count)]
    return ()


def count_layers(config: Mapping[str, Any]) -> Any:
    """Return the number of layers in a config.json, or None."""
    listed = config.get("hybrid_override_pattern") or config.get("layers_block_type")
    return len(listed) if isinstance(listed, str | list) else config.get("num_hidden_layers")


def state_sizes(config: Mapping[str, Any]) -> StateSizes | None:
    """Return the sizes of layers with a state; None for a model without layers of a known kind."""
    kinds = layer_kinds(config)
    if not (count := sum(kind in RECURRENT for kind in kinds)):
        return None
    layers = count, sum(kind in ATTENDING for kind in kinds)
    hidden = int(config["hidden_size"])
    if "linear_num_value_heads" in config:
        key_dim, heads = int(config["linear_key_head_dim"]), int(config["linear_num_value_heads"])
        keys = int(config["linear_num_key_heads"]) * key_dim
        of_state = _of_state(keys, key_dim, heads, int(config["linear_value_head_dim"]))
        values = heads * int(config["linear_value_head_dim"])
        return StateSizes(*layers, 2 * keys + 2 * values + 2 * heads, values, True, *of_state)
    if "mamba_n_heads" in config or "mamba_num_heads" in config:
        return _selective(config, *layers)
    return StateSizes(*layers, 3 * hidden, hidden, False, 0, _filled(hidden))


def traffic_of(config: Mapping[str, Any]) -> StateTraffic:
    """Return the memory traffic of states in a pass over rows of one session."""
    sizes = state_sizes(config)
    return STATELESS if sizes is None else sizes.traffic


def _selective(config: Mapping[str, Any], layers: int, attending: int) -> StateSizes:
    if "mamba_n_heads" in config:
        heads, key_dim = int(config["mamba_n_heads"]), int(config["mamba_d_state"])
        expanded = int(config.get("mamba_expand", 2)) * int(config["hidden_size"])
        values = int(config.get("mamba_d_ssm") or expanded)
        groups = int(config["mamba_n_groups"])
    else:
        heads, key_dim = int(config["mamba_num_heads"]), int(config["ssm_state_size"])
        values = heads * int(config["mamba_head_dim"])
        groups = int(config.get("n_groups") or config["mamba_n_groups"])
    keys = groups * key_dim
    of_state = _of_state(keys, key_dim, heads, values // heads)
    return StateSizes(layers, attending, 2 * values + 2 * keys + heads, values, False, *of_state)


def _of_state(keys: int, key_dim: int, heads: int, value_dim: int) -> tuple[int, int]:
    columns = heads * _filled(value_dim)
    channels = _filled(2 * keys + heads * value_dim)
    return columns * key_dim, channels + _filled(keys) + columns + _filled(heads)


def _filled(numbers: int) -> int:
    return -(-numbers // COLUMNS) * COLUMNS
