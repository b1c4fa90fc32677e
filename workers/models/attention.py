"""Attention over the cache's slots, registered with transformers as the implementation "dovetail".

A pass computes the rows of several sessions side by side; each session's rows attend to its own cache: the committed slots and those slots of a tree
that its mask names. Knows slots and masks, not why a row may see another. transformers builds no mask for an implementation that has none registered
with its AttentionMaskInterface, which is what we want: masks are ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from dovetail.workers.models.cache import KVCache

IMPLEMENTATION = "dovetail"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""What some families add to their attention; a model that passes one of them is refused rather than computed wrongly."""


@dataclass(frozen=True)
class Segment:
    """The rows of one session in a pass: `count` rows that are written to slots start, start+1, ... of its cache."""

    cache: KVCache
    start: int
    count: int
    mask: Tensor | None = None
    """bool [count, K], True = sees, for the last K <= start + count slots; what lies before them is seen. None: causal over slots."""


@dataclass(frozen=True)
class Block:
    """A segment ready for the kernel: its first row in the pass, and the mask to add, for the query heads of one key head below each other."""

    segment: Segment
    first: int
    bias: Tensor | None
    """[1, 1, groups * count, start + count] of 0 and -inf; None: every row sees every slot."""


def arrange(segments: Sequence[Segment], *, groups: int, dtype: torch.dtype, device: torch.device) -> tuple[Block, ...]:
    """The blocks of a pass, one mask for all layers; `groups`: query heads a key head."""
    blocks, first = [], 0
    for segment in segments:
        blocks.append(Block(segment, first, _bias(segment, groups, dtype, device)))
        first += segment.count
    return tuple(blocks)


def _bias(segment: Segment, groups: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    count, slots = segment.count, segment.start + segment.count
    if segment.mask is None and count == 1:
        return None
    mask = torch.ones(count, count, dtype=torch.bool, device=device).tril() if segment.mask is None else segment.mask.to(device)
    bias = torch.zeros(groups, count, slots, dtype=dtype, device=device)
    bias[:, :, slots - mask.shape[1] :].masked_fill_(~mask, float("-inf"))
    return bias.view(1, 1, groups * count, slots)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    blocks: tuple[Block, ...],
    scaling: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Write key and value [1, kv_heads, T, head_dim], attend with query [1, heads, T, head_dim]; returns [1, T, heads, head_dim]."""
    for name in UNSUPPORTED:
        if unused.get(name) is not None:
            raise ValueError(f"attention with {name} is not supported")
    layer: int = module.layer_idx  # type: ignore[assignment]
    outputs = [_attend_block(layer, query[0], key[0], value[0], block, scaling) for block in blocks]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0), None


def _attend_block(layer: int, query: Tensor, key: Tensor, value: Tensor, block: Block, scaling: float | None) -> Tensor:
    """The query heads that share a key head are laid below each other as rows of that head, so that no key is ever repeated."""
    segment, rows = block.segment, slice(block.first, block.first + block.segment.count)
    segment.cache.write(layer, key[:, rows], value[:, rows], segment.start)
    keys, values = segment.cache.view(layer, segment.start + segment.count)
    heads, _, size = query.shape
    packed = query[:, rows].reshape(1, keys.shape[0], -1, size)
    output = scaled_dot_product_attention(packed, keys.unsqueeze(0), values.unsqueeze(0), attn_mask=block.bias, scale=scaling)
    return output.reshape(heads, segment.count, -1).transpose(0, 1)


def register() -> None:
    """Make the implementation known to transformers; again and again is harmless."""
    AttentionInterface.register(IMPLEMENTATION, attend)
