"""Linears of 8 and 4 bits by torch's own operations, for heads and substitutes where neither the
C++ kernels nor products of ours compute.

8 bits: one scale for each row of the weight, which is widened as it is used. 4 bits: a scale and a
zero for each group of inputs, by torch's int4 products. Knows single matrices, not models.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from dovetail.workers.kernels.coded import GROUP
from dovetail.workers.models.substitutes.quantize import Codes

Product = Callable[[Tensor], Tensor]
"""x [T, in] -> [T, out] in the type of x."""

GROUPS = (64, 128, 32)
"""Inputs that share a scale in 4 bits; the first that divides the inputs is taken. 64 is HQQ's and
SubSpec's."""
ROWS = 16
"""Rows of a matrix come in multiples of this."""
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
    """4 bits a weight in groups of inputs, asymmetric, by torch's int4 product, which computes in
    bfloat16; `against_int4` has said nothing."""
    group = next(size for size in GROUPS if weight.shape[1] % size == 0)
    codes, scales_and_zeros = _grouped(weight.float(), group)
    multiply = _packed(codes, scales_and_zeros, group)

    def product(x: Tensor) -> Tensor:
        y = multiply(x.to(torch.bfloat16)).to(dtype)
        return y if bias is None else y + bias

    return product


def int4_of_codes(
    codes: Tensor, scales: Tensor, offsets: Tensor, group: int, device: torch.device
) -> Product:
    """Return the product of a matrix that has been quantised already: codes 0..15 [rows, inputs],
    weight = (code - 8) scale + offset; it lies on `device`."""
    pairs = torch.stack([scales, offsets], dim=2).transpose(0, 1).contiguous().to(torch.bfloat16)
    multiply = _packed(codes.to(device).to(torch.int32), pairs.to(device), group)
    return lambda x: multiply(x.to(torch.bfloat16))


def code_products(codes: Codes, device: torch.device) -> tuple[Product, ...]:
    """Products of int4 whose sum is that of the codes: one where they have 4 bits or fewer, two of
    their halves where they have 8."""

    def of(part: Tensor, scales: Tensor, offsets: Tensor) -> Product:
        return int4_of_codes(part, scales, offsets, GROUP, device)

    if codes.bits <= 4:
        return (of(codes.codes + (8 - (1 << codes.bits - 1)), codes.scales, codes.offsets),)
    # (16 high + low - 128) scale + offset = (high - 8) 16 scale + (low - 8) scale + (offset + 8
    # scale)
    scales, offsets = codes.scales.float(), codes.offsets.float()
    return of(codes.codes >> 4, 16.0 * scales, offsets + 8.0 * scales), of(
        codes.codes & 15, scales, torch.zeros_like(scales)
    )


class CodedProduct:
    """The product of linears with the same inputs, below each other, over their codes."""

    def __init__(
        self, parts: Sequence[Codes], biases: Sequence[Tensor | None], device: torch.device
    ) -> None:
        bits, inputs = parts[0].bits, parts[0].inputs
        whole = Codes(
            bits,
            inputs,
            *(
                torch.cat([getattr(part, name) for part in parts])
                for name in ("codes", "scales", "offsets")
            ),
        )
        self.outputs = whole.codes.shape[0]
        self._missing, self._beyond = whole.codes.shape[1] - inputs, -self.outputs % ROWS
        if self._beyond:
            whole = Codes(
                bits,
                inputs,
                *(
                    pad(tensor, (0, 0, 0, self._beyond))
                    for tensor in (whole.codes, whole.scales, whole.offsets)
                ),
            )
        self._products = code_products(whole, device)
        self._bias = None
        if any(bias is not None for bias in biases):
            own = [
                torch.zeros(part.shape[0]) if bias is None else bias.detach().float()
                for part, bias in zip(parts, biases, strict=True)
            ]
            self._bias = torch.cat(own).to(device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] fp32 -> [T, out] fp32."""
        x = x.to(torch.bfloat16)
        x = pad(x, (0, self._missing)) if self._missing else x
        y = self._products[0](x).float()
        for product in self._products[1:]:
            y += product(x)
        y = y[:, : self.outputs] if self._beyond else y
        return y if self._bias is None else y + self._bias


def against_int4(shape: tuple[int, ...]) -> str:
    """Why a matrix [rows, inputs] cannot be laid out in 4 bits, empty if it can."""
    if shape[0] % ROWS == 0 and shape[1] % min(GROUPS) == 0:
        return ""
    return (
        f"4-bit weights need rows in multiples of {ROWS} and inputs in multiples of "
        f"{min(GROUPS)}, and one matrix is {list(shape)}: use int8"
    )


def _grouped(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes 0..15 [rows, inputs] and [inputs / group, rows, 2] of scale and zero: weight = (code -
    8) scale + zero."""
    rows, inputs = weight.shape
    parts = weight.view(rows, inputs // group, group)
    low, high = parts.amin(dim=2, keepdim=True), parts.amax(dim=2, keepdim=True)
    scale = ((high - low) / 15.0).clamp(min=1e-9).to(torch.bfloat16).float()
    zero = (low + 8.0 * scale).to(torch.bfloat16).float()
    codes = ((parts - zero) / scale + 8.0).round().clamp(0, 15).to(torch.int32).view(rows, inputs)
    pairs = torch.cat([scale, zero], dim=2).transpose(0, 1).contiguous()
    return codes, pairs.to(torch.bfloat16)


def _packed(codes: Tensor, scales_and_zeros: Tensor, group: int) -> Product:
    return (
        _pack_for_cpu(codes, scales_and_zeros, group)
        if codes.device.type == "cpu"
        else _pack_for_cuda(codes, scales_and_zeros, group)
    )


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
