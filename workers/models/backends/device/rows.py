"""The rows of a pass for layers on a device: angles, keys and values, and states."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.workers.devices.base import Program
from dovetail.workers.kernels.layer_plan import LayerPlan
from dovetail.workers.models.attention import Attending, Block, attend_blocks, by_torch
from dovetail.workers.models.backends.device.attention import PlacedCaches, placed_attention
from dovetail.workers.models.backends.device.parts import Parts, Turn, Turning
from dovetail.workers.models.backends.device.scan import StatefulRows
from dovetail.workers.models.cache import rounded


@dataclass(frozen=True)
class Rows:
    """The rows of several sessions, in the shapes of their caches."""

    turn: Turn | None  # the rotation of queries and keys; None if they are not rotated
    blocks: Mapping[int, Sequence[Block]]  # by how many query heads share a key head
    stateful: Sequence[StatefulRows] = ()  # the rows and the states of their sessions, if any
    by: Attending = by_torch
    inputs: Tensor | None = None  # the layers' own inputs, [T, total width]; None: they have none

    def attend(
        self, plan: LayerPlan, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> Tensor:
        """Cache key and value [kv_heads, T, head_dim] if given, and return attention [T, heads,
        head_dim] of query [heads, T, head_dim]."""
        return attend_blocks(
            plan.index,
            query,
            key,
            value,
            self.blocks[plan.heads // plan.kv_heads],
            scale_of(plan),
            plan.window or None,
            plan.softcap or None,
            plan.sinks,
            plan.chunk,
            self.by,
        )


@dataclass(frozen=True)
class Ours:
    """Our functions for rows whose keys and values of 16 bits have places."""

    attention: Program
    parts: Parts


@dataclass(frozen=True)
class PlacedRows:
    """The caches of the rows of a pass, each at its place."""

    ours: Ours
    places: Tensor  # int64 [T, PLACE]
    slots: Tensor  # int64 [T]: where the rows are written
    seen: int  # the most slots that a row sees

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write key and value [kv_heads, T, head_dim]."""
        heads, both = len(key), torch.cat([key, value]).transpose(0, 1).flatten(1)
        turning = Turning(self.ours.parts.program, 0, heads, None, None, 0.0)
        turning.placed(both, None, self.slots, self._of(layer, heads))

    def turned(
        self, layer: int, qkv: Tensor, angles: tuple[Tensor, Tensor], turning: Turning
    ) -> Tensor:
        """Return the rotated queries of qkv [T, (heads + 2 kv_heads) head_dim]; caches the rest."""
        return turning.placed(qkv, angles, self.slots, self._of(layer, turning.kv_heads))

    def attend(
        self,
        layer: int,
        heads: int,
        query: Tensor,
        mask: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return attention [T, heads, head_dim] of query [heads, T, head_dim]; `heads`: key
        heads."""
        placed = self._of(layer, heads)
        return placed_attention(self.ours.attention, query, placed, mask, scale, sinks)

    def _of(self, layer: int, heads: int) -> PlacedCaches:
        return PlacedCaches(self.places, layer, heads, self.seen)


@dataclass(frozen=True)
class FixedRows:
    """Rows in shapes that depend only on the numbers of rows and slots, for CUDA graphs."""

    turn: Turn | None
    cached: Tensor | PlacedRows  # the rows of one session's `KVCache`, or those of any
    slots: Tensor  # int64 [T]: where the rows are written; rows that are the same may share one
    masks: Mapping[tuple[int, int], Tensor]  # (window or 0, query heads of a key head) -> [.., S]
    stateful: Sequence[StatefulRows] = ()  # None: states are not in fixed shapes
    by: Attending = by_torch
    inputs: Tensor | None = None
    turns: bool = True  # False: rotated as those of other `Rows`, to the same bytes

    def attend(
        self, plan: LayerPlan, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> Tensor:
        if isinstance(self.cached, PlacedRows):
            if key is not None and value is not None:
                self.cached.write(plan.index, key, value)
            return self._attend(plan, query)
        keys, values = self.cached[plan.index, 0], self.cached[plan.index, 1]
        if key is not None and value is not None:
            keys.index_copy_(1, self.slots, rounded(key, keys.dtype))
            values.index_copy_(1, self.slots, rounded(value, values.dtype))
        return self._attend(plan, query)

    def attend_turned(self, plan: LayerPlan, qkv: Tensor, turning: Turning) -> Tensor:
        """Return `attend` of queries, keys and values [T, (heads + 2 kv_heads) head_dim] to be
        rotated."""
        assert self.turn is not None
        angles = self.turn.angles[id(plan.rotary)]
        if isinstance(self.cached, PlacedRows):
            return self._attend(plan, self.cached.turned(plan.index, qkv, angles, turning))
        keys, values = self.cached[plan.index, 0], self.cached[plan.index, 1]
        return self._attend(plan, turning(qkv, angles, self.slots, keys, values))

    def _attend(self, plan: LayerPlan, query: Tensor) -> Tensor:
        mask = self.masks[plan.window, plan.heads // plan.kv_heads]
        scale, cap = scale_of(plan), plan.softcap or None
        if isinstance(self.cached, PlacedRows):
            return self.cached.attend(plan.index, plan.kv_heads, query, mask, scale, plan.sinks)
        keys, values = self.cached[plan.index, 0], self.cached[plan.index, 1]
        keys, values = keys[:, : mask.shape[1]], values[:, : mask.shape[1]]
        return self.by(query, keys, values, mask, scale, cap, plan.sinks)


SeenRows = Rows | FixedRows  # the rows of a pass on the device


def scale_of(plan: LayerPlan) -> float:
    """Return the factor of the scores of a layer."""
    scale: float = plan.head_dim**-0.5 if plan.scale is None else plan.scale
    return scale
