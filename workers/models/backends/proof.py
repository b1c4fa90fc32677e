"""The proof of a layer of the kernels: what they compute of it is what transformers' own layer
computes, at every position of the oracle.

Both multiply with the same packed matrices, so that what is left between them is rounding, whatever
the weights are, and so that no layer is ever there twice; of each matrix some rows are compared
with those of the checkpoint. Queries, keys and attention are compared one by one: a small
difference in the scores, which would be lost in what a layer adds, shows there. Knows no model, and
packs nothing.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.layer import DecoderLayer, LayerPass
from dovetail.workers.kernels.layer_plan import LANES, CacheRows, LayerPlan, new_cache
from dovetail.workers.kernels.layer_plan import Paths as KernelPaths
from dovetail.workers.models.attention import Noted
from dovetail.workers.models.backends.embedding import OwnInputs
from dovetail.workers.models.backends.experts import ExpertProof, ScaledExpertProof
from dovetail.workers.models.backends.layer_parts import LayerParts
from dovetail.workers.models.backends.packing import compare_product, given_to, sampled_rows
from dovetail.workers.models.checkpoints.gguf.rows import weight_of
from dovetail.workers.models.families.description import Attention
from dovetail.workers.models.parity.following import (
    UnprovableError,
    UnsupportedError,
    line_of,
    stand_in,
)
from dovetail.workers.models.recurrent.proof import run_recurrently, run_together
from dovetail.workers.models.recurrent.states import RecurrentStates

if TYPE_CHECKING:
    from dovetail.workers.models.parity.oracle import Oracle

log = logging.getLogger(__name__)

ATTENTION_TOLERANCE = 1e-4
LAYER_TOLERANCE = 2e-4
"""The tolerance of what a layer adds; rounding gives 1e-6, a forgotten part 1e-2 and more."""
ROUNDED_TOLERANCE = 2e-2
"""The tolerance where a matrix rounds its inputs to integers, so that a rounding of 1e-7 before it
may become one of 1e-3."""
EXACT = (Kind.FP32, Kind.FP16, Kind.BF16, Kind.EXACT_BLOCKS)
CACHE_TOLERANCE, ROUNDED_CACHE_TOLERANCE = 0.1, 0.5
"""The distance by which keys and values in 16 bits may move the logits of the middle row, relative
to their norm. 1e-3 is usual, and keys that are too large move them by as much as they are. Where a
matrix rounds its inputs to 8 bits, other roundings follow from it, and the distance is that of two
results of the same rounding: 4e-2 with the embedded target."""


class Product:
    """A matrix of a layer as its proof computes with it: remembers what it was given last, and
    gave."""

    def __init__(
        self,
        name: str,
        linears: Sequence[nn.Linear],
        orders: Sequence[Tensor | None] | None = None,
    ) -> None:
        """`linears`: those that the matrix is packed of, below each other; a few of their rows are
        kept. `orders`: of each, int64 [out], the places in the checkpoint of its outputs, which
        transformers' layer is given as they were; None: they are in place."""
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
        self.stand_ins = [
            _Rows(self, start, part.out_features, None if order is None else order.argsort())
            for start, part, order in zip(
                self._first, linears, orders or [None] * len(linears), strict=True
            )
        ]

    def use(self, matrix: PackedMatrix) -> None:
        """Compute with this matrix from now on."""
        self._matrix = matrix

    def __call__(self, x: Tensor) -> Tensor:
        """x [m, in] -> [m, out]; several linears of one matrix that are given the same rows share
        one product."""
        assert self._matrix is not None
        if self.given.shape != x.shape or not torch.equal(self.given, x):
            self.given, self.result = x.clone(), self._matrix.linear(x.contiguous())
            self._check(x)
        return self.result

    def _check(self, x: Tensor) -> None:
        """`UnsupportedError` where the packed weights are not the checkpoint's; of one row alone
        the numbers may nearly cancel out."""
        assert self._matrix is not None
        if self._matrix.kind not in list(Kind) or len(x) == 1:
            return
        parts = zip(self._first, self._samples, strict=True)
        for index, (first, (picked, weight, bias)) in enumerate(parts):
            expected = given_to(self._matrix, index, x) @ weight.t() + bias
            compare_product(self.name, self._matrix, self.result[:, first + picked], expected)


class _Rows(nn.Module):
    """A linear that is some rows of a packed matrix."""

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


class _Joined(nn.Module):
    """Linears with the same inputs as the one that they were taken from; `order`, int64 [out]:
    where the outputs of all, one behind the other, stand there."""

    def __init__(self, parts: Sequence[nn.Module], order: Tensor) -> None:
        super().__init__()
        self._parts, self._back = parts, order.argsort()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return torch.cat([part(x) for part in self._parts], dim=-1)[..., self._back]


def check_attention(said: Attention, noted: Noted, index: int) -> None:
    """`UnsupportedError` where a description says another attention than transformers computes."""
    pairs = {
        "heads": (said.heads, noted.heads),
        "key heads": (said.kv_heads, noted.kv_heads),
        "head size": (said.head_dim, noted.head_dim),
        "window": (said.window, noted.window or 0),
        "scale": (said.scale, noted.scaling),
        "softcap": (said.softcap, noted.softcap or 0.0),
        "sinks": (said.sinks is not None, noted.sinks),
    }
    for what, (ours, theirs) in pairs.items():
        if not math.isclose(ours, theirs, rel_tol=1e-6):
            raise UnsupportedError(
                f"layer {index} is described with {what} {ours}; transformers has {theirs}"
            )


def prove_cache(exact: Tensor, found: Tensor, kind: Kind) -> None:
    """`CheckpointError` where logits [T, V] over keys and values in 16 bits are not, but for
    rounding, the `exact` ones over fp32. `kind`: of the matrices."""
    moved = ((found - exact).norm(dim=-1) / exact.norm(dim=-1)).nan_to_num(math.inf)
    middle = float(moved.median())
    log.info("keys and values in 16 bits move the logits by %.1e of them", middle)
    if middle > (CACHE_TOLERANCE if kind in EXACT else ROUNDED_CACHE_TOLERANCE):
        raise CheckpointError(
            f"keys and values in 16 bits move the logits of this model by {middle:.1e} of them: "
            "use target.cache fp32"
        )


class _Enough(Exception):
    """Attention has been told what to compute, and that is all that was wanted."""


class LayerProof:
    """One layer of a model, while it is packed and proved."""

    def __init__(
        self,
        oracle: "Oracle",
        layer: nn.Module,
        index: int,
        parts: LayerParts,
        heard: dict[int, Tensor],
        inputs: OwnInputs | None,
    ) -> None:
        """Prepare the proof; call this before the weights of the parts are dropped. `heard`: the
        keys that the layers before it attend to, to which its own are added; `inputs`: what makes
        those that it has of its own."""
        self._order, linears = parts.order, parts.linears
        mixer, state = parts.spec.attention, parts.spec.state
        self._chunk = mixer.chunk if isinstance(mixer, Attention) else 0
        self._reads = mixer.reads if isinstance(mixer, Attention) else None
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
            for part, own in zip(linears[name], self._products[name].stand_ins, strict=True)
        }
        if (gates := parts.gates) is not None:
            others[gates.module] = _Joined(
                [others[gates.queries], others[gates.gates]], gates.order
            )
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
        """Return what the layer's attention is asked for, computed with these matrices;
        `UnprovableError` where it is more than any back end knows."""
        self.use(matrices)
        notes: list[Noted] = []

        def note(noted: Noted, query: Tensor, key: Tensor, value: Tensor) -> None:
            notes.append(noted)
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
        except Exception as error:  # a layer that nobody here has seen may stumble in any way
            raise UnprovableError(
                f"{self._what} cannot be computed here ({line_of(error)})"
            ) from error
        if not notes:
            raise UnsupportedError(f"{self._what} computes no attention")
        if self._reads is not None and self._heard[self._index] is not self._heard[self._reads]:
            raise UnsupportedError(
                f"{self._what} reads other keys and values than those of layer {self._reads}"
            )
        self._oracle.check_window(self._index, notes[0].window, self._chunk)
        if notes[0].value_dim != notes[0].head_dim:
            raise UnsupportedError(f"{self._what} has values of another width than keys")
        return notes[0]

    def check(self, plan: LayerPlan) -> None:
        """`UnsupportedError` where the kernels' layer of a plan, with the matrices that are in use,
        differs from transformers'."""
        oracle, states = self._oracle, self._states
        exact = all(matrix.kind in EXACT for matrix in plan.matrices)
        tolerance = LAYER_TOLERANCE if exact else ROUNDED_TOLERANCE
        if self._experts is not None and plan.experts is not None:
            self._experts.use(plan.experts)
        try:
            given = (self._layer, self._index, states)
            if plan.scan is None:
                expected = alone = oracle.run_eager(*given, counts=True)
            else:
                alone, expected = run_recurrently(oracle, *given), run_together(oracle, *given)
        except (UnsupportedError, UnprovableError):
            raise
        except Exception as error:
            raise UnsupportedError(
                f"{self._what} cannot be run alone ({line_of(error)})"
            ) from error
        try:
            layer = DecoderLayer(replace(plan, index=0))
        except ValueError as error:
            raise UnsupportedError(f"{self._what}: {error}") from error
        found = torch.cat([states[: oracle.dense], states])
        rows = self._rows(layer.plan)
        if self._inputs is not None:
            rows.use_inputs(self._inputs(oracle.pass_tokens))
        if plan.attends:
            self._compare_attention(layer, rows)
        layer.run(rows, found)
        settled = None
        if self._experts is not None and plan.experts is not None:
            settled = self._experts.settled(plan.experts.router, exact=exact)
        if worst := oracle.difference(expected, alone, states, tolerance, settled):
            raise UnprovableError(
                f"{self._what} computes row {worst[0]} otherwise beside others than alone, by "
                f"{worst[1]:.1e} of what it adds"
            )
        if worst := oracle.difference(expected, found, states, tolerance, settled):
            raise UnsupportedError(
                f"{self._what} differs from transformers' at position {worst[0]} by "
                f"{worst[1]:.1e} of what it adds"
            )

    def _compare_attention(self, layer: DecoderLayer, rows: LayerPass) -> None:
        """Compare queries, keys and what is attended to in the rows of our own pass."""
        oracle, plan = self._oracle, layer.plan
        qkv = torch.cat(
            [self._products["qkv"].result[: oracle.dense], self._products["qkv"].result]
        )
        layer.place(rows, qkv)
        width, stop = plan.heads * plan.head_dim, (plan.heads + plan.kv_heads) * plan.head_dim
        for what, found, wanted in zip(
            ("queries", "keys"), (qkv[:, :width], qkv[:, width:stop]), self._rotated, strict=False
        ):
            self._compare(f"{what} of", wanted[oracle.dense :], found, ATTENTION_TOLERANCE)
        mixed, gates = layer.attend(rows, qkv), self._products.get("mixer_gate")
        if gates is not None:
            mixed *= torch.cat([gates.result[: oracle.dense], gates.result]).sigmoid()
        self._compare("attention of", self._products["output"].given, mixed, ATTENTION_TOLERANCE)

    def _compare(self, what: str, expected: Tensor, found: Tensor, tolerance: float) -> None:
        if expected.shape[-1] != found.shape[-1]:
            raise UnsupportedError(
                f"{what} {self._what} are {found.shape[-1]} numbers wide, where transformers' "
                f"are {expected.shape[-1]}"
            )
        if worst := self._oracle.far(expected, found, expected.norm(dim=-1), tolerance):
            raise UnsupportedError(
                f"{what} {self._what} differ from transformers' at position {worst[0]} by "
                f"{worst[1]:.1e} of them"
            )

    def _rows(self, plan: LayerPlan) -> LayerPass:
        """The rows of our own pass in the words of the kernels."""
        segments, first = [], 0
        heads, size = (plan.kv_heads, plan.head_dim) if plan.attends else (1, 1)
        for segment in self._oracle.segments(self._index, lambda _count: None):
            keys, values = new_cache(
                layers=1, kv_heads=heads, head_dim=size, capacity=segment.count
            )
            if self._cached is not None:
                rows = slice(first, first + segment.count)
                _fill(keys, values, *(part[:, rows] for part in self._cached))
            first += segment.count
            paths = segment.paths
            seen = (
                None
                if paths is None
                else KernelPaths(
                    paths.prefix, torch.from_numpy(paths.offsets), torch.from_numpy(paths.slots)
                )
            )
            states = None
            if plan.scan is not None:
                own = RecurrentStates([plan.scan.shape])
                states = own.rows(0, segment.start, segment.count, chain=paths is None)
            segments.append(CacheRows(keys, values, segment.start, segment.count, seen, states))
        return LayerPass(self._oracle.pass_positions, segments)


def _fill(keys: Tensor, values: Tensor, of_keys: Tensor, of_values: Tensor) -> None:
    """Write keys and values [kv_heads, rows, head_dim] into the first slots of an empty cache of
    one layer."""
    slots = torch.arange(of_keys.shape[1])
    keys[0][:, slots // LANES, :, slots % LANES] = of_keys.transpose(0, 1)
    values[0][:, slots] = of_values
