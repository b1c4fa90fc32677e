"""The card that is pretended, by its compute capability.

torch's int4 products take the matrix units for bf16 that came with 8.0, and there is no code of
them for anything older (aten/src/ATen/native/cuda/int4mm.cu). What else a card lacks is not known
here, nor how fast anything is.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

VARIABLE = "DOVETAIL_PRETENDED_CAPABILITY"
"""The environment variable of the capability, such as 6.1: processes that a test starts have it
too."""
INT4_SINCE = 8.0
INT4 = (torch.ops.aten._convert_weight_to_int4pack, torch.ops.aten._weight_int4pack_mm)


class Card:
    """A card by its compute capability."""

    def __init__(self, capability: float) -> None:
        self.capability = capability

    @property
    def multiplies_int4(self) -> bool:
        """Return whether torch has int4 products for it."""
        return self.capability >= INT4_SINCE

    def check(self, packet: Any) -> None:
        """`RuntimeError` for an operation that torch does not have for the card."""
        if packet in INT4 and not self.multiplies_int4:
            raise RuntimeError(
                f"CUDA error: {packet} has no kernel image for execution on a device of compute "
                f"capability {self.capability}"
            )


CARD = Card(float(os.environ.get(VARIABLE, "9.0")))


@contextmanager
def capable(capability: float) -> Iterator[None]:
    """Pretend a card of this compute capability within the block, in this process and in those that
    it starts."""
    before, CARD.capability = CARD.capability, capability
    os.environ[VARIABLE] = str(capability)
    try:
        yield
    finally:
        CARD.capability = before
        os.environ[VARIABLE] = str(before)
