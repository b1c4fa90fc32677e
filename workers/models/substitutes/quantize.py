"""Quantisation by HQQ, the only user of the hqq package: groups of 64 inputs (axis 1) share a scale
and an offset, weight = (code - 2^(bits - 1)) scale + offset, chosen without data (HQQ, Badri and
Shaji 2023; settings of the SubSpec paper, section 5)."""

import warnings
from collections.abc import Mapping
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
REMEDY = "install it with `pip install 'dovetail[subspec]'`"


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
        raise SettingsError(
            "draft.kind = 'substitute' quantises the target with the hqq package, which is "
            f"not installed: {REMEDY}"
        )


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
