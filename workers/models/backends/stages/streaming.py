"""Weights that stream through a few buffers of a device: each is copied while those before it are
used, across layers and passes. A buffer is refilled only after its use: section 4.4 of the papers'
code omits that, and slow layers then compute with the next one's weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from dovetail.workers.devices.base import Mark, Transfer


class Ring:
    """Blobs used cyclically, in fewer buffers than there are blobs."""

    def __init__(self, transfer: Transfer, blobs: Sequence[Tensor], buffers: int) -> None:
        """blobs: uint8, pinned by their owner; `buffers`: at most as many."""
        if not 1 <= buffers <= len(blobs):
            raise ValueError(f"{buffers} buffers for {len(blobs)} blobs")
        self._transfer, self._blobs = transfer, blobs
        largest = max(blob.numel() for blob in blobs)
        self._buffers = [transfer.buffer(largest) for _ in range(buffers)]
        self._turn = 0  # blobs so far: the next is blobs[turn % blobs], in buffers[turn % buffers]
        self.copied_bytes = 0
        start = transfer.computed()
        self._filled = [self._fetch(turn, start) for turn in range(buffers)]

    @contextmanager
    def next(self, blob: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of a blob's buffer and the blob in it, for use within the block."""
        while (
            self._turn % len(self._blobs) != blob
        ):  # a pass that failed half-way left the ring where it was
            self._move_on()
        slot = self._turn % len(self._buffers)
        self._transfer.wait(self._filled[slot])
        try:
            yield slot, self._buffers[slot][: self._blobs[blob].numel()]
        finally:
            self._move_on()

    def _move_on(self) -> None:
        """Advance to the next blob, and fetch the blob that follows in its buffer."""
        slot = self._turn % len(self._buffers)
        if len(self._buffers) < len(self._blobs):
            self._filled[slot] = self._fetch(
                self._turn + len(self._buffers), self._transfer.computed()
            )
        self._turn += 1

    def _fetch(self, turn: int, after: Mark) -> Mark:
        source = self._blobs[turn % len(self._blobs)]
        self.copied_bytes += source.numel()
        return self._transfer.copy(
            source, self._buffers[turn % len(self._buffers)][: source.numel()], after
        )
