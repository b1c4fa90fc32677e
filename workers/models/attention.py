"""Attention over cache slots by torch, registered with transformers as "dovetail", for rows of
several sessions side by side. transformers builds no mask for an implementation without one in its
AttentionMaskInterface."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from dovetail.workers.models import transformers
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.segment import Segment
from dovetail.workers.models.timing import timing
from dovetail.workers.progress import beat

IMPLEMENTATION = "dovetail"
HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)
"""Keywords that do not change attention; any other refuses the model."""
KNOWN = {"position_bias": "biases of positions (position_bias)"}  # other names of some of these


Reach = tuple[int | None, int]  # the window of a row, or None, and the size of chunks, or 0


@dataclass
class Masks:
    """The form of the masks that are added to scores."""

    groups: int  # query heads of a key head
    device: torch.device
    dtype: torch.dtype

    def make(self, slots: int, parts: Sequence[tuple[int, Tensor]]) -> Tensor:
        """Return [1, 1, groups * count, slots], zero but for `parts`: first column and its [count,
        K]."""
        rows = self.groups * parts[0][1].shape[0]
        mask = torch.zeros(rows, slots, dtype=self.dtype, device=self.device)
        for first, part in parts:
            mask[:, first : first + part.shape[1]] = part.repeat(self.groups, 1)
        return mask.unsqueeze(0).unsqueeze(0)


@dataclass(frozen=True)
class Block:
    """A segment in a pass, with the masks of the layers' windows."""

    segment: Segment
    first: int
    masks: Masks
    _made: dict[Reach, tuple[int, Tensor | None]] = field(default_factory=dict)

    def view(self, window: int | None, chunk: int = 0) -> tuple[int, Tensor | None]:
        """Return the first slot that any row sees, and the mask [groups * count, slots from there]
        to add or None. `chunk`: rows see back to a multiple of it; 0: all."""
        if (window, chunk) not in self._made:
            self._made[window, chunk] = self._make(window, chunk)
        return self._made[window, chunk]

    def _make(self, window: int | None, chunk: int) -> tuple[int, Tensor | None]:
        segment = self.segment

        def first(last: int) -> int:
            if window is not None:
                return max(0, last - window + 1)
            return last - last % chunk if chunk else 0

        if segment.count == 1 and segment.paths is None:
            return first(segment.start), None
        stop = segment.start + segment.count
        prefix = segment.start if segment.paths is None else segment.paths.prefix
        tail = self._tail(prefix, stop)
        limited = window is not None or chunk > 0
        oldest = [first(last) for last in self._positions()] if limited else [0]
        low, high = min(prefix, *oldest), min(prefix, max(oldest))
        self._cut(tail, prefix, oldest)
        parts = [(prefix - low, tail)]
        if high > low:
            parts.append((0, self._before(low, high, oldest)))
        return low, self.masks.make(stop - low, parts)

    def _tail(self, prefix: int, stop: int) -> Tensor:
        """[count, stop - prefix] of 0 and -inf: the slots after the prefix that rows see."""
        count, paths = self.segment.count, self.segment.paths
        tail = torch.full((count, stop - prefix), float("-inf"))
        if paths is None:
            return tail.triu(1)
        rows = torch.repeat_interleave(torch.arange(count), torch.from_numpy(paths.offsets).diff())
        tail[rows, torch.from_numpy(paths.slots).long() - prefix] = 0.0
        return tail

    def _positions(self) -> Iterator[int]:
        paths = self.segment.paths
        if paths is None:
            return iter(range(self.segment.start, self.segment.start + self.segment.count))
        return (paths.prefix + int(length) - 1 for length in paths.offsets[1:] - paths.offsets[:-1])

    def _cut(self, tail: Tensor, prefix: int, oldest: Sequence[int]) -> None:
        """Hide slots after the prefix and before row i's window, which starts at oldest[i]."""
        for row, position in enumerate(oldest):
            if position > prefix:
                path = self.segment.paths
                gone = (
                    range(prefix, position) if path is None else path.row(row)[: position - prefix]
                )
                tail[row, [int(slot) - prefix for slot in gone]] = float("-inf")

    def _before(self, low: int, high: int, oldest: Sequence[int]) -> Tensor:
        """Return [count, high - low] of 0 and -inf: slots of the prefix that only some rows see."""
        before = torch.zeros(len(oldest), high - low)
        for row, position in enumerate(oldest):
            before[row, : max(0, position - low)] = float("-inf")
        return before


@dataclass(frozen=True)
class Noted:
    """The arguments with which a layer called its attention."""

    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    window: int | None
    softcap: float | None
    value_dim: int
    sinks: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, key heads and the width of each."""
        return self.heads, self.kv_heads, self.head_dim


NOTHING = Noted(0, 0, 0, 0.0, None, None, 0)  # the attention of a layer without its own
Notes = Callable[[Noted, Tensor, Tensor, Tensor], None]
"""Receives attention's arguments, with queries, keys and values [1, heads or kv_heads, T,
head_dim]."""


_handed: ContextVar[tuple[tuple[Block, ...], Notes] | None] = ContextVar("handed", default=None)


@contextmanager
def handing(blocks: tuple[Block, ...], notes: Notes) -> Iterator[None]:
    """Pass blocks and listener to attention around layers that drop unknown arguments."""
    token = _handed.set((blocks, notes))
    try:
        yield
    finally:
        _handed.reset(token)


def arrange(segments: Sequence[Segment], masks: Masks) -> tuple[Block, ...]:
    """The blocks of a pass."""
    blocks, first = [], 0
    for segment in segments:
        blocks.append(Block(segment, first, masks))
        first += segment.count
    return tuple(blocks)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    blocks: tuple[Block, ...] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    notes: Notes | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Cache key and value [1, kv_heads, T, head_dim], and return attention [1, T, heads, head_dim]
    of query [1, heads, T, head_dim]. `s_aux` [heads]: sinks; `notes` receives the arguments.
    ValueError for unsupported ones."""
    if blocks is None and (handed := _handed.get()) is not None:
        blocks, notes = handed
    if blocks is None:
        raise ValueError("some of the model's inputs do not reach its attention")
    if strange := sorted(
        name for name, value in others.items() if value is not None and name not in HARMLESS
    ):
        raise ValueError(f"attention with {KNOWN.get(strange[0], strange[0])} is not supported")
    if attention_mask is not None:
        raise ValueError("attention with its own mask is not supported")
    if dropout or is_causal is False:
        what = "dropout" if dropout else "is_causal = false"
        raise ValueError(f"attention with {what} is not supported")
    beat()
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if notes is not None:
        notes(
            Noted(
                query.shape[1],
                key.shape[1],
                query.shape[3],
                scale,
                sliding_window,
                softcap,
                value.shape[3],
                s_aux is not None,
            ),
            query,
            key,
            value,
        )
    with timing("attention"):
        return attend_blocks(
            layer, query[0], key[0], value[0], blocks, scale, sliding_window, softcap, s_aux
        ).contiguous().unsqueeze(0), None


Attending = Callable[
    [Tensor, Tensor, Tensor, Tensor | None, float, float | None, Tensor | None], Tensor
]
"""The arguments of `by_torch`, and its result."""


def by_torch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return [T, heads, head_dim] of query [heads, T, head_dim], keys and values [kv_heads, S,
    head_dim], mask [..., groups * T, S] of 0 and -inf, and sinks [heads]. Query heads of a key head
    become its rows, so no key is repeated."""
    heads, rows, size = query.shape
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    packed = query.reshape(1, len(keys), -1, size)
    if cap is None and sinks is None:
        output = scaled_dot_product_attention(
            packed, keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask, scale=scale
        )
    else:
        if sinks is not None:
            sinks = sinks.view(len(keys), -1, 1).repeat_interleave(rows, 1)
        output = attend_by_scores(packed, keys, values, mask, scale, cap, sinks)
    return output.reshape(heads, rows, -1).transpose(0, 1)


def attend_blocks(
    layer: int,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    blocks: Sequence[Block],
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int = 0,
    by: Attending = by_torch,
) -> Tensor:
    """Return one layer's attention [T, heads, head_dim] of query [heads, T, head_dim]; key and
    value [kv_heads, T, head_dim] are cached, None: they are there."""
    outputs = [
        _attend_block(layer, query, key, value, block, scale, (window, chunk), cap, sinks, by)
        for block in blocks
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_block(
    layer: int,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    block: Block,
    scale: float,
    reach: Reach,
    cap: float | None,
    sinks: Tensor | None,
    by: Attending,
) -> Tensor:
    segment, rows = block.segment, slice(block.first, block.first + block.segment.count)
    cache = segment.cache
    if not isinstance(cache, KVCache):
        raise TypeError(f"a cache of type {type(cache).__name__} belongs to another back end")
    if key is not None and value is not None:
        cache.write(layer, key[:, rows], value[:, rows], segment.start)
    low, mask = block.view(*reach)
    keys, values = cache.view(layer, low, segment.start + segment.count)
    return by(query[:, rows], keys, values, mask, scale, cap, sinks)


def attend_by_scores(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention with capped scores, cap * tanh(score / cap), or `sinks` [kv_heads, rows, 1]."""
    scores = query @ keys.transpose(-1, -2) * (scale if cap is None else scale / cap)
    if cap is not None:
        scores = torch.tanh(scores) * cap
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return scores.softmax(dim=-1) @ values
    with_sinks = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    return with_sinks.softmax(dim=-1)[..., :-1] @ values


def register() -> None:
    """Register the implementation with transformers; idempotent."""
    transformers.AttentionInterface.register(IMPLEMENTATION, attend)
