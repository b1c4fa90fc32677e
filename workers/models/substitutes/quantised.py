"""Rounding to 4-bit codes, and products of codes by torch's int4 operations, where ours cannot
run."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from dovetail.workers.kernels.coded import GROUP, groups_of
from dovetail.workers.models.substitutes.quantize import CPU, Codes

Product = Callable[[Tensor], Tensor]  # x [T, in] -> [T, out], bf16

ROWS = 16  # the number of a matrix's rows is a multiple of this
LEAST_SCALE = 1e-6  # the least scale, of equal weights; fp16 still tells it from 0
TILES = (8, 4)
"""torch's CUDA layout takes this many tiles of 16 inputs together; a group is 4 of them."""


def nearest_codes(weight: Tensor, device: torch.device = CPU) -> Codes:
    """Return the nearest 4-bit codes of weight [rows, inputs], rounded on `device`, on the CPU."""
    rows, inputs = weight.shape
    groups = groups_of(inputs)
    whole = pad(weight.to(device).float(), (0, groups * GROUP - inputs), mode="replicate")
    parts = whole.view(rows, groups, GROUP)
    low, high = parts.amin(dim=2, keepdim=True), parts.amax(dim=2, keepdim=True)
    # in 16 bits of either kind: torch's products take bf16, ours fp16
    scales = ((high - low) / 15.0).clamp(min=LEAST_SCALE).to(torch.bfloat16).half()
    offsets = (low + 8.0 * scales).to(torch.bfloat16).half()
    codes = ((parts - offsets) / scales + 8.0).round().clamp(0, 15).to(torch.uint8)
    return Codes(
        4, inputs, codes.view(rows, -1).cpu(), scales.squeeze(2).cpu(), offsets.squeeze(2).cpu()
    )


def int4_of_codes(codes: Tensor, scales: Tensor, offsets: Tensor, device: torch.device) -> Product:
    """Return the product of codes 0..15 [rows, inputs]: weight = (code - 8) scale + offset."""
    pairs = torch.stack([scales, offsets], dim=2).transpose(0, 1).contiguous().to(torch.bfloat16)
    return _packed(codes.to(device).to(torch.int32), pairs.to(device))


def code_products(codes: Codes, device: torch.device) -> tuple[Product, ...]:
    """Return int4 products whose sum is that of the codes: two, of halves, for 8 bits."""

    def of(part: Tensor, scales: Tensor, offsets: Tensor) -> Product:
        return int4_of_codes(part, scales, offsets, device)

    if codes.bits <= 4:
        return (of(codes.codes + (8 - (1 << codes.bits - 1)), codes.scales, codes.offsets),)
    # (16 high + low - 128) scale + offset = (high - 8) 16 scale + (low - 8) scale + (offset + 8
    # scale)
    scales, offsets = codes.scales.float(), codes.offsets.float()
    return of(codes.codes >> 4, 16.0 * scales, offsets + 8.0 * scales), of(
        codes.codes & 15, scales, torch.zeros_like(scales)
    )


class CodedProduct:
    """The product of a matrix of codes, with its bias, if any."""

    def __init__(self, codes: Codes, bias: Tensor | None, device: torch.device) -> None:
        self.outputs, inputs = codes.shape
        self._missing, self._beyond = codes.codes.shape[1] - inputs, -self.outputs % ROWS
        if self._beyond:
            parts = (codes.codes, codes.scales, codes.offsets)
            padded = (pad(tensor, (0, 0, 0, self._beyond)) for tensor in parts)
            codes = Codes(codes.bits, inputs, *padded)
        self._products = code_products(codes, device)
        self._bias = None if bias is None else bias.detach().float().to(device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] fp32 -> [T, out] fp32."""
        x = x.to(torch.bfloat16)
        x = pad(x, (0, self._missing)) if self._missing else x
        y = self._products[0](x).float()
        for product in self._products[1:]:
            y += product(x)
        y = y[:, : self.outputs] if self._beyond else y
        return y if self._bias is None else y + self._bias


def _packed(codes: Tensor, scales_and_zeros: Tensor) -> Product:
    pack = _pack_for_cpu if codes.device.type == "cpu" else _pack_for_cuda
    return pack(codes, scales_and_zeros)


def _pack_for_cpu(codes: Tensor, scales_and_zeros: Tensor) -> Product:
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)

    def multiply(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales_and_zeros)
        return y

    return multiply


def _pack_for_cuda(codes: Tensor, scales_and_zeros: Tensor) -> Product:
    tiles = next(tiles for tiles in TILES if codes.shape[1] % (16 * tiles) == 0)
    nibbles = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack(nibbles, tiles)

    def multiply(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales_and_zeros)
        return y

    return multiply
