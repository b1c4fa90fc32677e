"""The kernels back end: each decoder layer becomes one call of the C++ kernels, and so do the final
norm and the head. Layers follow their family's description; every layer is compared with
transformers' own at positions across the context. A model with a layer that differs, or without a
description, is computed by the library. A token's bytes do not depend on the other rows of a
pass."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dovetail.protocol.experts import Routing
from dovetail.workers import kernels
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.layer import DecoderLayer, LayerPass, tanh
from dovetail.workers.kernels.layer_plan import ExpertsPlan, LayerPlan, Norm, NormKind
from dovetail.workers.models.attention import NOTHING, Noted
from dovetail.workers.models.backends.blocked_cache import CacheLayout, cache_for, cache_rows
from dovetail.workers.models.backends.embedding import (
    StreamsAround,
    inputs_of,
    share_table,
    widen_embeddings,
)
from dovetail.workers.models.backends.experts import ExpertParts
from dovetail.workers.models.backends.layer_parts import (
    AROUND,
    ROTARY_NAMES,
    LayerParts,
    NoAngles,
    RotaryTables,
    described_norm,
    final_norm,
    plan_of,
)
from dovetail.workers.models.backends.library import transformers_pass
from dovetail.workers.models.backends.packing import (
    FusedLayers,
    KernelLinear,
    KernelNorm,
    Loop,
    pack,
    pack_and_drop,
)
from dovetail.workers.models.backends.proof import (
    EXACT,
    LAYER_TOLERANCE,
    ROUNDED_TOLERANCE,
    LayerProof,
    Product,
    check_attention,
    prove_cache,
)
from dovetail.workers.models.cache import CACHE_NAMES
from dovetail.workers.models.checkpoints.configured import base_model, decoder_layers
from dovetail.workers.models.families.description import Attention, Latent, LayerSpec
from dovetail.workers.models.families.registry import FAMILIES
from dovetail.workers.models.parity.following import UnsupportedError
from dovetail.workers.models.segment import PROMPT_ROWS, Cache, Segment
from dovetail.workers.models.states import LAST, Kept, ModelPass, keeping

VERSION = "dovetail-4"  # the version of the functions, to the last bit; part of fingerprints


class OwnTanh(TorchFunctionMode):
    """Computes tanh of capped logits by the kernels: torch's differs between instruction sets."""

    def __torch_function__(
        self, function: Any, _types: Any, given: Any = (), named: Any = None
    ) -> Any:
        if function is torch.tanh and given[0].device.type == "cpu":
            return tanh(given[0])
        return function(*given, **(named or {}))


class Kernels:
    """Takes over a model layer by layer; `UnsupportedError` for a part it cannot compute. A
    `BackEnd`."""

    backend = "kernels"
    kernels = VERSION
    prompt_rows: int = PROMPT_ROWS
    reads_apart: int = 0

    def __init__(
        self, model: Any, kind: Kind, *, context: int, cache: torch.dtype = torch.float32
    ) -> None:
        """`model`: all numbers except the layers'; `cache`: type of keys and values: fp32, fp16
        or CODES."""
        from dovetail.workers.models.parity.oracle import Oracle  # imports transformers

        kernels.set_threads(torch.get_num_threads())
        family = FAMILIES.get(model.config.model_type)
        if family is None:
            raise UnsupportedError("no family with that name is described here")
        self._family = family
        self._inputs = inputs_of(model, family, kind)
        said = family.layer(model.config, 0).streams
        self._streams = None if said is None else StreamsAround(model, said, kind)
        self._heard: dict[int, Tensor] = {}  # the keys that each layer attends to in its proof
        self._oracle = Oracle(model, decoder_layers(model)[1], context)
        if not self._oracle.isolated:
            raise UnsupportedError("transformers computes something between the layers")
        self._begin(model, kind, RotaryTables(model, context), cache)

    def _begin(self, model: Any, kind: Kind, tables: RotaryTables, cache: torch.dtype) -> None:
        self._model, self._kind, self._tables, self._cache = model, kind, tables, cache
        self._layers: list[DecoderLayer] = []
        self._layout = CacheLayout()
        self._taken = 0
        self.noted: list[Noted] = []  # the attention that each layer asks for

    @property
    def described(self) -> LayerSpec:
        """Return the description of the first layer."""
        return self._family.layer(self._model.config, 0)

    @property
    def plans(self) -> Sequence[LayerPlan]:
        """Return the layers."""
        return self._layout.plans

    def norm(self, states: Tensor) -> Tensor:
        """Return states [T, hidden] after the final norm."""
        normed: Tensor = self._norm(states)
        return normed

    def run(self, states: Tensor, positions: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Return states [T, hidden] after all layers, without embedding and norm."""
        ran: Tensor = self._fused.run(states, self._see(positions, segments), Kept(set()))
        return ran

    @property
    def angles(self) -> Mapping[str, tuple[Sequence[float], float]]:
        """Return the frequencies of each rotary table, and the factor of cosines and sines."""
        return self._tables.angles

    def take_layer(self, layer: nn.Module, index: int) -> nn.Module:
        """Pack and prove a layer, which has its numbers; return its placeholder."""
        spec = self._family.layer(self._model.config, index)
        if index == 0:
            self._said = {
                name: value
                for name, value in vars(layer).items()
                if isinstance(value, str | int | float) and not hasattr(nn.Module(), name)
            }
        parts = LayerParts(layer, spec)
        self._arrange(parts)
        proof = LayerProof(self._oracle, layer, index, parts, self._heard, self._inputs)
        matrices = {
            name: self._pack_layer(self._kind, linears) for name, linears in parts.linears.items()
        }
        experts = self._pack_experts(parts, matrices)
        noted = NOTHING
        if isinstance(spec.attention, Attention | Latent):
            noted = proof.note(matrices)
            check_attention(spec.attention, noted, index)
        else:
            proof.use(matrices)
        plan = replace(
            plan_of(parts, index, noted, matrices, self._tables, self._kind), experts=experts
        )
        proof.check(plan)
        self._take(plan)
        self.noted.append(noted)
        self._taken += 1
        return nn.Identity()

    def _pack_experts(
        self, parts: LayerParts, matrices: Mapping[str, PackedMatrix]
    ) -> ExpertsPlan | None:
        if parts.experts is None:
            return None
        around: dict[str, Any] = {name: matrices.get(name) for name in AROUND}
        return replace(self._expert_plan(parts.experts), **around)

    def _expert_plan(self, experts: ExpertParts) -> ExpertsPlan:
        """Return experts with their matrices, which their part loses."""
        return experts.pack(self._kind)

    def _arrange(self, parts: LayerParts) -> None:
        """Reorder queries and keys that are rotated in pairs of neighbours, in place."""
        attention = parts.spec.attention
        if isinstance(attention, Latent) and attention.rope and attention.rope.interleaved:
            parts.interleave_latent(attention)
        if not isinstance(attention, Attention):
            return
        turned = attention.rope is not None and attention.rope.interleaved
        if turned:
            assert attention.rope is not None
            table = self._tables.of(attention.rope)
            assert table is not None
            parts.interleave(2 * table.cosines.shape[1], attention.head_dim)

    def finish(self, model: Any) -> None:
        """Replace the norm and the head, and join the layers, once all have their numbers."""
        base = base_model(model)
        self._fused = self._together()
        for name, module in list(base.named_children()):
            if isinstance(module, nn.ModuleList) and len(module) == self._taken:
                setattr(base, name, nn.ModuleList([self._loop(self._fused)]))
        name, norm = final_norm(base)
        norms = self.described.norms
        kind, epsilon, numbers = norms.kind, norms.epsilon, described_norm(norm, norms)
        self._norm = self._final_norm(kind, numbers, epsilon)
        setattr(base, name, self._norm)
        head = model.get_output_embeddings()
        matrix = pack(self._kind, [head])
        self._prove_end(KernelNorm(kind, numbers, epsilon), head, matrix)
        self._head = self._final_linear(matrix)
        if isinstance(self._head, KernelLinear):
            share_table(model, head, matrix)
        model.set_output_embeddings(self._head)
        for name in ROTARY_NAMES if self._tables.given else ():
            if hasattr(base, name):
                setattr(base, name, NoAngles())
        widen_embeddings(model)
        if self._inputs is not None and self._streams is None:
            self._inputs.finish()
        self._straight = self._nothing_else()
        self.direct = self._straight and self._inputs is None
        """True if only embedding, layers, norm and head compute the logits."""
        if self._cache != torch.float32:
            self._prove_cache()

    def _loop(self, layers: nn.Module) -> nn.Module:
        return Loop(layers, self._said, self._oracle.tuples)

    def _prove_end(self, norm: KernelNorm, head: nn.Linear, matrix: PackedMatrix) -> None:
        """`UnsupportedError` if the final norm or the packed head differs from transformers'."""
        states, product = self._finally(norm), Product("head", [head])
        product.use(matrix)
        product(states)

    def _rows_over(self, cache: torch.dtype) -> tuple[ModelPass, Any]:
        """Return the oracle's rows, over keys and values of a type."""
        tokens, positions = self._oracle.tokens, self._oracle.positions
        segments = [Segment(self._open_cache(len(tokens), cache), 0, len(tokens))]
        return ModelPass(tokens, positions, segments), self._see(positions, segments)

    @torch.inference_mode()
    def _prove_cache(self) -> None:
        """Raise `CheckpointError` if a cache with fewer bits changes logits by more than
        rounding."""
        by_type = map(self._rows_over, (torch.float32, self._cache))
        exact, found = (self._pass(*rows) for rows in by_type)
        prove_cache(exact, found, self._layers_kind, 8 * self._cache.itemsize)

    @property
    def _layers_kind(self) -> IntEnum:
        return self._kind

    def _finally(self, norm: KernelNorm) -> Tensor:
        """The final states [T, hidden] of the oracle, which this norm must reproduce."""
        expected = self._oracle.final
        if expected is None:
            raise UnsupportedError("transformers' own forward fails after the last layer")
        found, what = norm(self._ended(self._oracle.last[0])), "the final norm differs"
        self._oracle.compare(UnsupportedError, what, expected, found, LAYER_TOLERANCE)
        return expected.contiguous()

    def _pack_layer(self, kind: Kind, linears: Sequence[nn.Linear]) -> PackedMatrix:
        """Pack linears with the same inputs as one matrix; they lose their weights."""
        return pack_and_drop(kind, linears)

    @property
    def resident(self) -> Mapping[int, DecoderLayer]:
        """Return layers whose weights another model may share: none here."""
        return {}

    def _take(self, plan: LayerPlan) -> None:
        """Add a layer; its index is also that of its keys and values in a cache."""
        self._layers.append(DecoderLayer(self._layout.take(plan)))

    def _together(self) -> Any:
        """Return all layers as one module with a `run`, like `FusedLayers`."""
        return FusedLayers(self._layers)

    def _final_norm(self, kind: NormKind, norm: Norm, epsilon: float) -> nn.Module:
        return KernelNorm(kind, norm, epsilon)

    def _final_linear(self, matrix: PackedMatrix) -> nn.Module:
        return KernelLinear(matrix)

    def _see(self, positions: Tensor, segments: Sequence[Segment]) -> Any:
        return LayerPass(positions, [cache_rows(segment) for segment in segments])

    def new_cache(self, capacity: int) -> Cache:
        return self._open_cache(capacity, self._cache)

    def _open_cache(self, capacity: int, dtype: torch.dtype) -> Cache:
        return cache_for(self._layout.plans, capacity, dtype)

    def last_of_each_type(self) -> Mapping[str, int]:
        """Return for each of `layer_types` the place in a cache of the last layer of that type that
        has keys and values of its own."""
        places = {}
        for index, kind in enumerate(self.config.layer_types):
            if self._layout.has(index):
                places[kind] = self._layout.caching(index).index
        return places

    @property
    def config(self) -> Any:
        """Return the model's configuration."""
        return self._model.config

    @property
    def cache(self) -> str:
        return CACHE_NAMES[self._cache]

    @property
    def routing(self) -> Routing | None:
        plans = [layer.plan.experts for layer in self._layers]
        routers = [experts.router for experts in plans if experts is not None]
        if not routers:
            return None
        return Routing(
            row=sum(router.chosen for router in routers),
            most=sum(router.logits.n for router in routers),
        )

    def compute(self, asked: ModelPass) -> Tensor:
        return self._pass(asked, self._see(asked.positions, asked.segments))

    def _pass(self, asked: ModelPass, seen: Any) -> Tensor:
        if self._inputs is not None:
            seen.use_inputs(self._inputs(asked.tokens))
        if self._straight:
            return self._compute_directly(asked, seen)
        with keeping(self._model, (), asked.kept), OwnTanh():
            return transformers_pass(self._model, asked, seen=seen, kept=asked.kept)

    def _compute_directly(self, asked: ModelPass, seen: Any) -> Tensor:
        """Compute embedding, layers, norm and head directly: transformers' forward takes 0.1 ms."""
        rows, kept = asked.rows, asked.kept
        states = self._ended(self._fused.run(self.embedded(asked.tokens), seen, kept))
        if self._streams is not None:  # heads read the first
            kept.states = {at: part[:, : states.shape[1]] for at, part in kept.states.items()}
            kept.keep(self._taken, states)
        if LAST in kept.wanted or rows is None:
            states = self._norm(states)
            kept.keep_last(states)
            return self._scaled(self._head(states if rows is None else states[rows]))
        return self._scaled(self._head(self._norm(states[rows])))

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return what enters the first layer, [T, hidden], of tokens int64 [T]."""
        embedded: Tensor = self._model.get_input_embeddings()(tokens)
        factor = self._factor(self._family.embeddings)
        embedded = embedded if factor == 1.0 else embedded * factor
        return embedded if self._streams is None else self._streams.begin(embedded)

    def _ended(self, states: Tensor) -> Tensor:
        """Return the states [T, hidden] that the final norm reads."""
        return states if self._streams is None else self._streams.end(states)

    def _scaled(self, logits: Tensor) -> Tensor:
        if (cap := self._factor("final_logit_softcapping", 0.0)) != 0.0:
            with OwnTanh():
                return torch.tanh(logits / cap) * cap
        if (factor := self._factor(self._family.logits)) == 1.0:
            return logits
        return logits / factor if self._family.divides else logits * factor

    @property
    def logit_scale(self) -> float:
        """Return the factor of logits."""
        factor = self._factor(self._family.logits)
        return 1.0 / factor if self._family.divides else factor

    def _factor(self, field: str, none: float = 1.0) -> float:
        found = getattr(self._model.config, field, None) if field else None
        return none if found is None else float(found)

    @torch.inference_mode()
    def _nothing_else(self) -> bool:
        """Return whether the direct way gives transformers' bytes; not with embedded positions."""
        asked, seen = self._rows_over(self._cache)
        if self._inputs is not None:
            seen.use_inputs(self._inputs(asked.tokens))
        with OwnTanh():
            own = transformers_pass(self._model, asked, seen=seen, kept=asked.kept)
        found = self._compute_directly(asked, seen)
        if self._streams is not None:  # transformers' sums of them depend on the CPU
            what = "the logits of several streams differ"
            tolerance = LAYER_TOLERANCE if self._kind in EXACT else ROUNDED_TOLERANCE
            self._oracle.compare(UnsupportedError, what, own, found, tolerance)
            return True
        return torch.equal(own, found)
