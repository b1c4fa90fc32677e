"""The time that products take on the pretended card. It is counted, not measured: a product takes
as long as its weights take to be read, or as its sums. Nothing else takes any.

cuBLAS adds up products of fp16 in fp32, and so they take no longer than these on cards whose own
arithmetic of fp16 is slow, such as those of compute capability 6.1; bf16 takes 1.85 times as long
there (GTX 1080, torch 2.6, github.com/kubeedge/ianvs/issues/888). From 7.0 on there are matrix
units for fp16, from 8.0 on for bf16. GTX 16xx are of 7.5 and have none: `fp16_share` is what their
products of several rows reach of the memory's rate.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pretended.card import CARD

VARIABLE = "DOVETAIL_PRETENDED_FP16_SHARE"
"""The environment variable of `fp16_share`: processes that a test starts have it too."""
aten = torch.ops.aten
PRODUCTS = {aten.mm: 0, aten.addmm: 1, aten.bmm: 0, aten.baddbmm: 1}
"""Products of matrices -> the place of the first matrix among their arguments."""
BANDWIDTH, FLOPS = 3e11, 5e12
"""Bytes, and operations in fp32, a second."""
UNITS_RATE, EMULATED_RATE = 8.0, 1 / 1.85
"""Rates of sums on matrix units, and of bf16 without them, beside those of fp32."""
FP16_UNITS_SINCE = 7.0


class Clock:
    """The time that has been counted."""

    def __init__(self, fp16_share: float) -> None:
        self.fp16_share, self.seconds = fp16_share, 0.0

    def count(self, packet: Any, args: Any) -> None:
        """Count the time of an operation."""
        if (first := PRODUCTS.get(packet)) is not None:
            self.seconds += self._product_s(args[first], args[first + 1])

    def read(self, size: int) -> None:
        """Count the time of reading so many bytes."""
        self.seconds += size / BANDWIDTH

    def _product_s(self, x: Tensor, weight: Tensor) -> float:
        """Return the seconds of x [..., M, k] times weight [..., k, n]."""
        rows, dtype = x.shape[-2], x.dtype
        slow = dtype == torch.float16 and rows > 1
        read_s = weight.numel() * weight.element_size() / BANDWIDTH
        added_s = 2 * rows * weight.numel() / (FLOPS * _rate(dtype))
        return max(read_s / (self.fp16_share if slow else 1.0), added_s)


def _rate(dtype: torch.dtype) -> float:
    if dtype == torch.float16:
        return UNITS_RATE if CARD.capability >= FP16_UNITS_SINCE else 1.0
    if dtype == torch.bfloat16:
        return UNITS_RATE if CARD.computes_bf16 else EMULATED_RATE
    return 1.0


CLOCK = Clock(float(os.environ.get(VARIABLE, "1.0")))


@contextmanager
def slow_fp16(share: float) -> Iterator[None]:
    """Pretend a card whose products of fp16 reach this share of the memory's rate with several rows
    (0.04: GTX 16xx) within the block, in this process and in those that it starts."""
    before, CLOCK.fp16_share = CLOCK.fp16_share, share
    os.environ[VARIABLE] = str(share)
    try:
        yield
    finally:
        CLOCK.fp16_share = before
        os.environ[VARIABLE] = str(before)
