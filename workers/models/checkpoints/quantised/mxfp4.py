"""MXFP4: four-bit numbers with a power of two for each 32 (OCP Microscaling Formats 1.0); all fit
into bf16."""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 32  # numbers that share a power of two
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers that the lower three bits of a code stand for; the highest is the sign."""
BIAS, NO_NUMBER = 127, 255  # the exponent of 1, and that of NaN


def packed_shapes(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of blocks and exponents of a matrix [..., out, in]."""
    blocks = (*shape[:-1], shape[-1] // BLOCK)
    return (*blocks, BLOCK // 2), blocks


def unpack(blocks: Tensor, exponents: Tensor) -> Tensor:
    """Return bf16 [..., out, in] of uint8 blocks [..., out, in / 32, 16], low half first, and
    exponents [..., out, in / 32]. ValueError for a NaN exponent."""
    if bool((exponents == NO_NUMBER).any()):
        raise ValueError("a block's power of two is no number")
    codes = torch.tensor([*MAGNITUDES, *(-number for number in MAGNITUDES)], dtype=torch.bfloat16)
    pairs = torch.stack([codes.repeat(16), codes.repeat_interleave(16)], dim=-1)
    scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - BIAS).to(torch.bfloat16)
    whole = torch.empty(*blocks.shape, 2, dtype=torch.bfloat16)
    for numbers, codes_of, scale in zip(whole, blocks, scales, strict=True):
        torch.mul(pairs[codes_of.int()], scale[..., None, None], out=numbers)
    return whole.flatten(-3)


def as_in_gguf(blocks: Tensor, exponents: Tensor) -> Tensor:
    """Return GGUF's rows uint8 [out, bytes] of blocks [out, in / 32, 16] and exponents: its bytes
    pair numbers 16 apart. ValueError for a NaN exponent."""
    if bool((exponents == NO_NUMBER).any()):
        raise ValueError("a block's power of two is no number")
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    lower, upper = codes.chunk(2, dim=-1)
    return torch.cat([exponents[..., None], lower | (upper << 4)], dim=-1).flatten(1)
