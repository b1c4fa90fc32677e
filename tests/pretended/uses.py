"""The last operation on each buffer of the pretended device that is copied into while the device
computes."""

import weakref

from torch import Tensor


class Uses:
    """Numbers of operations, by the memory that they read or write."""

    def __init__(self) -> None:
        self.now = 0
        """The number of the last operation."""
        self._last: dict[int, int] = {}

    def follow(self, buffer: Tensor) -> None:
        """Note the operations on a buffer for as long as it lives."""
        storage = buffer.untyped_storage()
        self._last[storage._cdata] = self.now
        weakref.finalize(storage, self._last.pop, storage._cdata, None).atexit = False

    def note(self, tensors: list[Tensor]) -> None:
        """Note an operation on tensors."""
        self.now += 1
        for tensor in tensors if self._last else ():
            if (key := tensor.untyped_storage()._cdata) in self._last:
                self._last[key] = self.now

    def last(self, buffer: Tensor) -> int:
        """Return the last operation on a buffer; 0 if it is not followed."""
        return self._last.get(buffer.untyped_storage()._cdata, 0)


USES = Uses()
