"""Linears of 8 and 4 bits by torch's own operations, for heads and substitutes where the C++ kernels do not compute.

8 bits: one scale for each row of the weight, which is widened as it is used. 4 bits: a scale and a zero for each group of inputs, by torch's int4 products.
Knows single matrices, not models.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

Product = Callable[[Tensor], Tensor]
"""x [T, in] -> [T, out] in the type of x."""

GROUPS = (64, 128, 32)
"""Inputs that share a scale in 4 bits; the first that divides the inputs is taken. 64 is HQQ's and SubSpec's."""
ROWS = 16
"""Their products take rows in multiples of it."""
TILES = (8, 4, 2)
"""torch's CUDA layout takes so many tiles of 16 inputs together."""


def int8(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Product:
    """8 bits a weight, symmetric, one scale a row; products in `dtype`."""
    scales = (weight.float().abs().amax(dim=1) / 127.0).clamp(min=1e-12)
    rounded = (weight.float() / scales[:, None]).round().clamp(-127, 127).to(torch.int8)
    scales = scales.to(dtype)

    def product(x: Tensor) -> Tensor:
        y = linear(x, rounded.to(dtype)) * scales
        return y if bias is None else y + bias

    return product


def int4(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Product:
    """4 bits a weight in groups of inputs, asymmetric, by torch's int4 product, which computes in bfloat16; `against_int4` has said nothing."""
    group = next(size for size in GROUPS if weight.shape[1] % size == 0)
    codes, scales_and_zeros = _grouped(weight.float(), group)
    multiply = _packed(codes, scales_and_zeros, group)

    def product(x: Tensor) -> Tensor:
        y = multiply(x.to(torch.bfloat16)).to(dtype)
        return y if bias is None else y + bias

    return product


def int4_of_codes(codes: Tensor, scales: Tensor, offsets: Tensor, group: int, device: torch.device) -> Product:
    """The same product of a matrix that has been quantised already: codes 0..15 [rows, inputs], weight = (code - 8) scale + offset; it lies on `device`."""
    pairs = torch.stack([scales, offsets], dim=2).transpose(0, 1).contiguous().to(torch.bfloat16)
    multiply = _packed(codes.to(torch.int32).to(device), pairs.to(device), group)
    return lambda x: multiply(x.to(torch.bfloat16))


def against_int4(shape: tuple[int, ...]) -> str:
    """Why a matrix [rows, inputs] cannot be laid out in 4 bits, empty if it can."""
    if shape[0] % ROWS == 0 and shape[1] % min(GROUPS) == 0:
        return ""
    return f"4-bit weights need rows in multiples of {ROWS} and inputs in multiples of {min(GROUPS)}, and one matrix is {list(shape)}: use int8"


def _grouped(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes 0..15 [rows, inputs] and [inputs / group, rows, 2] of scale and zero: weight = (code - 8) scale + zero."""
    rows, inputs = weight.shape
    parts = weight.view(rows, inputs // group, group)
    low, high = parts.amin(dim=2, keepdim=True), parts.amax(dim=2, keepdim=True)
    scale = ((high - low) / 15.0).clamp(min=1e-9).to(torch.bfloat16).float()
    zero = (low + 8.0 * scale).to(torch.bfloat16).float()
    codes = ((parts - zero) / scale + 8.0).round().clamp(0, 15).to(torch.int32).view(rows, inputs)
    pairs = torch.cat([scale, zero], dim=2).transpose(0, 1).contiguous()
    return codes, pairs.to(torch.bfloat16)


def _packed(codes: Tensor, scales_and_zeros: Tensor, group: int) -> Product:
    return _pack_for_cpu(codes, scales_and_zeros, group) if codes.device.type == "cpu" else _pack_for_cuda(codes, scales_and_zeros, group)


def _pack_for_cpu(codes: Tensor, scales_and_zeros: Tensor, group: int) -> Product:
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)

    def multiply(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, scales_and_zeros)
        return y

    return multiply


def _pack_for_cuda(codes: Tensor, scales_and_zeros: Tensor, group: int) -> Product:
    tiles = next((tiles for tiles in TILES if codes.shape[1] % (16 * tiles) == 0), 0)
    nibbles = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack(nibbles, tiles)

    def multiply(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm(x, packed, group, scales_and_zeros)
        return y

    return multiply
