"""The engines of stages: what computes the layers of a stage, on the CPU or on a device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dovetail.workers.devices.base import Transfer
from dovetail.workers.kernels.layer import DecoderLayer, LayerPass
from dovetail.workers.kernels.layer_plan import LANES, LayerPlan
from dovetail.workers.models import attention
from dovetail.workers.models.attention import Masks
from dovetail.workers.models.backends.blob import (
    ROUTER,
    Blob,
    Matrix,
    plan_at,
    unpack,
)
from dovetail.workers.models.backends.blocked_cache import BlockedCache, cache_rows
from dovetail.workers.models.backends.device.layer import (
    Angles,
    DeviceLayer,
    Rows,
    Turn,
    product,
)
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.segment import PROMPT_ROWS, Cache, Segment
from dovetail.workers.models.timing import asked

GPU_ROWS = 1024
"""Rows at a time of a long prompt on a GPU, where each time the streamed matrices are laid out
anew: 90 MB between the matrices of a 7B model's MLP."""


Run = Callable[[Any, Tensor], None]
"""A layer whose weights are there: (the rows of a pass, as its engine sees them; states [T,
hidden]), in place."""


class Ready(Protocol):
    """A layer that lacks its matrices."""

    def at(self, memory: Tensor) -> Run:
        """The layer with a copy of its blob that lies in `memory`, on the device, for as long as it
        lies there."""

    def settled(self, memory: Tensor) -> Run:
        """The layer that stays: of a copy of its blob, which only it holds on to."""


class Engine(Protocol):
    """The engine that computes layers on a device."""

    device: torch.device
    chunk: int
    """Rows of a prompt that a layer computes at a time."""

    def prepare(self, plan: LayerPlan, blob: Blob) -> Ready:
        """A layer, but for its matrices."""

    def new_cache(self, layers: int, plan: LayerPlan, capacity: int, dtype: torch.dtype) -> Cache:
        """An empty cache of so many layers like this one, with keys and values of a type."""

    def see(self, positions: Tensor, segments: Sequence[Segment]) -> Any:
        """The rows of a pass as the layers take them."""

    def hand_over(self, cache: Cache, to: BlockedCache, layer: int, rows: int) -> None:
        """The first rows of a cache of one layer, into a layer of a cache on the CPU."""


@dataclass(frozen=True)
class _KernelReady:
    plan: LayerPlan
    blob: Blob

    def at(self, memory: Tensor) -> Run:
        return DecoderLayer(plan_at(self.plan, self.blob, memory)).run

    settled = at


class KernelEngine:
    """The C++ kernels."""

    chunk = PROMPT_ROWS

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def prepare(self, plan: LayerPlan, blob: Blob) -> Ready:
        return _KernelReady(plan, blob)

    def new_cache(
        self, layers: int, plan: LayerPlan, capacity: int, dtype: torch.dtype
    ) -> BlockedCache:
        return BlockedCache(
            layers=layers,
            kv_heads=plan.kv_heads,
            head_dim=plan.head_dim,
            capacity=capacity,
            dtype=dtype,
        )

    def see(self, positions: Tensor, segments: Sequence[Segment]) -> LayerPass:
        rows = LayerPass(positions, [cache_rows(segment) for segment in segments])
        if (parts := asked()) is not None:
            rows.time_parts(parts.layers)
        return rows

    def hand_over(self, cache: Cache, to: BlockedCache, layer: int, rows: int) -> None:
        assert isinstance(cache, BlockedCache)
        blocks = -(-rows // LANES)
        to.keys[layer, :, :blocks] = cache.keys[0, :, :blocks]
        to.values[layer, :, :rows] = cache.values[0, :, :rows]


@dataclass(frozen=True)
class SettledLayer:
    """A layer that stays on a device, with its matrices as torch has them."""

    layer: DeviceLayer
    matrices: Mapping[str, Matrix]

    def __call__(self, rows: Rows, states: Tensor) -> None:
        self.layer.run(rows, states, lambda name, x: product(self.matrices[name], x))


class _TorchReady:
    def __init__(self, plan: LayerPlan, blob: Blob, device: torch.device) -> None:
        apart = plan.experts is not None and ROUTER not in blob.matrices
        self._blob, self._layer = blob, DeviceLayer(plan, device, host_experts=apart)

    def at(self, memory: Tensor) -> Run:
        """Each matrix is laid out when it is due, so that no more than one is there twice."""
        return lambda rows, states: self._layer.run(
            rows, states, lambda name, x: product(unpack(self._blob.matrices[name], memory), x)
        )

    def settled(self, memory: Tensor) -> Run:
        return SettledLayer(
            self._layer,
            {name: unpack(lying, memory) for name, lying in self._blob.matrices.items()},
        )


class TorchEngine:
    """torch's operations, on a GPU."""

    chunk = GPU_ROWS

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._masks: Masks | None = None
        self._angles = Angles(device)

    def take_angles(self, plan: LayerPlan) -> None:
        """Have the angles of a layer at hand in every pass."""
        if plan.rotary is not None:
            self._angles.add(plan.rotary)

    def prepare(self, plan: LayerPlan, blob: Blob) -> Ready:
        self.take_angles(plan)
        if self._masks is None:
            self._masks = Masks(
                groups=plan.heads // plan.kv_heads, device=self.device, dtype=torch.float32
            )
        return _TorchReady(plan, blob, self.device)

    def new_cache(self, layers: int, plan: LayerPlan, capacity: int, dtype: torch.dtype) -> KVCache:
        """Return a cache of zeros: who reads it in fixed shapes multiplies slots that nobody has
        written by 0."""
        cache = KVCache(
            layers=layers,
            kv_heads=plan.kv_heads,
            head_dim=plan.head_dim,
            capacity=capacity,
            dtype=dtype,
            device=self.device,
        )
        cache.rows.zero_()
        return cache

    def see(self, positions: Tensor, segments: Sequence[Segment]) -> Rows:
        assert self._masks is not None
        return Rows(self.turn(positions.to(self.device)), attention.arrange(segments, self._masks))

    def turn(self, positions: Tensor) -> Turn | None:
        """The angles of rows, positions int64 [T] on the device."""
        return self._angles.at(positions)

    def hand_over(self, cache: Cache, to: BlockedCache, layer: int, rows: int) -> None:
        assert isinstance(cache, KVCache)
        keys, values = (cache.rows[0, which, :, :rows].cpu() for which in (0, 1))
        to.values[layer, :, :rows] = values
        whole = rows // LANES
        kv_heads, _, head_dim = keys.shape
        to.keys[layer, :, :whole] = (
            keys[:, : whole * LANES].view(kv_heads, whole, LANES, head_dim).transpose(2, 3)
        )
        if rows % LANES:
            to.keys[layer, :, whole, :, : rows % LANES] = keys[:, whole * LANES :].transpose(1, 2)


def engine_of(transfer: Transfer) -> Engine:
    """Return what computes on the device at the end of a way."""
    return KernelEngine() if transfer.device.type == "cpu" else TorchEngine(transfer.device)
