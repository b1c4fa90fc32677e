"""The memory that drafts which are no model of their own take while they are loaded: a substitute,
and a head. Functions of shapes; needs no torch."""

from collections.abc import Sequence

from dovetail.workers.models.checkpoints.footprint import (
    HEAD,
    PROCESS_BYTES,
    TABLE,
    Tensor,
    layers_in,
    tied_head,
)


def substitute_loading_bytes(tensors: Sequence[Tensor], bits: int) -> int:
    """Return the most that a process holds while it loads a substitute in codes of so many bits,
    once they have been made."""
    layers = layers_in(tensors)
    numbers = sum(tensor.numbers for layer in layers for tensor in layer if tensor.is_matrix)
    inside = {tensor.name for layer in layers for tensor in layer}
    rest = [tensor for tensor in tensors if tensor.name not in inside]
    codes = numbers // 64 * (32 + 4) * (1 if bits <= 4 else 2)
    stored = max((sum(tensor.stored_bytes for tensor in layer) for layer in layers), default=0)
    head = max((tensor.stored_bytes for tensor in [*rest, *tied_head(tensors)]), default=0)
    return (
        PROCESS_BYTES
        + codes
        + sum(tensor.stored_bytes for tensor in [*rest, *tied_head(tensors)])
        + max(stored, head)
    )


def head_loading_bytes(tensors: Sequence[Tensor], target: Sequence[Tensor]) -> int:
    """Return the least that a process holds for a draft head as it is stored, with the embedding
    and the output head of its target where it lacks them."""
    whole = (*tensors, *tables_lacking(tensors, target))
    return PROCESS_BYTES + sum(tensor.stored_bytes for tensor in whole)


def tables_lacking(tensors: Sequence[Tensor], target: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the embedding and the output head of a target as far as a draft head lacks them."""
    lacks = [
        found for found in (TABLE, HEAD) if not any(found.search(tensor.name) for tensor in tensors)
    ]
    return [tensor for tensor in target if any(found.search(tensor.name) for found in lacks)]
