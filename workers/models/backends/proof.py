"""Proves a layer of the kernels against transformers' own, at every position of the oracle. Both
multiply with the same packed matrices, so that only rounding differs and no layer is in memory
twice; some rows of each matrix are compared with the checkpoint's. Queries, keys and attention are
compared one by one, since small differences in scores would be lost in a layer's update."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.layer import DecoderLayer, LayerPass, normalise
from dovetail.workers.kernels.layer_plan import LANES, CacheRows, LayerPlan, new_cache
from dovetail.workers.models import transformers
from dovetail.workers.models.attention import Noted
from dovetail.workers.models.backends.device.experts import gate_mixed
from dovetail.workers.models.backends.embedding import OwnInputs
from dovetail.workers.models.backends.experts import ExpertProof, ScaledExpertProof
from dovetail.workers.models.backends.layer_parts import LayerParts
from dovetail.workers.models.backends.packing import compare_product, product_of, sampled_rows
from dovetail.workers.models.checkpoints.configured import quiet
from dovetail.workers.models.checkpoints.gguf.rows import weight_of
from dovetail.workers.models.families.description import Attention, Latent
from dovetail.workers.models.parity.following import (
    Call,
    UnprovableError,
    UnsupportedError,
    first_of,
    foreign,
    line_of,
    stand_in,
)
from dovetail.workers.models.recurrent import RecurrentStates

if TYPE_CHECKING:
    from dovetail.workers.models.parity.oracle import Oracle


class Product:
    """A layer's matrix in its proof, with the last input and output for linears that share it."""

    def __init__(
        self, name: str, linears: Sequence[nn.Linear], orders: Sequence[Tensor | None] | None = None
    ) -> None:
        """`linears`: concatenated by outputs; some rows are kept. `orders`: int64 [out] of each,
        places of outputs in the checkpoint; None: in place."""
        self.name = name
        self.given, self.result = torch.empty(0), torch.empty(0)
        self._matrix: PackedMatrix | None = None
        self._first: list[int] = []
        self._samples: list[tuple[Tensor, Tensor, Tensor | float]] = []
        first = 0
        for part in linears:
            picked = sampled_rows(part.out_features)
            bias = 0.0 if part.bias is None else part.bias.detach()[picked].float()
            self._first.append(first)
            self._samples.append((picked, weight_of(part, picked), bias))
            first += part.out_features
        self._counts = [part.out_features for part in linears]
        self._orders = orders or [None] * len(linears)

    def stand_ins(self) -> list[nn.Module]:
        """Return a stand-in for each linear; together they own the product, which is freed with the
        last."""
        return [
            _Rows(self, first, count, None if order is None else order.argsort())
            for first, count, order in zip(self._first, self._counts, self._orders, strict=True)
        ]

    def use(self, matrix: PackedMatrix) -> None:
        """Compute with this matrix from now on."""
        self._matrix = matrix

    def __call__(self, x: Tensor) -> Tensor:
        """x [m, in] -> [m, out]; linears of the same rows share one product."""
        assert self._matrix is not None
        if self.given.shape != x.shape or not torch.equal(self.given, x):
            self.given, self.result = x.clone(), self._matrix.linear(x.contiguous())
            self._check(x)
        return self.result

    def _check(self, x: Tensor) -> None:
        """`UnsupportedError` if packed weights differ from the checkpoint's; single rows may cancel
        out."""
        assert self._matrix is not None
        if self._matrix.kind not in list(Kind) or len(x) == 1:
            return
        for first, (picked, weight, bias) in zip(self._first, self._samples, strict=True):
            expected = product_of(self._matrix, first + picked, x, weight) + bias
            compare_product(self.name, self._matrix, self.result[:, first + picked], expected)


class _Rows(nn.Module):
    def __init__(
        self, product: Product, first: int, count: int, order: Tensor | None = None
    ) -> None:
        super().__init__()
        self._order = order
        self._product, self._first, self._count = product, first, count

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        y = self._product(x.reshape(-1, x.shape[-1]))[:, self._first : self._first + self._count]
        y = y.clone() if self._order is None else y[:, self._order]  # a layer may add to it
        return y.reshape(*x.shape[:-1], self._count)


class Joined(nn.Module):
    """Linears in place of a joined one; `order`, int64 [out]: places of their outputs there."""

    def __init__(self, parts: Sequence[nn.Module], order: Tensor) -> None:
        super().__init__()
        self._parts, self._back = parts, order.argsort()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return torch.cat([part(x) for part in self._parts], dim=-1)[..., self._back]


def run_recurrently(oracle: "Oracle", layer: nn.Module, index: int, states: Tensor) -> Tensor:
    """Return transformers' layer of states [count, hidden], row by row."""
    cache, rows = transformers.DynamicCache(config=oracle.config), []
    call = oracle.arranged(index, cache)
    with oracle.eagerly(layer), quiet():
        for row, state in enumerate(states):
            args, kwargs = _of_row(call, row, len(states)).of(state.view(1, 1, -1))
            rows.append(first_of(layer(*args, **kwargs)))
    return torch.cat(rows)


def run_together(oracle: "Oracle", layer: nn.Module, index: int, states: Tensor) -> Tensor:
    """Return transformers' layer of states [count, hidden], all at once."""
    with oracle.eagerly(layer), quiet():
        args, kwargs = oracle.arranged(index, None).of(states.unsqueeze(0))
        return first_of(layer(*args, **kwargs))


def _of_row(call: Call, row: int, count: int) -> Call:
    """Return the call of a layer for one of its `count` rows, after those before it."""

    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cut, value))
        if not isinstance(value, Tensor):
            return value
        if value.ndim == 4 and tuple(value.shape[-2:]) == (count, count):
            return value[:, :, row : row + 1, : row + 1]
        if value.ndim >= 2 and value.shape[1] == count:
            return value[:, row : row + 1]
        return value

    return Call(
        tuple(map(cut, call.args)), {name: cut(value) for name, value in call.kwargs.items()}
    )


log = logging.getLogger(__name__)

ATTENTION_TOLERANCE = 1e-4
LAYER_TOLERANCE = 2e-4  # relative to the layer's output: rounding gives 1e-6, a missing part 1e-2
ROUNDED_TOLERANCE = 2e-2  # if matrices round inputs to int8, which turns 1e-7 into up to 1e-3
EXACT = (Kind.FP32, Kind.FP16, Kind.BF16, Kind.EXACT_BLOCKS)
CACHE_TOLERANCE, ROUNDED_CACHE_TOLERANCE = 0.1, 0.5
"""Largest share by which 16- or 8-bit keys and values may change the logits of the median row:
1e-3 and 1e-2 are usual, 4e-2 if inputs are rounded to 8 bits; overflowing keys give 100%."""


def check_attention(said: Attention | Latent, noted: Noted, index: int) -> None:
    """`UnsupportedError` if the described attention differs from transformers'."""
    if isinstance(said, Latent):
        size, value_dim, own = said.plain + said.rotated, said.value_dim, (0, 0.0, False)
    else:
        size = value_dim = said.head_dim
        own = said.window, said.softcap, said.sinks is not None
    kv_heads = said.heads if isinstance(said, Latent) else said.kv_heads
    pairs = {
        "heads": (said.heads, noted.heads),
        "key heads": (kv_heads, noted.kv_heads),
        "head size": (size, noted.head_dim),
        "value size": (value_dim, noted.value_dim),
        "window": (own[0], noted.window or 0),
        "scale": (said.scale, noted.scaling),
        "softcap": (own[1], noted.softcap or 0.0),
        "sinks": (own[2], noted.sinks),
    }
    for what, (ours, theirs) in pairs.items():
        if not math.isclose(ours, theirs, rel_tol=1e-6):
            raise UnsupportedError(f"layer {index} is described with {what} {ours}, not {theirs}")


def prove_cache(exact: Tensor, found: Tensor, kind: IntEnum, bits: int) -> None:
    """Raise `CheckpointError` if logits [T, V] with a 16- or 8-bit cache differ from `exact` ones
    by more than rounding."""
    moved = ((found - exact).norm(dim=-1) / exact.norm(dim=-1)).nan_to_num(math.inf)
    middle = float(moved.median())
    log.info("keys and values in %d bits change the logits by a relative %.1e", bits, middle)
    if middle > (CACHE_TOLERANCE if kind in EXACT else ROUNDED_CACHE_TOLERANCE):
        text = f"keys and values in {bits} bits move the logits by a relative {middle:.1e}"
        raise CheckpointError(f"{text}: use target.cache fp32")


class _Enough(Exception):
    """Attention has recorded its arguments, so the run can end."""


class LayerProof:
    """One layer of a model that is being packed and proved."""

    def __init__(
        self,
        oracle: "Oracle",
        layer: nn.Module,
        index: int,
        parts: LayerParts,
        heard: dict[int, Tensor],
        inputs: OwnInputs | None,
    ) -> None:
        """Call this before weights are dropped. `heard`: keys of the layers so far; `inputs`: the
        layers' own."""
        self._order, linears = parts.order, parts.linears
        mixer, state = parts.spec.attention, parts.spec.state
        self._chunk = mixer.chunk if isinstance(mixer, Attention) else 0
        self._reads = mixer.reads if isinstance(mixer, Attention) else None
        self._query_factor = mixer.query_factor if isinstance(mixer, Attention) else 1.0
        self._heard, self._inputs = heard, inputs
        self._cached: tuple[Tensor, Tensor] | None = None
        """The keys and values of another layer that it reads, [kv_heads, rows, head_dim]."""
        self._oracle, self._index, self._what = (
            oracle,
            index,
            f"layer {index} ({type(layer).__name__})",
        )
        self._products = {
            name: Product(name, linears[name], parts.rows.get(name)) for name in linears
        }
        others: dict[nn.Module, nn.Module] = {
            part: own
            for name in linears
            for part, own in zip(linears[name], self._products[name].stand_ins(), strict=True)
        }
        if (gates := parts.gates) is not None:
            others[gates.module] = Joined([others[gates.queries], others[gates.gates]], gates.order)
        self._experts = None
        if parts.experts is not None:
            proof = ScaledExpertProof if parts.experts.said.router.scales_input else ExpertProof
            self._experts = others[parts.experts.module] = proof(parts.experts, self._what)
        self._layer = stand_in(layer, others)
        router = None if parts.experts is None else parts.experts.said.router.part
        if self._experts is not None and router is not None:
            self._experts.listen(self._layer.get_submodule(router))
        if state is not None and state.limited is not None:
            mixer_part: Any = self._layer.get_submodule(state.limited)
            mixer_part.time_step_limit = (0.0, math.inf)
        self._states = oracle.states(index)
        self._rotated: list[Tensor] = []

    def use(self, matrices: Mapping[str, PackedMatrix]) -> None:
        """Compute with these matrices from now on."""
        for name, matrix in matrices.items():
            self._products[name].use(matrix)

    def note(self, matrices: Mapping[str, PackedMatrix]) -> Noted:
        """Return the call of a layer's attention; `UnprovableError` if no back end knows it."""
        self.use(matrices)
        notes: list[Noted] = []

        def note(noted: Noted, query: Tensor, key: Tensor, value: Tensor) -> None:
            notes.append(replace(noted, scaling=noted.scaling * self._query_factor))
            query = query / self._query_factor
            self._heard[self._index] = key
            own = (query, key) if self._reads is None else (query,)
            heads = [part[0].transpose(0, 1) for part in own]
            if self._reads is not None:
                self._cached = key[0].float(), value[0].float()
            if self._order is not None:
                heads = [part[..., self._order] for part in heads]
            self._rotated = [part.flatten(1) for part in heads]
            raise _Enough

        try:
            self._oracle.run_ours(self._layer, self._index, self._states, note, handed=True)
        except _Enough:
            pass
        except (UnsupportedError, UnprovableError) as error:
            raise type(error)(f"{self._what}: {error}") from error
        except Exception as error:  # an unknown layer may fail in any way
            raise UnprovableError(f"{self._what} cannot be computed ({line_of(error)})") from error
        if not notes:
            raise UnsupportedError(f"{self._what} computes no attention")
        if self._reads is not None and self._heard[self._index] is not self._heard[self._reads]:
            raise UnsupportedError(f"{self._what} reads keys other than layer {self._reads}'s")
        self._oracle.check_window(self._index, notes[0].window, self._chunk)
        return notes[0]

    def check(self, plan: LayerPlan) -> None:
        """`UnsupportedError` if the kernels' layer of a plan differs from transformers'."""
        oracle, states = self._oracle, self._states
        experts = () if plan.experts is None else (plan.experts.gate_up[0], plan.experts.down[0])
        exact = all(matrix.kind in EXACT for matrix in (*plan.matrices, *experts))
        tolerance = LAYER_TOLERANCE if exact else ROUNDED_TOLERANCE
        if self._experts is not None and plan.experts is not None:
            self._experts.use(plan.experts)
        given = (self._layer, self._index, states)
        with foreign(UnsupportedError, f"{self._what} cannot run alone"):
            if plan.scan is None:
                expected = alone = oracle.run_eager(*given, counts=True)
            else:
                alone, expected = run_recurrently(oracle, *given), run_together(oracle, *given)
        try:
            layer = DecoderLayer(replace(plan, index=0))
        except ValueError as error:
            raise UnsupportedError(f"{self._what}: {error}") from error
        found = torch.cat([states[: oracle.dense], states])
        segments = self._rows(layer.plan)
        rows = LayerPass(oracle.pass_positions, segments)
        if self._inputs is not None:
            rows.use_inputs(self._inputs(oracle.pass_tokens))
        if plan.latent is not None:
            self._compare_latents(layer, rows, segments[-1].values, exact=exact)
        elif plan.attends:
            # what several streams predict differs by rounding from pass to pass
            most = ATTENTION_TOLERANCE if exact or plan.streams is None else ROUNDED_TOLERANCE
            self._compare_attention(layer, rows, most)
        layer.run(rows, found)
        settled = None
        if self._experts is not None and plan.experts is not None:
            settled = self._experts.settled(plan.experts.router, exact=exact)
        shares: dict[str, Any] = {"states": states, "compared": settled}
        by_row = f"{self._what} in transformers, row by row, differs"
        oracle.compare(UnprovableError, by_row, expected, alone, tolerance, **shares)
        own = f"{self._what} differs"
        oracle.compare(UnsupportedError, own, expected, found, tolerance, **shares)

    def _compare_attention(self, layer: DecoderLayer, rows: LayerPass, most: float) -> None:
        oracle, plan = self._oracle, layer.plan
        qkv = self._given()
        layer.place(rows, qkv)
        width, stop = plan.heads * plan.head_dim, (plan.heads + plan.kv_heads) * plan.head_dim
        for what, found, wanted in zip(
            ("queries", "keys"), (qkv[:, :width], qkv[:, width:stop]), self._rotated, strict=False
        ):
            self._compare(f"{what} of", wanted[oracle.dense :], found, most)
        mixed, gates = layer.attend(rows, qkv), self._products.get("mixer_gate")
        if gates is not None:
            given = torch.cat([gates.result[: oracle.dense], gates.result])
            mixed = gate_mixed(plan, mixed, given)
        if plan.mixer_norm is not None:
            mixed = normalise(plan.norm_kind, plan.mixer_norm, mixed, plan.epsilon)
        self._compare("attention of", self._products["output"].given, mixed, most)

    def _compare_latents(
        self, layer: DecoderLayer, rows: LayerPass, cached: Tensor, *, exact: bool
    ) -> None:
        """Compare scores and attention in our own pass; `cached`: latents of its last session."""
        oracle, heads = self._oracle, layer.plan.heads
        queries, mixed = layer.attend_latents(rows, self._given())
        query, key = (part[oracle.dense :].view(oracle.count, heads, -1) for part in self._rotated)
        expected = torch.einsum("thd,shd->ths", query, key)
        found = torch.einsum("thd,sd->ths", queries[oracle.dense :], cached[0, 0, : oracle.count])
        tolerance = ATTENTION_TOLERANCE if exact else ROUNDED_TOLERANCE
        self._compare("scores of", expected.flatten(1), found.flatten(1), tolerance)
        self._compare("attention of", self._products["output"].given, mixed, tolerance)

    def _given(self) -> Tensor:
        result = self._products["qkv"].result
        return torch.cat([result[: self._oracle.dense], result])

    def _compare(self, what: str, expected: Tensor, found: Tensor, tolerance: float) -> None:
        if expected.shape[-1] != found.shape[-1]:
            widths = f"{found.shape[-1]} numbers wide, not {expected.shape[-1]}"
            raise UnsupportedError(f"{what} {self._what} are {widths}")
        said = f"{what} {self._what} differ"
        self._oracle.compare(UnsupportedError, said, expected, found, tolerance)

    def _rows(self, plan: LayerPlan) -> list[CacheRows]:
        segments, first = [], 0
        heads, size = (plan.kv_heads, plan.head_dim) if plan.attends else (1, 1)
        for segment in self._oracle.segments(self._index, lambda _count: None):
            keys, values = new_cache(
                layers=1,
                kv_heads=heads,
                head_dim=size,
                capacity=segment.count,
                latent=plan.latent is not None,
            )
            if self._cached is not None:
                rows = slice(first, first + segment.count)
                _fill(keys, values, *(part[:, rows] for part in self._cached))
            first += segment.count
            states = None
            if plan.scan is not None:
                own = RecurrentStates([plan.scan.shape])
                states = own.rows(0, segment.start, segment.count, chain=segment.paths is None)
            count, paths = segment.count, segment.paths
            segments.append(CacheRows(keys, values, segment.start, count, paths, states))
        return segments


def _fill(keys: Tensor, values: Tensor, of_keys: Tensor, of_values: Tensor) -> None:
    """Write keys and values [kv_heads, rows, head_dim] to the first slots of a layer's cache."""
    slots = torch.arange(of_keys.shape[1])
    keys[0][:, slots // LANES, :, slots % LANES] = of_keys.transpose(0, 1)
    values[0][:, slots] = of_values
