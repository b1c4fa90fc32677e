"""The card that is pretended, by its compute capability and by what cards of other makers lack.

torch's int4 products take the matrix units for bf16 that came with 8.0, and there is no code of
them for anything older (aten/src/ATen/native/cuda/int4mm.cu). cuBLAS multiplies bf16 from 5.3 on
(github.com/pytorch/pytorch/pull/50442), and with bf16 arithmetic from 8.0 on. Cards of other makers
lack more (`PROFILES`): Apple's have neither fp64 nor graphs, pinned memory, a stream of copies or
products of int8 (`_int_mm`); Arc of the A series has no fp64, and graphs only since torch 2.11. How
fast anything is `times.py` knows.
"""

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

VARIABLE = "DOVETAIL_PRETENDED_CAPABILITY"
"""The environment variable of the capability, such as 6.1: processes that a test starts have it
too."""
LACKS = "DOVETAIL_PRETENDED_LACKS"
"""The environment variable of what the card lacks, such as fp64,graphs."""
PARTS = ("fp64", "graphs", "pinned", "streams", "int4", "int8")
PROFILES = {
    "amd": frozenset({"int4"}),
    "intel": frozenset({"fp64", "graphs", "int4"}),
    "apple": frozenset(PARTS),
}
"""The parts that GPUs of a maker may lack, all of them at once."""
INT4_SINCE = BF16_SINCE = 8.0
EMULATED_BF16_SINCE = 5.3
aten = torch.ops.aten
INT4 = (aten._convert_weight_to_int4pack, aten._weight_int4pack_mm)
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)


class Card:
    """A card by its compute capability, and the `PARTS` that it lacks."""

    def __init__(self, capability: float, lacks: Collection[str] = ()) -> None:
        self.capability, self.lacks = capability, frozenset(lacks)

    def has(self, part: str) -> bool:
        """Return whether it has one of `PARTS`."""
        assert part in PARTS
        return part not in self.lacks

    @property
    def multiplies_int4(self) -> bool:
        """Return whether torch has int4 products for it."""
        return self.capability >= INT4_SINCE and self.has("int4")

    @property
    def computes_bf16(self) -> bool:
        """Return whether it has bf16 arithmetic."""
        return self.capability >= BF16_SINCE

    def check_result(self, result: Tensor) -> None:
        """Raise `RuntimeError` for a float64 tensor on a card that has no fp64."""
        if result.dtype == torch.float64 and not self.has("fp64"):
            raise RuntimeError("the pretended card has no float64: use float32 instead")

    def check(self, packet: Any, given: Iterable[Any]) -> None:
        """Raise `RuntimeError` for an operation that torch does not have for the card. `given`: its
        arguments."""
        if packet is torch.ops.aten._int_mm and not self.has("int8"):
            raise NotImplementedError(
                "The operator 'aten::_int_mm' is not currently implemented for the pretended card."
            )
        if packet in INT4 and not self.multiplies_int4:
            raise RuntimeError(
                f"CUDA error: {packet} has no kernel image for execution on a device of compute "
                f"capability {self.capability}"
            )
        if packet not in PRODUCTS or self.capability >= EMULATED_BF16_SINCE:
            return
        if any(isinstance(one, Tensor) and one.dtype == torch.bfloat16 for one in given):
            raise RuntimeError(
                f"CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasGemmEx for {packet}"
            )


CARD = Card(
    float(os.environ.get(VARIABLE, "9.0")), [*filter(None, os.environ.get(LACKS, "").split(","))]
)


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


@contextmanager
def lacking(parts: Collection[str]) -> Iterator[None]:
    """Pretend a card that lacks some of `PARTS` within the block, in this process and in those that
    it starts."""
    before, CARD.lacks = CARD.lacks, frozenset(parts)
    os.environ[LACKS] = ",".join(parts)
    try:
        yield
    finally:
        CARD.lacks = before
        os.environ[LACKS] = ",".join(before)
