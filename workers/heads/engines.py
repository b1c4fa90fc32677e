"""The engines of a draft head: those of a target's layers (the C++ kernels on a CPU that has them,
torch elsewhere), with a head's matrices and rotary positions.

A head's layer is a `LayerSpec`, as a target's; its attention may read another input than the
states. T rows; positions are rotary positions, slots those of a session's cache."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from dovetail.workers import kernels
from dovetail.workers.heads.matrices import device_product, pack_matrix
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.layer import (
    DecoderLayer,
    LayerPass,
    activate,
    normalise,
    rotary_table,
)
from dovetail.workers.kernels.layer_plan import Activation, LayerPlan, Norm, NormKind, Rotary
from dovetail.workers.models.attention import Noted
from dovetail.workers.models.backends.device.choice import choice_on
from dovetail.workers.models.backends.device.fixed import SLOTS, Arenas
from dovetail.workers.models.backends.device.layer import DeviceLayer
from dovetail.workers.models.backends.device.parts import DeviceNorm, Turn
from dovetail.workers.models.backends.device.products import Product
from dovetail.workers.models.backends.device.rows import FixedRows, Ours, PlacedRows
from dovetail.workers.models.backends.layer_parts import LayerParts, RotaryTables, plan_of
from dovetail.workers.models.backends.stages.engines import KernelEngine, TorchEngine
from dovetail.workers.models.cache import HALF
from dovetail.workers.models.families.description import Attention, Growth, Rope
from dovetail.workers.models.segment import Cache, Segment

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PRECISE = {"int4": "int8"}  # types of weights -> those of matrices that 4 bits would spoil
LEAST_ANGLES = 1024  # positions whose angles are computed at first; the table grows on demand
Run = Callable[[Any, Tensor, Tensor | None], None]
"""A layer, in place: (the rows of a pass, states [T, H], input of attention in place of the
states)."""


@dataclass(frozen=True)
class Rotation:
    """The rotary positions of a head."""

    frequencies: Tensor  # float32 [rotary_dim / 2]
    scaling: float  # the factor of cosines and sines


@dataclass(frozen=True)
class HeadLayer:
    """A decoder layer as its two halves."""

    attend: Run
    behind: Callable[[Tensor], None] | None
    """The MLP over states [R, H], in place; None: there is none."""
    place: Callable[[Any, Tensor], None] | None = None
    """Caches the keys and values of rows, given the input of attention; None: it reads the
    states."""

    def __call__(
        self, states: Tensor, seen: Any, rows: Tensor | None = None, given: Tensor | None = None
    ) -> Tensor:
        """Return the states [R, H] after the layer for the selected `rows` of states [T, H] (None:
        all), which are overwritten. `given`: the input of attention in place of the states."""
        self.attend(seen, states, given)
        states = states if rows is None else states[rows]
        if self.behind is not None and len(states):
            self.behind(states)
        return states


def module_of(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a layer as a module that `LayerParts` can read, from its tensors by name."""
    layer = nn.Module()
    for name in {name.rpartition(".")[0] for name in tensors if name.endswith(".weight")}:
        weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
        *path, own = name.split(".")
        parent = layer
        for step in path:
            if not hasattr(parent, step):
                parent.add_module(step, nn.Module())
            parent = getattr(parent, step)
        part = nn.Module()
        if weight.ndim == 2:
            part = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        part.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        if bias is not None:
            part.register_parameter("bias", nn.Parameter(bias, requires_grad=False))
        parent.add_module(own, part)
    return layer


def _joined(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return the stacked weight and bias of linears, either all or none of which have a bias."""
    weights, biases = ([getattr(one, name) for one in linears] for name in ("weight", "bias"))
    if len(linears) == 1:
        return weights[0], biases[0]
    return torch.cat(weights), None if biases[0] is None else torch.cat(biases)


class _Turned(RotaryTables):
    """The single rotary table of a head, for all of its layers."""

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary

    def of(self, rope: Rope | None, growth: Growth | None = None) -> Rotary | None:
        return self._rotary


def _plan(
    parts: LayerParts, index: int, matrices: Mapping[str, PackedMatrix], rotary: Rotary
) -> LayerPlan:
    at = parts.spec.attention
    assert isinstance(at, Attention)
    window, softcap = at.window or None, at.softcap or None
    noted = Noted(at.heads, at.kv_heads, at.head_dim, at.scale, window, softcap, at.head_dim)
    return plan_of(parts, index, noted, matrices, _Turned(rotary), Kind.FP32)


def halves(
    plan: LayerPlan, run_of: Callable[[LayerPlan], Run], some: Callable[[int], Any]
) -> HeadLayer:
    """Return the halves of a layer; parallel ones stay together. `some`: makes the rows of the
    MLP's, which needs no cache."""
    if plan.parallel or (plan.gate_up is None and plan.experts is None):
        return HeadLayer(run_of(plan), None)
    if plan.qkv is None and plan.latent is None:
        return HeadLayer(lambda *_: None, _behind(run_of(plan), some))
    attend = replace(plan, gate_up=None, down=None, mlp_norm=None, experts=None)
    rest = replace(plan, qkv=None, output=None, attention_norm=None, given=0)
    behind = run_of(replace(rest, latent=None, mixer_gate=None))
    return HeadLayer(run_of(attend), _behind(behind, some))


def _behind(run: Run, some: Callable[[int], Any]) -> Callable[[Tensor], None]:
    return lambda states: run(some(len(states)), states, None)


class HeadKernels(KernelEngine):
    """The C++ kernels on the CPU. With `auto` each matrix keeps the type that it is stored in."""

    cached: torch.dtype = torch.float32  # the type of keys and values
    table: torch.dtype | None = None  # the type of the embedding; None: as stored
    norms = NormKind.RMS
    ours: Ours | None = None  # functions for levels with rows of several sessions
    name = "the C++ kernels"

    def __init__(self, rotation: Rotation, *, weights: str) -> None:
        super().__init__()
        kernels.set_threads(torch.get_num_threads())
        self._rotation, self._weights = rotation, weights
        self._layers: list[DecoderLayer] = []
        self._plans: list[LayerPlan] = []
        self._rotary = self._angles(LEAST_ANGLES)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """x W^T + b for weight [out, in], stored in this head's type of weights."""
        return pack_matrix(weight, bias, self._weights).linear

    def precise(self, weight: Tensor) -> Product:
        """Return the product with a matrix that 4 bits would spoil."""
        return pack_matrix(weight, None, PRECISE.get(self._weights, self._weights)).linear

    def norm(self, weight: Tensor, epsilon: float) -> Product:
        """Return the norm of rows."""
        norm = Norm(weight.float().contiguous())
        return lambda x: normalise(self.norms, norm, x, epsilon)

    def gated(self, x: Tensor) -> Tensor:
        """silu(first half) * second half of rows [T, 2 width]."""
        return activate(Activation.SILU_GATED, x)

    def layer(self, parts: LayerParts, index: int) -> HeadLayer:
        """Return a decoder layer, with the keys and values of layer `index` of a cache."""
        matrices = {
            name: pack_matrix(*_joined(linears), self._weights)
            for name, linears in parts.linears.items()
        }
        plan = _plan(parts, index, matrices, self._rotary)
        self._plans.append(plan)
        first = len(self._layers)
        layer = halves(
            plan, self._run_of, lambda count: LayerPass(torch.zeros(count, dtype=torch.int64), [])
        )
        return replace(layer, place=partial(_place, self._layers[first])) if plan.given else layer

    def _run_of(self, plan: LayerPlan) -> Run:
        self._layers.append(DecoderLayer(plan))
        return self._layers[-1].run

    def open_cache(self, capacity: int) -> Cache:
        return self.new_cache(self._plans, capacity, self.cached)

    def see(
        self, positions: Tensor, segments: Sequence[Segment], inputs: Tensor | None = None
    ) -> LayerPass:
        if (needed := int(positions.max()) + 1) > self._rotary.cosines.shape[0]:
            self._rotary = self._angles(2 * needed)
            for layer in self._layers:
                layer.use_rotary(self._rotary)
        return super().see(positions, segments, inputs)

    def _angles(self, count: int) -> Rotary:
        return rotary_table(self._rotation.frequencies, count, scaling=self._rotation.scaling)


def _place(layer: DecoderLayer, rows: LayerPass, given: Tensor) -> None:
    assert layer.plan.qkv is not None
    layer.place(rows, layer.plan.qkv.linear(given))


@dataclass(frozen=True)
class _Shape:
    """The outputs and inputs of a matrix, for the plan of a layer on a device."""

    n: int
    k: int


class HeadTorch(TorchEngine):
    """torch on any device, with our functions on a GPU. On a CPU weights are fp32, rounded to 16
    bits first if that is their type."""

    norms = NormKind.RMS

    def __init__(
        self,
        rotation: Rotation,
        *,
        weights: str,
        device: torch.device,
        cached: torch.dtype,
        table: torch.dtype | None = None,
        exact: bool = False,
    ) -> None:
        """`weights`: a type, not auto on a GPU. `cached`: the type of keys and values. `table`:
        that of the embedding; None: as stored. `exact`: no product narrows states."""
        super().__init__(device, choice_on(device))
        self.cached, self.table, self.name = cached, table, f"torch on {device}"
        self.arenas = Arenas(1 if device.type == "cpu" else SLOTS)
        self._weights, self._exact, self._scaling = weights, exact, rotation.scaling
        self._frequencies = rotation.frequencies.to(device)
        self._rotary = Rotary(*torch.empty(2, 0, len(rotation.frequencies)))
        self._plans: list[LayerPlan] = []

    @property
    def ours(self) -> Ours | None:
        self.expect(self.cached)
        return self.ours_for(self._plans) if self.cached == HALF else None

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        if self.device.type != "cpu" or self._weights in ("int8", "int4"):
            return device_product(weight, bias, self._weights, self.device, exact=self._exact)
        offset = None if bias is None else bias.float()
        matrix = weight.to(TYPES.get(self._weights, weight.dtype)).float().contiguous()
        return lambda x: linear(x, matrix, offset)

    def precise(self, weight: Tensor) -> Product:
        kind = PRECISE.get(self._weights, self._weights)
        if self.device.type == "cpu" and kind != "int8":
            return self.linear(weight)
        return device_product(weight, None, kind, self.device, exact=self._exact)

    def norm(self, weight: Tensor, epsilon: float) -> Product:
        return DeviceNorm(self.norms, Norm(weight.float()), epsilon, self.device, self.parts)

    def gated(self, x: Tensor) -> Tensor:
        if self.parts is not None:
            return self.parts.gate(x)
        gate, up = x.chunk(2, dim=-1)
        return silu(gate) * up

    def layer(self, parts: LayerParts, index: int) -> HeadLayer:
        joined = {name: _joined(linears) for name, linears in parts.linears.items()}
        shapes = {name: _Shape(*weight.shape) for name, (weight, _) in joined.items()}
        plan = _plan(parts, index, cast(Mapping[str, PackedMatrix], shapes), self._rotary)
        self.take(plan)
        self._plans.append(plan)
        products = {name: self.linear(*both) for name, both in joined.items()}
        layer = halves(plan, partial(self._run_of, products), lambda _count: None)

        def place(rows: Any, given: Tensor) -> None:
            layer.attend(rows, torch.zeros(len(given), plan.hidden, device=self.device), given)

        return replace(layer, place=place) if plan.given else layer

    def _run_of(self, products: Mapping[str, Product], plan: LayerPlan) -> Run:
        layer = DeviceLayer(plan, self.device, self.parts)
        return lambda rows, states, given: layer.run(
            rows, states, lambda name, x: products[name](x), given
        )

    def open_cache(self, capacity: int) -> Cache:
        return self.new_cache(self._plans, capacity, self.cached)

    def turn(self, positions: Tensor) -> Turn:
        angles = (positions.unsqueeze(1) * self._frequencies).unsqueeze(1)
        turned = angles.cos() * self._scaling, angles.sin() * self._scaling
        return Turn({id(self._rotary): turned})

    def fix(
        self, positions: Tensor, memory: Tensor | PlacedRows, slots: Tensor, mask: Tensor
    ) -> FixedRows:
        """Return rows whose shapes depend only on their number and that of slots; `mask` [T, S]."""
        masks = {(0, groups): mask.repeat(groups, 1) for groups in self._masks}
        return FixedRows(self.turn(positions), memory, slots, masks, by=self.by)


HeadEngine = HeadKernels | HeadTorch
"""The interface of an engine. States are fp32."""
