"""The stream of copies of the pretended device, in the order that is worst for code that relies on
more than events. A copy is made when somebody waits for it and not before; until then its target
holds garbage. A copy whose target may still be computed with is refused."""

from collections import deque
from ctypes import memmove
from dataclasses import dataclass

import torch
from torch import Tensor

from pretended import counts
from pretended.pinned import SPOILT, pin
from pretended.registration import device
from pretended.tensors import Elsewhere
from pretended.uses import USES


@dataclass(eq=False)
class Copied:
    """The mark behind a copy."""

    source: Tensor
    target: Tensor
    done: bool = False

    def make(self) -> None:
        """Copy the bytes."""
        memmove(self.target.data_ptr(), self.source.data_ptr(), self.source.numel())
        self.done = True


class PretendedTransfer:
    """The way to the device. A `Transfer`."""

    def __init__(self) -> None:
        self.device = device()
        self._asked: deque[Copied] = deque()

    def pin(self, memory: Tensor) -> None:
        pin(memory)

    def buffer(self, size: int) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        assert isinstance(buffer, Elsewhere)
        USES.follow(buffer.held)
        return buffer

    def copy(self, source: Tensor, target: Tensor, after: int | Copied) -> Copied:
        """Note a copy; `RuntimeError` where `after` is passed before the last operation on the
        target, beside which a GPU would copy."""
        assert isinstance(target, Elsewhere)
        if isinstance(after, int) and USES.last(target.held) > after:
            raise RuntimeError(
                "a copy would overwrite what is computed with: take its mark after that"
            )
        counts.add(copies_in=1)
        target.held.fill_(SPOILT)
        self._asked.append(copied := Copied(source, target.held))
        return copied

    def computed(self) -> int:
        return USES.now

    def wait(self, mark: int | Copied) -> None:
        """Make the copies up to the mark. All that was asked to be computed has been."""
        while isinstance(mark, Copied) and not mark.done:
            self._asked.popleft().make()
