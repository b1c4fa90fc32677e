"""The keys and values of the rows of a proof."""

from torch import Tensor

from dovetail.workers.models.cache import KVCache


class ProofCache(KVCache):
    """The keys and values of a proof, of whatever heads a layer turns out to have."""

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
