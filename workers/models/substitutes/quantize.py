"""Codes of a substitute: quantisation by HQQ, and products of codes by torch's int4 operations
where ours cannot run. Groups of 64 inputs (axis 1) share a scale and an offset, weight = (code -
2^(bits - 1)) scale + offset, chosen without data (HQQ, Badri and Shaji 2023; settings of the
SubSpec paper, section 5). The only user of the hqq package."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dovetail.protocol.errors import SettingsError
from dovetail.workers.kernels.coded import GROUP, groups_of

BITS: Mapping[str, int] = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}
"""Type of a substitute's weights -> bits."""
SCHEME = f"hqq-axis1-group{GROUP}-2"  # the version of `quantise`, part of caches' names
CPU = torch.device("cpu")
REMEDY = "install it with `pip install 'dovetail-llm[subspec]'`"


@dataclass(frozen=True)
class Codes:
    """A matrix [rows, inputs] of `bits`-bit codes; the last group may exceed the inputs."""

    bits: int
    inputs: int
    codes: Tensor  # [rows, groups GROUP] uint8
    scales: Tensor  # [rows, groups] float16
    offsets: Tensor  # [rows, groups] float16

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.inputs

    def rows(self, places: Tensor) -> "Codes":
        """Return the rows at these places, int64 [rows]."""
        parts = (self.codes, self.scales, self.offsets)
        return Codes(self.bits, self.inputs, *(part[places] for part in parts))

    def weight(self) -> Tensor:
        """Return the decoded matrix, float32 [rows, inputs], to compare with."""
        rows, groups = self.scales.shape
        codes = (self.codes.float() - (1 << self.bits - 1)).view(rows, groups, GROUP)
        return (codes * self.scales.float()[..., None] + self.offsets.float()[..., None]).view(
            rows, -1
        )[:, : self.inputs]


def check_installed() -> None:
    """Raise `SettingsError` if the hqq package is missing; it is not imported yet."""
    if find_spec("hqq") is None:
        text = "draft.kind = 'substitute' quantises the target with hqq, which is not installed"
        raise SettingsError(f"{text}: {REMEDY}")


@torch.inference_mode()
def quantise(weight: Tensor, bits: int, device: torch.device = CPU) -> Codes:
    """Return the codes of weight [rows, inputs], on the CPU: about a second a million weights and
    core; GPUs solve in 16 bits. The last group is filled up with the last input."""
    rows, inputs = weight.shape
    groups = groups_of(inputs)
    whole = pad(weight.detach().to(device).float(), (0, groups * GROUP - inputs), mode="replicate")
    codes, meta = _quantizer().quantize(
        whole,
        nbits=bits,
        channel_wise=True,
        group_size=GROUP,
        optimize=True,
        round_zero=bits == 4,
        axis=1,
        bitpack=False,
        device=str(device),
    )
    scales, zeros = (meta[name].float().view(rows, groups) for name in ("scale", "zero"))
    offsets = ((1 << bits - 1) - zeros) * scales
    return Codes(
        bits,
        inputs,
        codes.view(rows, -1).to(torch.uint8).cpu(),
        scales.half().cpu(),
        offsets.half().cpu(),
    )


@cache
def _quantizer() -> Any:
    """Return hqq's quantizer, whose import takes seconds and warns."""
    check_installed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from hqq.core.quantize import Quantizer
    return Quantizer


def to_bytes(codes: Tensor, bits: int) -> Tensor:
    """codes [rows, inputs] -> [rows, inputs * bits / 8] uint8; 3 bits as two planes."""
    if bits == 3:
        return torch.cat([_plane(codes & 3, 2), _plane(codes >> 2, 1)], dim=1)
    return _plane(codes, bits)


def from_bytes(content: Tensor, bits: int) -> Tensor:
    """Return the codes [rows, inputs] encoded by `to_bytes`."""
    if bits == 3:
        lower = content.shape[1] * 2 // 3
        return _unplane(content[:, :lower], 2) | _unplane(content[:, lower:], 1) << 2
    return _unplane(content, bits)


def _plane(codes: Tensor, bits: int) -> Tensor:
    """The inputs in 8 / bits equal parts, one part above the other in the bits of a byte."""
    parts = codes.chunk(8 // bits, dim=1)
    plane = parts[0].clone()
    for shift, part in enumerate(parts[1:], start=1):
        plane |= part << bits * shift
    return plane


def _unplane(plane: Tensor, bits: int) -> Tensor:
    return torch.cat([plane >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], dim=1)


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
