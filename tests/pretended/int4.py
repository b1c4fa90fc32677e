"""CUDA's int4 products on the CPU, for the pretended device: how codes lie in its tiles, and the
product with them."""

import torch
from torch import Tensor

TILES = (2, 4, 8)


def lay_out(nibbles: Tensor, tiles: int) -> Tensor:
    """Lay out uint8 [n, k / 2], the first of two codes in the upper half of a byte
    (aten/src/ATen/native/cuda/int4mm.cu)."""
    rows, half = nibbles.shape
    assert nibbles.dtype == torch.uint8
    assert nibbles.is_contiguous()
    assert tiles in TILES
    assert rows % 8 == 0
    assert 2 * half % (16 * tiles) == 0
    codes = torch.stack([nibbles >> 4, nibbles & 15], dim=2).view(rows, 2 * half)
    return codes.view(rows // 8, 8, -1).to(torch.int32)


def multiply(x: Tensor, packed: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
    """Multiply bfloat16 x [T, k] with codes laid out so; returns bfloat16 [T, n]."""
    assert x.dtype == scales_and_zeros.dtype == torch.bfloat16
    assert x.is_contiguous()
    assert scales_and_zeros.is_contiguous()
    assert group in (32, 64, 128, 256)
    codes = packed.flatten(0, 1).float()
    rows, inputs = codes.shape
    assert tuple(scales_and_zeros.shape) == (inputs // group, rows, 2)
    scales, zeros = scales_and_zeros.float().transpose(0, 1).unsqueeze(2).unbind(3)
    weight = (codes.view(rows, -1, group) - 8.0) * scales.view(rows, -1, 1) + zeros.view(
        rows, -1, 1
    )
    return (x.float() @ weight.view(rows, inputs).t()).to(torch.bfloat16)
