"""Decodes matrices of codes, (code - zero point) x scale in fp32, and of MXFP4: four-bit numbers
with a power of two for each 32 (OCP Microscaling Formats 1.0), which all fit into bf16."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.workers.models.checkpoints.quantised.schemes import AWQ_BITS, WORD

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


AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # the output, of eight, of each code in a word of AWQ
CHUNK = 1 << 20  # numbers that are decoded at a time, so that little memory is taken on the way


def split(words: Tensor, bits: int) -> Tensor:
    """Return the codes [.., n * 32 / bits] int32 of words [.., n], lowest bits first."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def awq(words: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """Return [out, in] fp32 of AWQ's words [in, out / 8], zero points [groups, out / 8] and scales
    [groups, out]; groups are consecutive inputs."""
    inputs, outputs = len(words), scales.shape[1]
    order = torch.tensor(AWQ_PLACES).argsort()
    middle = _placed(split(zeros, AWQ_BITS), order)
    groups = torch.arange(inputs) // (inputs // len(scales))
    whole = torch.empty(outputs, inputs)
    for part in _parts(inputs, outputs):
        codes = _placed(split(words[part], AWQ_BITS), order)
        group = groups[part]
        whole[:, part] = ((codes - middle[group]) * scales[group].float()).t()
    return whole


def gptq(
    words: Tensor,
    zeros: Tensor,
    scales: Tensor,
    groups: Tensor,
    bits: int,
    *,
    below: bool,
    symmetric: bool,
) -> Tensor:
    """Return [out, in] fp32 of GPTQ's words [in bits / 32, out], zero points [groups, out bits /
    32] and scales [groups, out]; `groups` [in]: of each input. `below`: zero points are stored less
    one, unless all `symmetric` ones are the middle, as in some files."""
    each, outputs = WORD // bits, words.shape[1]
    middle = split(zeros, bits)[:, :outputs]
    if below and not (symmetric and bool((middle == 1 << (bits - 1)).all())):
        middle = (middle + 1) & ((1 << bits) - 1)
    whole = torch.empty(outputs, len(groups))
    for part in _parts(len(words), outputs * each):
        codes = split(words[part].t(), bits)
        inputs = slice(part.start * each, min(part.stop * each, len(groups)))
        group = groups[inputs].long()
        whole[:, inputs] = (codes[:, : len(group)] - middle[group].t()) * scales[group].t().float()
    return whole


def packed(
    words: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None, bits: int
) -> Tensor:
    """Return [out, in] fp32 of compressed-tensors' words [out, in bits / 32], scales [out, groups]
    and zero points [out bits / 32, groups], stored with their middle added; `groups` [in] or None:
    consecutive."""
    outputs, inputs, centre = len(words), words.shape[1] * WORD // bits, 1 << (bits - 1)
    if groups is None:
        groups = torch.arange(inputs) // (inputs // scales.shape[1])
    group, middle = groups.long(), None if zeros is None else split(zeros.t(), bits).t()[:outputs]
    whole = torch.empty(outputs, inputs)
    for part in _parts(outputs, inputs):
        codes = split(words[part], bits)
        codes -= centre if middle is None else middle[part][:, group]
        whole[part] = codes * scales[part].float()[:, group]
    return whole


def scaled(codes: Tensor, scales: Tensor, zeros: Tensor | None, block: tuple[int, int]) -> Tensor:
    """Return [.., out, in] fp32 of int8 or fp8 codes, with scales and zero points [.., a, b] for
    each `block` of outputs and inputs."""
    whole = codes.float()
    rows, columns = (min(size, most) for size, most in zip(block, codes.shape[-2:], strict=True))
    for first in range(0, codes.shape[-2], rows):
        one = whole[..., first : first + rows, :]
        if zeros is not None:
            one -= _spread(zeros, first // rows, columns, codes.shape[-1])
        one *= _spread(scales, first // rows, columns, codes.shape[-1])
    return whole


def _spread(scales: Tensor, row: int, columns: int, inputs: int) -> Tensor:
    """Return a row of scales [.., 1, in], each repeated for its group."""
    return scales[..., row : row + 1, :].float().repeat_interleave(columns, -1)[..., :inputs]


def _placed(codes: Tensor, order: Tensor) -> Tensor:
    """Return codes in the order of their outputs, undoing a permutation within each eight."""
    return codes.view(*codes.shape[:-1], -1, len(order))[..., order].flatten(-2)


def _parts(count: int, width: int) -> Sequence[slice]:
    step = max(1, CHUNK // max(1, width))
    return [slice(first, min(first + step, count)) for first in range(0, count, step)]
