"""The kernels back end: every decoder layer of a transformers model becomes one call of the C++
kernels, and so do its final norm and its head.

A layer's structure is recognised by the names of its parts - Llama's, Phi-3's, GPT-2's and what is
built like them - and what its attention is asked to compute is noted from a run. Every layer is
then compared with transformers' own, at positions from all over the context, before it is replaced;
a model with a layer that differs, or that has a part without a kernel, is refused for this back end
and computed by the library instead.

With these kernels a token's keys, values, hidden states and logits are the same bytes whatever rows
are computed beside it. Knows layers and slots.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.workers import kernels
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.layer import DecoderLayer, LayerPass, normalise, rotary_table
from dovetail.workers.kernels.layer_plan import LayerPlan, Norm, NormKind, Rotary
from dovetail.workers.models.attention import Noted
from dovetail.workers.models.backends.blocked_cache import BlockedCache, cache_rows
from dovetail.workers.models.backends.embedding import widen_embeddings
from dovetail.workers.models.backends.layer_parts import (
    DTYPES,
    LayerParts,
    exact_kind,
    pack,
    pack_and_drop,
    read_norm,
)
from dovetail.workers.models.backends.library import transformers_pass
from dovetail.workers.models.backends.proof import LAYER_TOLERANCE, LayerProof, Product
from dovetail.workers.models.checkpoints.configured import decoder_layers
from dovetail.workers.models.parity.following import UnsupportedError
from dovetail.workers.models.parity.oracle import Oracle
from dovetail.workers.models.segment import (
    PROMPT_ROWS,
    Cache,
    Segment,
)
from dovetail.workers.models.states import LAST, Kept, keeping
from dovetail.workers.models.timing import asked, timing
from dovetail.workers.progress import beat

VERSION = "dovetail-1"
"""The version of the functions that the kernels compute, down to the last bit; part of the
fingerprint."""
TABLE_ROWS = 512
"""Positions, spread over the context, at which the table of angles is compared with the model's
own."""
TABLE_TOLERANCE = 1e-5


class KernelLinear(nn.Module):
    """A linear of the kernels, such as the head."""

    def __init__(self, matrix: PackedMatrix) -> None:
        super().__init__()
        self._matrix = matrix

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        with timing("head"):
            y: Tensor = self._matrix.linear(x.reshape(-1, self._matrix.k).contiguous())
        return y.view(*x.shape[:-1], self._matrix.n)


class KernelNorm(nn.Module):
    """A norm of the kernels: the final one."""

    def __init__(self, kind: NormKind, norm: Norm, epsilon: float) -> None:
        super().__init__()
        self._kind, self._norm, self._epsilon = kind, norm, epsilon

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden], normalised."""
        return normalise(
            self._kind, self._norm, x.reshape(-1, x.shape[-1]).contiguous(), self._epsilon
        ).view(x.shape)


class NoAngles(nn.Module):
    """In the place of transformers' rotary embedding: the kernels have a table of all angles."""

    def forward(self, *unused: Any, **also_unused: Any) -> None:
        """Nothing is computed."""


class FusedLayers(nn.Module):
    """All decoder layers of a model as one: transformers' loop over layers runs once."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        super().__init__()
        self._layers = layers

    def forward(
        self, hidden: Tensor, *unused: Any, seen: LayerPass, kept: Kept, **also_unused: Any
    ) -> Tensor:
        """hidden [1, T, hidden] through all layers."""
        return self.run(hidden[0].contiguous(), seen, kept).unsqueeze(0)

    def run(self, states: Tensor, rows: LayerPass, kept: Kept) -> Tensor:
        """Run the layers on states [T, hidden], in place."""
        if (parts := asked()) is not None:
            rows.time_parts(parts.layers)
        kept.keep(0, states)
        self._layers[0].run(rows, states)
        for index, layer in enumerate(self._layers[1:], start=1):
            beat()
            kept.keep(index, states)
            layer.run_next(rows)
        beat()
        return states


class Kernels:
    """Takes over the layers of a model one by one, then the rest of it; `UnsupportedError` at the
    first part that it cannot compute. A `BackEnd`."""

    backend = "kernels"
    kernels = VERSION
    prompt_rows: int = PROMPT_ROWS
    reads_apart: int = 0

    _computes_here = True
    """True if the matrices that layers are packed into are on the CPU, and can prove them."""

    def __init__(self, model: Any, kind: Kind, *, context: int) -> None:
        """`model`: the skeleton, where all that is not a layer has its numbers."""
        kernels.set_threads(torch.get_num_threads())
        self._model, self._kind = model, kind
        self._oracle = Oracle(model, decoder_layers(model)[1], context)
        if not self._oracle.isolated:
            raise UnsupportedError(
                "transformers computes something between its layers, or not each of them in turn"
            )
        self._rotary = _rotary(model, context)
        self._layers: list[DecoderLayer] = []
        self._taken = 0

    def take_layer(self, layer: nn.Module, index: int) -> nn.Module:
        """Return what stands in the layer's place until all are there; the layer has its numbers
        and is not needed afterwards."""
        parts = LayerParts(layer)
        proof = LayerProof(self._oracle, layer, index, parts.linears)
        proving = (
            None
            if self._computes_here
            else {name: pack(exact_kind(parts), linears) for name, linears in parts.linears.items()}
        )
        matrices = {
            name: self._pack_layer(self._kind, linears) for name, linears in parts.linears.items()
        }
        noted = proof.note(proving or matrices)
        plan = self._plan(parts, index, noted, matrices)
        proof.check(plan if proving is None else self._plan(parts, index, noted, proving))
        self._take(plan)
        self._taken += 1
        return nn.Identity()

    def finish(self, model: Any) -> None:
        """Take the rest over, which has its numbers too: the norm and the head are replaced, and
        the layers stand as one."""
        base = model.base_model
        self._fused = self._together()
        for name, module in list(base.named_children()):
            if isinstance(module, nn.ModuleList) and len(module) == self._taken:
                setattr(base, name, nn.ModuleList([self._fused]))
        name, norm = _final_norm(base)
        kind, numbers, epsilon = read_norm(norm)
        states = self._finally(KernelNorm(kind, numbers, epsilon))
        self._norm = self._final_norm(kind, numbers, epsilon)
        setattr(base, name, self._norm)
        head = model.get_output_embeddings()
        product = Product("head", [head])
        matrix = pack(self._kind, [head])
        product.use(matrix)
        product(states)
        self._head = self._final_linear(matrix)
        model.set_output_embeddings(self._head)
        if self._rotary is not None:
            base.rotary_emb = NoAngles()
        widen_embeddings(model)
        self._direct = self._nothing_else()

    def _finally(self, norm: KernelNorm) -> Tensor:
        """The final states [T, hidden] of the oracle, which this norm has to give too."""
        expected = self._oracle.final
        if expected is None:
            raise UnsupportedError(
                "transformers' own forward cannot be followed behind the last layer"
            )
        found = norm(self._oracle.last[0])
        if worst := self._oracle.far(expected, found, expected.norm(dim=-1), LAYER_TOLERANCE):
            raise UnsupportedError(
                f"the final norm differs from transformers' at position {worst[0]} by "
                f"{worst[1]:.1e}"
            )
        return expected.contiguous()

    def _pack_layer(self, kind: Kind, linears: Sequence[nn.Linear]) -> PackedMatrix:
        """One matrix of a layer, from linears with the same inputs that are not needed
        afterwards."""
        return pack_and_drop(kind, linears)

    @property
    def resident(self) -> Mapping[int, DecoderLayer]:
        """Layers that another model may compute with, since their weights stay where they are:
        none, where all are on the CPU anyway."""
        return {}

    def _take(self, plan: LayerPlan) -> None:
        """Keep a layer; its index is that of its keys and values in a cache."""
        self._layers.append(DecoderLayer(plan))

    def _together(self) -> Any:
        """All layers as one module with a `run`, as `FusedLayers` has it."""
        return FusedLayers(self._layers)

    def _final_norm(self, kind: NormKind, norm: Norm, epsilon: float) -> nn.Module:
        return KernelNorm(kind, norm, epsilon)

    def _final_linear(self, matrix: PackedMatrix) -> nn.Module:
        return KernelLinear(matrix)

    def _see(self, positions: Tensor, segments: Sequence[Segment]) -> Any:
        """The rows of a pass in the words of the layers."""
        return LayerPass(positions, [cache_rows(segment) for segment in segments])

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for `capacity` rows."""
        plan = self._layers[0].plan
        return BlockedCache(
            layers=len(self._layers),
            kv_heads=plan.kv_heads,
            head_dim=plan.head_dim,
            capacity=capacity,
        )

    def compute(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Sequence[Segment],
        rows: Tensor | None,
        kept: Kept,
    ) -> Tensor:
        """Logits [R, V] of a pass."""
        return self._pass(tokens, positions, self._see(positions, segments), rows, kept)

    def _pass(
        self, tokens: Tensor, positions: Tensor, seen: Any, rows: Tensor | None, kept: Kept
    ) -> Tensor:
        if self._direct:
            return self._compute_directly(tokens, seen, rows, kept)
        with keeping(self._model, (), kept):
            return transformers_pass(self._model, tokens, positions, rows, seen=seen, kept=kept)

    def _compute_directly(
        self, tokens: Tensor, seen: Any, rows: Tensor | None, kept: Kept
    ) -> Tensor:
        """Embedding, layers, norm and head, which is all that most models do: transformers takes
        0.1 ms for what is around them."""
        states: Tensor = self._fused.run(self._model.get_input_embeddings()(tokens), seen, kept)
        if LAST in kept.wanted:
            kept.keep(LAST, self._norm(states))
        logits: Tensor = self._head(self._norm(states if rows is None else states[rows]))
        return logits

    @torch.inference_mode()
    def _nothing_else(self) -> bool:
        """Return whether the direct way gives the bytes of transformers' own forward: it does not
        where logits are capped or positions have embeddings."""
        tokens, positions = self._oracle.tokens, self._oracle.positions
        cache = self.new_cache(len(tokens))
        seen = self._see(positions, [Segment(cache, 0, len(tokens))])
        own = transformers_pass(self._model, tokens, positions, None, seen=seen, kept=Kept())
        return torch.equal(own, self._compute_directly(tokens, seen, None, Kept()))

    def _plan(
        self, parts: "LayerParts", index: int, noted: Noted, matrices: Mapping[str, PackedMatrix]
    ) -> LayerPlan:
        norms, kinds, epsilons = {}, set(), set()
        for name, module in parts.norms.items():
            norm_kind, norms[name], epsilon = read_norm(module)
            kinds.add(norm_kind)
            epsilons.add(epsilon)
        if len(kinds) > 1 or len(epsilons) > 1:
            raise UnsupportedError("norms of different kinds in one layer")
        return LayerPlan(
            index=index,
            heads=noted.heads,
            kv_heads=noted.kv_heads,
            head_dim=noted.head_dim,
            qkv=matrices["qkv"],
            output=matrices["output"],
            gate_up=matrices["gate_up"],
            down=matrices["down"],
            **norms,
            rotary=self._rotary,
            norm_kind=kinds.pop(),
            activation=parts.activation,
            epsilon=epsilons.pop(),
            scale=noted.scaling,
            softcap=noted.softcap or 0.0,
            window=noted.window or 0,
        )


def _rotary(model: Any, context: int) -> Rotary | None:
    """The angles of all positions of a model; None for one without a rotary embedding."""
    embedding = getattr(model.base_model, "rotary_emb", None)
    if embedding is None:
        return None
    frequencies = getattr(embedding, "inv_freq", None)
    if not isinstance(frequencies, Tensor) or frequencies.ndim != 1:
        raise UnsupportedError(f"a rotary embedding of type {type(embedding).__name__}")
    table = rotary_table(
        frequencies.float(), context, scaling=float(getattr(embedding, "attention_scaling", 1.0))
    )
    _check_table(table, copy.deepcopy(embedding), context)
    return table


def _check_table(table: Rotary, embedding: nn.Module, context: int) -> None:
    """`UnsupportedError` where a table has other angles than the model's own rotary embedding
    gives."""
    positions = torch.linspace(0, context - 1, min(context, TABLE_ROWS), dtype=torch.float64).long()
    given = embedding(torch.zeros(1, 1), positions.unsqueeze(0))
    if not isinstance(given, tuple) or len(given) != 2:
        raise UnsupportedError(f"a rotary embedding of type {type(embedding).__name__}")
    for own, other in zip((table.cosines, table.sines), given, strict=True):
        expected = own[positions].repeat(1, 2)
        if other.shape[1:] != expected.shape:
            raise UnsupportedError(f"a rotary embedding of type {type(embedding).__name__}")
        far = (other[0] - expected).abs().amax(-1) > TABLE_TOLERANCE
        if bool(far.any()):
            position = int(positions[far][0])
            raise UnsupportedError(
                f"the angles of position {position} differ from those of {type(embedding).__name__}"
            )


def _final_norm(base: Any) -> tuple[str, nn.Module]:
    for name in ("norm", "ln_f"):
        if hasattr(base, name):
            return name, getattr(base, name)
    raise UnsupportedError(f"{type(base).__name__} has no final norm that is known")


def reason_against(kind: Kind) -> str:
    """Why the kernels may not be used here for weights of this kind; empty if they are there and
    agree with torch's linear."""
    if why := kernels.why_not():
        return why
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(37, 48, generator=generator).to(DTYPES[kind])
    matrix = PackedMatrix(kind, 37, 48)
    matrix.pack(weight)
    x = torch.randn(9, 48, generator=generator)
    y, expected = matrix.linear(x), x @ weight.float().t()
    difference = float((y - expected).abs().max() / expected.abs().max())
    if not difference <= (3e-2 if kind is Kind.INT8 else 1e-5):
        return (
            f"the C++ kernels differ from torch's linear by {difference:.1e} for "
            f"{kind.name} weights; build them anew: {kernels.BUILD}"
        )
    return ""
