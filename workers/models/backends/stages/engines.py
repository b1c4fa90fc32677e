"""The engines that compute the layers of a stage, on the CPU or on a device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from dovetail.protocol.errors import SettingsError
from dovetail.workers.devices.base import Capture, Transfer
from dovetail.workers.kernels.layer import DecoderLayer, LayerPass
from dovetail.workers.kernels.layer_plan import CODES, LANES, LayerPlan
from dovetail.workers.models import attention
from dovetail.workers.models.attention import Masks, by_torch
from dovetail.workers.models.backends.blob import ROUTER, Blob, Lying, Matrix, plan_at, unpack
from dovetail.workers.models.backends.blocked_cache import (
    BlockedCache,
    cache_for,
    cache_rows,
    states_of,
)
from dovetail.workers.models.backends.device import parts
from dovetail.workers.models.backends.device.attention import CONTEST, attending
from dovetail.workers.models.backends.device.choice import Products, products_on
from dovetail.workers.models.backends.device.fixed import ArenaCache, Arenas
from dovetail.workers.models.backends.device.layer import DeviceLayer
from dovetail.workers.models.backends.device.levels import Levels, is_placeable
from dovetail.workers.models.backends.device.own_blocks import blocks_on
from dovetail.workers.models.backends.device.parts import Angles, Parts, Turn
from dovetail.workers.models.backends.device.products import Product, product, rounded_product
from dovetail.workers.models.backends.device.rows import Ours, Rows, SeenRows
from dovetail.workers.models.backends.device.scan import StatefulRows
from dovetail.workers.models.cache import HALF, Heads, KVCache, MixedKVCache
from dovetail.workers.models.recurrent import RecurrentStates
from dovetail.workers.models.segment import PROMPT_ROWS, Cache, Segment
from dovetail.workers.models.timing import asked

GPU_ROWS = 1024  # rows of a long prompt on a GPU: 90 MB between the MLP's matrices at 7B


Run = Callable[[Any, Tensor], None]  # a layer: (rows of a pass, states [T, hidden]), in place


class Ready(Protocol):
    """A layer that lacks its matrices."""

    def at(self, memory: Tensor) -> Run:
        """Return the layer with a copy of its blob in `memory` on the device."""

    def settled(self, memory: Tensor) -> Run:
        """Return a resident layer, made from its own copy of its blob."""


class Engine(Protocol):
    """The engine that computes layers on a device."""

    device: torch.device
    chunk: int  # rows of a prompt that a layer computes at a time

    def prepare(self, plan: LayerPlan, blob: Blob) -> Ready:
        """A layer without its matrices."""

    def expect(self, dtype: torch.dtype) -> None:
        """Prepare for keys and values of a type, once all layers are added."""

    def new_cache(self, plans: Sequence[LayerPlan], capacity: int, dtype: torch.dtype) -> Cache:
        """An empty cache of layers, with keys and values of a type."""

    def see(
        self, positions: Tensor, segments: Sequence[Segment], inputs: Tensor | None = None
    ) -> Any:
        """Return the rows of a pass for the layers; `inputs`: the layers' own, on the CPU."""

    def hand_over(self, cache: Cache, to: BlockedCache, plan: LayerPlan, rows: int) -> None:
        """The first rows of a cache of one layer, into those of a layer of a cache on the CPU."""


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

    def expect(self, dtype: torch.dtype) -> None:
        """Do nothing: the kernels read keys and values of every type."""

    def new_cache(
        self, plans: Sequence[LayerPlan], capacity: int, dtype: torch.dtype
    ) -> BlockedCache:
        return cache_for(plans, capacity, dtype)

    def see(
        self, positions: Tensor, segments: Sequence[Segment], inputs: Tensor | None = None
    ) -> LayerPass:
        rows = LayerPass(positions, [cache_rows(segment) for segment in segments])
        if inputs is not None:
            rows.use_inputs(inputs)
        if (parts := asked()) is not None:
            rows.time_parts(parts.layers)
        return rows

    def hand_over(self, cache: Cache, to: BlockedCache, plan: LayerPlan, rows: int) -> None:
        assert isinstance(cache, BlockedCache)
        _hand_states(cache.states, to.states, plan, rows)
        if plan.caches:
            blocks = -(-rows // LANES)
            (keys, values), own = to.of_layer(plan.index), cache.of_layer(0)
            keys[:, :blocks] = own[0][:, :blocks]
            values[:, :rows] = own[1][:, :rows]


def _hand_states(
    states: RecurrentStates | None, to: RecurrentStates | None, plan: LayerPlan, rows: int
) -> None:
    """Copy the states of a session's first rows in one layer into those of all layers."""
    if plan.scan is not None:
        assert states is not None
        assert to is not None
        to.take_over(plan.scan.index, states, rows)


@dataclass(frozen=True)
class SettledLayer:
    """A layer that stays on a device, with matrices in the layout of its products."""

    layer: DeviceLayer
    matrices: Mapping[str, Matrix | Product]

    def __call__(self, rows: SeenRows, states: Tensor) -> None:
        self.layer.run(rows, states, lambda name, x: product(self.matrices[name], x))

    def roughly(self, rows: SeenRows, states: Tensor) -> None:
        """Compute for a draft: products may round to the type of the weights."""
        matrices, narrow = self.matrices, self.layer.narrow
        self.layer.run(rows, states, lambda name, x: rounded_product(matrices[name], x, narrow))


class _TorchReady:
    def __init__(self, plan: LayerPlan, blob: Blob, engine: "TorchEngine") -> None:
        apart = plan.experts is not None and ROUTER not in blob.matrices
        self._blob, self._engine = blob, engine
        self._layer = DeviceLayer(plan, engine.device, engine.parts, host_experts=apart)

    def at(self, memory: Tensor) -> Run:
        """Lay out each matrix when it is used, so that only one is in memory twice."""
        own: dict[str, Product] = {}

        def multiply(name: str, x: Tensor) -> Tensor:
            if name in own:
                return own[name](x)
            matrix = self._engine.lay_out(self._blob.matrices[name], memory)
            if not isinstance(matrix, Matrix):
                own[name] = matrix
            return product(matrix, x)

        return lambda rows, states: self._layer.run(rows, states, multiply)

    def settled(self, memory: Tensor) -> Run:
        lay_out = self._engine.lay_out
        return SettledLayer(
            self._layer,
            {name: lay_out(lying, memory) for name, lying in self._blob.matrices.items()},
        )


class TorchEngine:
    """torch's operations on a GPU, and products of ours where these have been chosen."""

    chunk = GPU_ROWS

    def __init__(self, device: torch.device, products: Products | None = None) -> None:
        """`products`: the choice for each type of weights; None: all are torch's."""
        self.device, self.products = device, products
        self.by = by_torch if products is None else attending(products)
        self.arenas = Arenas()
        self._masks: dict[int, Masks] = {}  # by how many query heads share a key head
        self._angles = Angles(device)

    @cached_property
    def parts(self) -> Parts | None:
        """Return our functions for the work between products; None: torch computes it."""
        program = None if self.products is None else self.products.owner(parts.CONTEST)
        return None if program is None else Parts(program)

    def ours_for(self, plans: Sequence[LayerPlan]) -> Ours | None:
        """Return our functions for rows of several sessions; None if torch computes a part."""
        if self.products is None or self.parts is None or not all(map(is_placeable, plans)):
            return None
        attention = self.products.owner(CONTEST)
        return None if attention is None else Ours(attention, self.parts)

    def levels(
        self,
        capture: Capture,
        hidden: int,
        plans: Sequence[LayerPlan],
        layers: Sequence[Run],
        logits: Callable[[Tensor], Tensor],
    ) -> Levels:
        """Return the levels of a model whose layers are computed here."""
        ours = self.ours_for(plans)
        own = self.turn, self.by
        return Levels(capture, self.device, hidden, plans, layers, *own, logits, ours)

    def take(self, plan: LayerPlan) -> None:
        """Prepare the angles and masks of a layer for every pass. `SettingsError` for a layer that
        only a CPU computes."""
        if plan.streams is not None:
            what = "several states per token (Gemma 3n)"
            raise SettingsError(f"{self.device} computes no layers with {what}: use the CPU")
        if plan.rotary is not None:
            self._angles.add(plan.rotary)
        if plan.attends and (groups := plan.heads // plan.kv_heads) not in self._masks:
            self._masks[groups] = Masks(groups=groups, device=self.device, dtype=torch.float32)

    def prepare(self, plan: LayerPlan, blob: Blob) -> Ready:
        self.take(plan)
        return _TorchReady(plan, blob, self)

    def expect(self, dtype: torch.dtype) -> None:
        """Choose the attention over 16-bit keys and values before a capture. Raises `SettingsError`
        for codes."""
        if dtype == CODES:
            raise SettingsError(
                f"{self.device} has no 8-bit keys and values: use target.cache half"
            )
        if self.products is not None and self._masks and dtype == HALF:
            self.products.owner(CONTEST)

    def lay_out(self, lying: Lying, memory: Tensor) -> Matrix | Product:
        """Return a matrix of a blob in `memory` on the device as its product needs it.
        `SettingsError` for blocks that cannot be multiplied there."""
        products = self.products
        if lying.parts:
            return blocks_on(products, self.device, lying, memory)
        return unpack(lying, memory) if products is None else products.lay_out(lying, memory)

    def new_cache(self, plans: Sequence[LayerPlan], capacity: int, dtype: torch.dtype) -> KVCache:
        """Return a cache of zeros: reading in fixed shapes multiplies unwritten slots by 0."""
        heads = [
            Heads(plan.kv_heads, plan.head_dim, 0 if plan.latent is None else plan.latent.rank)
            for plan in plans
            if plan.caches
        ]
        if len(set(heads)) == 1 and not heads[0].latent:
            one, more = heads[0], {"layers": len(heads), "capacity": capacity}
            size = {"kv_heads": one.kv_heads, "head_dim": one.head_dim, **more}
            cache: KVCache = ArenaCache(self.arenas, **size, dtype=dtype, device=self.device)
        else:
            cache = MixedKVCache(heads, capacity=capacity, dtype=dtype, device=self.device)
        shapes = [plan.scan.shape for plan in plans if plan.scan is not None]
        if shapes:
            cache.states = RecurrentStates(shapes, self.device)
        return cache

    def see(
        self, positions: Tensor, segments: Sequence[Segment], inputs: Tensor | None = None
    ) -> Rows:
        blocks = {
            groups: attention.arrange(segments, masks) for groups, masks in self._masks.items()
        }
        firsts = accumulate((segment.count for segment in segments), initial=0)
        stateful = [
            StatefulRows(segment, first, states_of(segment.cache.states, segment))
            for segment, first in zip(segments, firsts, strict=False)
            if isinstance(segment.cache, KVCache) and segment.cache.states is not None
        ]
        there = None if inputs is None else inputs.to(self.device)
        return Rows(self.turn(positions.to(self.device)), blocks, stateful, self.by, there)

    def turn(self, positions: Tensor) -> Turn | None:
        """The angles of rows, positions int64 [T] on the device."""
        return self._angles.at(positions)

    def hand_over(self, cache: Cache, to: BlockedCache, plan: LayerPlan, rows: int) -> None:
        assert isinstance(cache, KVCache)
        _hand_states(cache.states, to.states, plan, rows)
        if plan.caches:
            keys, values = to.of_layer(plan.index)
            own = cache.of_layer(0)[:, :, :rows].cpu()
            values[:, :rows] = own[-1]
            if keys.shape[2]:
                _lay_keys(own[0], keys)


def _lay_keys(own: Tensor, keys: Tensor) -> None:
    """Keys [kv_heads, rows, head_dim] in the layout of the kernels."""
    kv_heads, rows, head_dim = own.shape
    whole = rows // LANES
    blocks = own[:, : whole * LANES].view(kv_heads, whole, LANES, head_dim)
    keys[:, :whole] = blocks.transpose(2, 3)
    if rows % LANES:
        keys[:, whole, :, : rows % LANES] = own[:, whole * LANES :].transpose(1, 2)


def engine_of(transfer: Transfer) -> Engine:
    """Return the engine on the last device of a path."""
    device = transfer.device
    return KernelEngine() if device.type == "cpu" else TorchEngine(device, products_on(device))
