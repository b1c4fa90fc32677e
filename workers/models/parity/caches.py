"""A cache for transformers that holds nothing; importing this module imports transformers."""

from typing import Any

from torch import Tensor

from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.transformers import DynamicCache


class ClaimedCache(DynamicCache):  # type: ignore[misc]
    """A cache that claims `length` rows, from which transformers builds masks, and stores none."""

    def __init__(self, length: int | Tensor) -> None:
        """`length`: int64 [rows], one for each row, if it is only added to a row's number."""
        super().__init__()
        self._length = length
        self.asked = False  # True if the number of rows was asked for

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        self.asked = True
        return self._length

    def get_query_offset(self, layer_idx: int = 0) -> int | Tensor:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int | Tensor, int]:
        return self._length + query_length, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *unused: Any, **also_unused: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_conv_state(self, *unused: Any, **also_unused: Any) -> None:
        """Return nothing: rows are the first of their states."""

    def update_conv_state(self, states: Tensor, *unused: Any, **also_unused: Any) -> Tensor:
        return states

    def get_recurrent_state(self, *unused: Any, **also_unused: Any) -> None:
        """Return nothing: rows are the first of their states."""

    def update_recurrent_state(self, states: Tensor, *unused: Any, **also_unused: Any) -> Tensor:
        return states


class ProofCache(KVCache):
    """The keys and values of a proof, with whatever heads a layer has."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, key: Tensor, value: Tensor, start: int) -> None:
        if layer not in self._rows:
            self._rows[layer] = tuple(
                part.new_zeros(part.shape[0], self.capacity, part.shape[2]) for part in (key, value)
            )  # type: ignore[assignment]
        for kept, new in zip(self._rows[layer], (key, value), strict=True):
            kept[:, start : start + new.shape[1]] = new

    def view(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        keys, values = self._rows[layer]
        return keys[:, start:stop], values[:, start:stop]
