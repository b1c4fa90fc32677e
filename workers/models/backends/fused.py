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
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from dovetail.workers import kernels
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.layer import (
    LANES,
    Activation,
    CacheRows,
    DecoderLayer,
    LayerPass,
    LayerPlan,
    Norm,
    NormKind,
    Rotary,
    new_cache,
    normalise,
    rotary_table,
)
from dovetail.workers.kernels.layer import Paths as KernelPaths
from dovetail.workers.models.attention import Noted
from dovetail.workers.models.backends.embedding import widen_embeddings
from dovetail.workers.models.backends.library import transformers_pass
from dovetail.workers.models.backends.proof import LAYER_TOLERANCE, LayerProof, Product
from dovetail.workers.models.checkpoints.loader import decoder_layers
from dovetail.workers.models.parity.following import UnsupportedError
from dovetail.workers.models.parity.oracle import Oracle
from dovetail.workers.models.segment import (
    PROMPT_ROWS,
    Cache,
    Segment,
    check_truncation,
    has_to_move,
    slots_in_place,
)
from dovetail.workers.models.states import LAST, Kept, keeping
from dovetail.workers.models.timing import asked, timing
from dovetail.workers.progress import beat

VERSION = "dovetail-1"
"""Of the functions that the kernels compute, down to the last bit; part of the fingerprint."""
TABLE_ROWS = 512
"""Positions, spread over the context, at which the table of angles is compared with the model's
own."""
TABLE_TOLERANCE = 1e-5
DTYPES = {
    Kind.FP32: torch.float32,
    Kind.FP16: torch.float16,
    Kind.BF16: torch.bfloat16,
    Kind.INT8: torch.float32,
}
"""What a matrix of each kind is packed from."""
EXACT_KINDS = {torch.float32: Kind.FP32, torch.float16: Kind.FP16, torch.bfloat16: Kind.BF16}
"""The kind that holds weights of a type as they are."""
MOST_ROOM = 1024
"""Rows that a cache has beyond those asked for, at most: some turns of a conversation, and little
beside a long context."""
PIECE_WEIGHTS = 1 << 22
"""So many weights are converted at a time: 16 MiB of fp32."""


def with_room(capacity: int) -> int:
    """Rows to have memory for, so that the next turn of a conversation finds its place: to move 400
    rows into fresh memory takes longer than to read 12."""
    return capacity + min(capacity // 2, MOST_ROOM)


class BlockedCache:
    """A session's keys and values in the layout of the kernels: keys sixteen slots side by side, so
    that lanes run along slots."""

    def __init__(self, *, layers: int, kv_heads: int, head_dim: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys, self.values = new_cache(
            layers=layers, kv_heads=kv_heads, head_dim=head_dim, capacity=with_room(capacity)
        )

    def keep(self, slots: Sequence[int], committed: int) -> None:
        """Move `slots` (distinct, none committed) to length, length+1, ... in this order and commit
        the first `committed`; only these rows move."""
        in_place = slots_in_place(self, slots, committed)
        if in_place < len(slots):
            source = torch.tensor(slots[in_place:])
            target = torch.arange(self.length + in_place, self.length + len(slots))
            self.values[:, :, target] = self.values[:, :, source]
            self.keys[:, :, target // LANES, :, target % LANES] = self.keys[
                :, :, source // LANES, :, source % LANES
            ]
        self.length += committed

    def truncate(self, length: int) -> None:
        """Let the committed rows from slot `length` on go."""
        check_truncation(self, length)
        self.length = length

    def resize(self, capacity: int) -> None:
        """Have slots for `capacity` rows; the committed ones stay, and move only where memory is
        too small, or much too large."""
        layers, kv_heads, slots, head_dim = self.values.shape
        if has_to_move(self, slots, capacity):
            blocks = -(-self.length // LANES)
            keys, values = new_cache(
                layers=layers, kv_heads=kv_heads, head_dim=head_dim, capacity=with_room(capacity)
            )
            keys[:, :, :blocks] = self.keys[:, :, :blocks]
            values[:, :, : self.length] = self.values[:, :, : self.length]
            self.keys, self.values = keys, values
        self.capacity = capacity

    @property
    def row_bytes(self) -> int:
        """Memory of one row."""
        layers, kv_heads, _, head_dim = self.values.shape
        return 2 * layers * kv_heads * head_dim * self.values.element_size()


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
        """The same of states [T, hidden], in place."""
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
    """Whether the matrices that layers are packed into are on the CPU, and can prove them."""

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
        """What stands in the layer's place until all are there; the layer has its numbers and is
        not needed afterwards."""
        parts = _Parts(layer)
        proof = LayerProof(self._oracle, layer, index, parts.linears)
        proving = (
            None
            if self._computes_here
            else {
                name: _pack(_exact_kind(parts), linears) for name, linears in parts.linears.items()
            }
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
        """What is not a layer has its numbers too: the norm and the head are replaced, and the
        layers stand as one."""
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
        matrix = _pack(self._kind, [head])
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
        return _pack_and_drop(kind, linears)

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
        """Whether the direct way gives the bytes of transformers' own forward: it does not where
        logits are capped or positions have embeddings."""
        tokens, positions = self._oracle.tokens, self._oracle.positions
        cache = self.new_cache(len(tokens))
        seen = self._see(positions, [Segment(cache, 0, len(tokens))])
        own = transformers_pass(self._model, tokens, positions, None, seen=seen, kept=Kept())
        return torch.equal(own, self._compute_directly(tokens, seen, None, Kept()))

    def _plan(
        self, parts: "_Parts", index: int, noted: Noted, matrices: Mapping[str, PackedMatrix]
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


class _Parts:
    """The parts of a decoder layer, found by their names."""

    def __init__(self, layer: nn.Module) -> None:
        self.attention: Any = _part(layer, "self_attn", "attn")
        mlp = _part(layer, "mlp")
        self.linears = {
            "qkv": _linears(
                self.attention, ("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("c_attn",)
            ),
            "output": _linears(self.attention, ("o_proj",), ("c_proj",)),
            "gate_up": _linears(mlp, ("gate_proj", "up_proj"), ("gate_up_proj",), ("c_fc",)),
            "down": _linears(mlp, ("down_proj",), ("c_proj",)),
        }
        """Of each matrix of the kernels, those that it is packed of."""
        self.activation = read_activation(
            _part(mlp, "act_fn", "activation_fn", "act"), gated=not hasattr(mlp, "c_fc")
        )
        self.norms = self._norms(layer)

    def _norms(self, layer: nn.Module) -> dict[str, nn.Module]:
        names = {"attention_norm": _part(layer, "input_layernorm", "ln_1")}
        if hasattr(layer, "pre_feedforward_layernorm"):
            names["post_attention_norm"] = _part(layer, "post_attention_layernorm")
            names["mlp_norm"] = _part(layer, "pre_feedforward_layernorm")
            names["post_mlp_norm"] = _part(layer, "post_feedforward_layernorm")
        else:
            names["mlp_norm"] = _part(layer, "post_attention_layernorm", "ln_2")
        if hasattr(self.attention, "q_norm"):
            names |= {"query_norm": self.attention.q_norm, "key_norm": self.attention.k_norm}
        return names


def _part(module: nn.Module, *names: str) -> Any:
    """The first of these parts that a module has."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise UnsupportedError(f"{type(module).__name__} has no {' or '.join(names)}")


def _linears(module: nn.Module, *choices: Sequence[str]) -> list[nn.Linear]:
    """The linears of the first choice that a module has all of."""
    for names in choices:
        found = [getattr(module, name, None) for name in names]
        if all(type(part) is nn.Linear for part in found):
            return found  # type: ignore[return-value]
    raise UnsupportedError(
        f"{type(module).__name__} has no linears "
        f"{' or '.join('+'.join(names) for names in choices)}"
    )


def _pack(kind: Kind, linears: Sequence[nn.Linear]) -> PackedMatrix:
    """One matrix of the kernels from linears with the same inputs, below each other."""
    biases = [linear.bias for linear in linears]
    bias = None
    if any(b is not None for b in biases):
        bias = torch.cat(
            [
                torch.zeros(part.out_features) if b is None else b.detach().float()
                for part, b in zip(linears, biases, strict=True)
            ]
        )
    matrix = PackedMatrix(
        kind, sum(part.out_features for part in linears), linears[0].in_features, bias=bias
    )
    for part, first in zip(
        linears,
        itertools.accumulate((part.out_features for part in linears), initial=0),
        strict=False,
    ):
        weight, piece = part.weight.detach(), max(1, PIECE_WEIGHTS // part.in_features)
        for start in range(0, part.out_features, piece):
            matrix.pack(weight[start : start + piece].to(DTYPES[kind]).contiguous(), first + start)
    return matrix


def _exact_kind(parts: "_Parts") -> Kind:
    """The kind that holds all weights of a layer as they are."""
    types = {part.weight.dtype for linears in parts.linears.values() for part in linears}
    return EXACT_KINDS[types.pop()] if len(types) == 1 else Kind.FP32


def _pack_and_drop(kind: Kind, linears: Sequence[nn.Linear]) -> PackedMatrix:
    """The same; the linears lose their weights, so that at no time a whole layer is there twice."""
    matrix = _pack(kind, linears)
    for part in linears:
        part.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    return matrix


def read_norm(module: nn.Module) -> tuple[NormKind, Norm, float]:
    """Kind, weights and epsilon of a norm; RMS norms are told by trying: some multiply by their
    weight, Gemma's by one more."""
    weight: Any = getattr(module, "weight", None)
    if isinstance(module, nn.LayerNorm) and weight is not None:
        bias = None if module.bias is None else module.bias.detach().float().contiguous()
        return NormKind.LAYER_NORM, Norm(weight.detach().float().contiguous(), bias), module.eps
    epsilon: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or not isinstance(epsilon, float):
        raise UnsupportedError(f"a norm of type {type(module).__name__}")
    x = torch.randn(2, weight.shape[0], generator=torch.Generator().manual_seed(1))
    expected = module(x).float()
    for weights in (weight.detach().float().contiguous(), 1.0 + weight.detach().float()):
        if torch.allclose(
            normalise(NormKind.RMS, Norm(weights), x, epsilon), expected, rtol=1e-4, atol=1e-5
        ):
            return NormKind.RMS, Norm(weights), epsilon
    raise UnsupportedError(f"a norm of type {type(module).__name__}")


def read_activation(function: Callable[[Tensor], Tensor], *, gated: bool) -> Activation:
    """Which of the kernels' activations a function is, told by trying."""
    x = torch.linspace(-6, 6, 97)
    y = function(x)
    if torch.allclose(y, gelu(x, approximate="tanh"), atol=1e-5):
        return Activation.GELU_TANH_GATED if gated else Activation.GELU_TANH
    if gated and torch.allclose(y, silu(x), atol=1e-5):
        return Activation.SILU_GATED
    raise UnsupportedError(f"the activation {type(function).__name__}")


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


def cache_rows(segment: Segment) -> CacheRows:
    """A segment in the words of the kernels."""
    cache = segment.cache
    if not isinstance(cache, BlockedCache):
        raise TypeError(f"a cache of type {type(cache).__name__} belongs to another back end")
    paths = segment.paths
    seen = (
        None
        if paths is None
        else KernelPaths(
            paths.prefix, torch.from_numpy(paths.offsets), torch.from_numpy(paths.slots)
        )
    )
    return CacheRows(cache.keys, cache.values, segment.start, segment.count, seen)


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
