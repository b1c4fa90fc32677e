"""The numbers of GGUF tensors. Blocks are computed in fp32 in ggml's order, the same bits
everywhere."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.workers.models.checkpoints.gguf import unpacking
from dovetail.workers.models.checkpoints.gguf.kinds import BF16, F16, F32, KINDS, MXFP4

CHUNK = 1 << 19
"""Numbers that are unpacked at a time: all that is made on the way stays in the cache."""
PLAIN = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}
"""Kinds whose numbers stand there as they are."""
UNPACK = {
    2: unpacking.q4_0,
    3: unpacking.q4_1,
    6: unpacking.q5_0,
    7: unpacking.q5_1,
    8: unpacking.q8_0,
    10: unpacking.q2_k,
    11: unpacking.q3_k,
    12: unpacking.q4_k,
    13: unpacking.q5_k,
    14: unpacking.q6_k,
    20: unpacking.iq4_nl,
    23: unpacking.iq4_xs,
    MXFP4: unpacking.mxfp4,
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
