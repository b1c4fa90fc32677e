"""Unpacks blocks uint8 [blocks, bytes] to fp32 [blocks, numbers], a function for each format
(ggml's `ggml-common.h`). With 32 numbers, byte j holds number j in its low half and j + 16 in its
high one; with 256, sub-blocks have scales of their own."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dovetail.workers.models.checkpoints.gguf.kinds import BF16, F16, F32, KINDS, MXFP4

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the numbers of e2m1
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers of IQ4_NL and IQ4_XS."""


def mxfp4(block: Tensor) -> Tensor:
    """2^(e - 128) for each block, e its first byte; that of e = 0 and 1 is subnormal."""
    exponents = block[:, :1].int()
    bits = torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1) << 23)
    return _table(E2M1)[_nibbles(block[:, 1:]).int()] * bits.view(torch.float32)


def q5_k(block: Tensor) -> Tensor:
    """Bit b of byte l is the fifth of number l of sub-block b."""
    high = block[:, 16:48, None].transpose(1, 2) >> _shifts(8, 1) & 1
    return _scaled(block, _pairs(block[:, 48:]) | high << 4)


def q6_k(block: Tensor) -> Tensor:
    """Halves of 128 numbers in four rows of 32; 8-bit scales for each 16."""
    low = block[:, :128].reshape(-1, 2, 1, 2, 32)
    low = torch.cat([low & 15, low >> 4], dim=2).view(-1, 2, 4, 32)
    high = block[:, 128:192].reshape(-1, 2, 1, 32) >> _shifts(4, 2) & 3
    scales = _signed(block[:, 192:208]) * _half(block, 208)
    return _by_sixteens(_less(low | high << 4, 32), scales)


def q3_k(block: Tensor) -> Tensor:
    """Two bits and a third one, whose absence takes 4 away; six-bit scales less 32."""
    absent = (block[:, :32].unsqueeze(1) >> _shifts(8, 1) & 1 ^ 1).view(-1, 2, 4, 32)
    codes = _crumbs(block[:, 32:96]).view(torch.int8) - (absent << 2).view(torch.int8)
    low, high = block[:, 96:104].unsqueeze(1), block[:, 104:108].unsqueeze(1)
    scales = (low >> _shifts(2, 4) & 15).flatten(1) | (high >> _shifts(4, 2) & 3).flatten(1) << 4
    return _by_sixteens(codes.float(), _less(scales, 32) * _half(block, 108))


def q2_k(block: Tensor) -> Tensor:
    """A scale and a minimum of four bits for each 16."""
    scales = (block[:, :16] & 15).float() * _half(block, 80)
    minima = (block[:, :16] >> 4).float() * _half(block, 82)
    found = _by_sixteens(_crumbs(block[:, 16:80]).float(), scales).view(-1, 16, 16)
    return (found - minima.unsqueeze(2)).flatten(1)


def iq4_xs(block: Tensor) -> Tensor:
    """Sub-blocks of 32 with six-bit scales less 32: four bits here, two there."""
    low = torch.stack([block[:, 4:8] & 15, block[:, 4:8] >> 4], dim=2).flatten(1)
    high = (block[:, 2:4].unsqueeze(2) >> _shifts(4, 2).view(1, 1, 4) & 3).flatten(1)
    scales = _less(low | high << 4, 32) * _half(block, 0)
    codes = block[:, 8:].reshape(-1, 8, 16)
    numbers = _table(IQ4)[torch.cat([codes & 15, codes >> 4], dim=2).int()]
    return (numbers * scales.unsqueeze(2)).flatten(1)


def _half(block: Tensor, place: int) -> Tensor:
    """The 16-bit float of each block at a place, as fp32 [blocks, 1]."""
    return block[:, place : place + 2].contiguous().view(torch.float16).float()


def _signed(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.int8).float()


def _less(codes: Tensor, middle: int) -> Tensor:
    """Codes below 128 less their middle."""
    return (codes.view(torch.int8) - middle).float()


def _nibbles(codes: Tensor) -> Tensor:
    return torch.cat([codes & 15, codes >> 4], dim=1)


def _fifth(bits: Tensor, codes: Tensor) -> Tensor:
    """Nibbles with a fifth bit each: number i has bit i of four bytes."""
    high = (bits.unsqueeze(2) >> _shifts(8, 1).view(1, 1, 8) & 1).flatten(1)
    return _nibbles(codes) | high << 4


def _pairs(codes: Tensor) -> Tensor:
    """Codes [blocks, 8, 32] of 128 bytes: each 32 of them hold two sub-blocks."""
    rows = codes.reshape(-1, 4, 1, 32)
    return torch.cat([rows & 15, rows >> 4], dim=2).view(-1, 8, 32)


def _crumbs(codes: Tensor) -> Tensor:
    """Codes of two bits [blocks, 2, 4, 32] of 64 bytes: each 32 of them hold four rows."""
    return codes.reshape(-1, 2, 1, 32) >> _shifts(4, 2) & 3


def _scaled(block: Tensor, codes: Tensor) -> Tensor:
    """Return numbers of codes [blocks, 8, 32], with the packed 6-bit scales and minima of Q4_K and
    Q5_K."""
    first, second, third = block[:, 4:8], block[:, 8:12], block[:, 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1).float() * _half(block, 0)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1).float()
    minima = minima * _half(block, 2)
    return (codes.float() * scales.unsqueeze(2) - minima.unsqueeze(2)).flatten(1)


def _by_sixteens(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes of 256 numbers by their 16 scales."""
    return (codes.reshape(-1, 16, 16) * scales.unsqueeze(2)).flatten(1)


def _shifts(count: int, step: int) -> Tensor:
    """Shifts by 0, `step`, ..., one for each of `count` rows."""
    return torch.arange(0, count * step, step, dtype=torch.uint8).view(count, 1)


def _table(numbers: tuple[int, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


CHUNK = 1 << 19  # numbers unpacked at a time: intermediate results stay in the CPU cache
PLAIN = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}  # kinds that are numbers
UNPACK: Mapping[int, Callable[[Tensor], Tensor]] = {  # `KINDS` has their names
    2: lambda block: _less(_nibbles(block[:, 2:]), 8) * _half(block, 0),
    3: lambda block: _nibbles(block[:, 4:]).float() * _half(block, 0) + _half(block, 2),
    6: lambda block: _less(_fifth(block[:, 2:6], block[:, 6:]), 16) * _half(block, 0),
    7: lambda block: (
        _fifth(block[:, 4:8], block[:, 8:]).float() * _half(block, 0) + _half(block, 2)
    ),
    8: lambda block: _signed(block[:, 2:]) * _half(block, 0),
    10: q2_k,
    11: q3_k,
    12: lambda block: _scaled(block, _pairs(block[:, 16:])),
    13: q5_k,
    14: q6_k,
    20: lambda block: _table(IQ4)[_nibbles(block[:, 2:]).int()] * _half(block, 0),
    23: iq4_xs,
    MXFP4: mxfp4,
}


def unpacked(content: bytearray, kind: int, shape: Sequence[int]) -> Tensor:
    """Return a tensor's numbers [*shape] in their own type; blocks in fp32, MXFP4 in bf16."""
    if kind in PLAIN:
        return torch.frombuffer(content, dtype=PLAIN[kind]).view(*shape)
    said, unpack = KINDS[kind], UNPACK[kind]
    blocks = torch.frombuffer(content, dtype=torch.uint8).view(-1, said.size_bytes)
    dtype = torch.bfloat16 if kind == MXFP4 else torch.float32
    whole = torch.empty(len(blocks), said.numbers, dtype=dtype)
    step = CHUNK // said.numbers
    for first in range(0, len(blocks), step):
        whole[first : first + step] = unpack(blocks[first : first + step])
    return whole.view(*shape)
