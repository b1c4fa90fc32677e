"""The bytes that operations on the pretended device read and write: on a GPU, which computes faster
than its memory brings numbers, they are what a level takes at least."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pretended.values import values_in

aten = torch.ops.aten
UNWRITTEN = (
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
)
"""Operations that take memory and write nothing."""
GATHERS = (aten.index_select, aten.embedding, aten.gather, aten.index, aten._unsafe_index)
"""Operations that read as much of their first tensor as they write."""
SCATTERS = (aten.index_copy_, aten.scatter_, aten.index_put_)
"""Operations that write as much of their first tensor as they read of others."""


def moved_by(function: Any, args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """Return the bytes that an operation of torch moves: each of its tensors once, and nothing for
    a view or for memory that is not written."""
    if function.is_view or function.overloadpacket in UNWRITTEN:
        return 0
    given = [t for t in values_in(args) if isinstance(t, Tensor)]
    if function.overloadpacket in SCATTERS:
        return 2 * bytes_of(given[1:])
    if function.overloadpacket in GATHERS:
        given = [*results, *given[1:]]
    return bytes_of([*given, *results])


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, each of which counts once."""
    own = {(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in tensors}
    return sum(own.values())
