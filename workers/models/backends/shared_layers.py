"""The sizes of layers that read keys and values of others, from a config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SharedLayers:
    """The last layers of a model, which read keys and values of others."""

    layers: int
    widened: int
    """1 if their MLPs are twice as wide as those of the others, else 0."""
    lent: int
    """Numbers of a token's keys in those that they read: the last one of each kind."""
    wider: int
    """Numbers that a head of the widest has beyond the mean one of all layers."""

    @classmethod
    def of(
        cls, config: Mapping[str, Any], layers: int, kv_heads: int, head_dim: int
    ) -> "SharedLayers":
        """Return them from a config.json."""
        count, kinds = int(config.get("num_kv_shared_layers") or 0), config.get("layer_types")
        if not count or not isinstance(kinds, list | tuple):
            return cls(0, 0, 0, 0)
        keys = keys_of_layers(config, kv_heads, head_dim)
        last = dict(zip(kinds[: layers - count], keys, strict=False))
        lent = sum(last.get(kind, 0) for kind in {*kinds[layers - count :]})
        wider = max(keys[layers - count :]) - sum(keys) // layers
        wide = int(bool(config.get("use_double_wide_mlp")))
        return cls(count, wide, lent, max(0, wider) // kv_heads)


def keys_of_layers(config: Mapping[str, Any], kv_heads: int, head_dim: int) -> list[int]:
    """Return the numbers of a token's keys in each layer, if it had its own."""
    special = config.get("per_layer_config")
    others = {str(i): own for i, own in special.items()} if isinstance(special, Mapping) else {}
    layers = (others.get(str(index), {}) for index in range(int(config["num_hidden_layers"])))
    return [
        int(own.get("num_key_value_heads", kv_heads)) * int(own.get("head_dim", head_dim))
        for own in layers
    ]
