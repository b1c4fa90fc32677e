"""The plan of a decoder layer as a caller has it: norms, rotary positions, matrices, and the rows
of a pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, chain

import torch
from torch import Tensor

from dovetail.workers.kernels import PackedMatrix, fresh_memory
from dovetail.workers.kernels.latent import LatentPlan
from dovetail.workers.kernels.states import ScanPlan, StateRows

LANES = 16
"""Positions that stand side by side in a block of keys; capacities are multiples of it."""


class NormKind(IntEnum):
    """Root mean square, or mean and variance."""

    RMS = 0
    LAYER_NORM = 1


class Activation(IntEnum):
    """The function between the two halves of the MLP; the gated ones multiply with the second half
    of `gate_up`."""

    SILU_GATED = 0
    GELU_TANH_GATED = 1
    GELU_TANH = 2
    RELU2 = 3
    GELU = 4
    XIELU = 5
    SWIGLU_CLAMPED = 6

    @property
    def gated(self) -> bool:
        """True if the MLP has a gate."""
        return self in (
            Activation.SILU_GATED,
            Activation.GELU_TANH_GATED,
            Activation.SWIGLU_CLAMPED,
        )


class Score(IntEnum):
    """The score of an expert: its share of the softmax of all logits, the sigmoid of its logit, or
    the logit itself, where weights are the softmax, or the sigmoids, of those that were chosen."""

    SOFTMAX = 0
    SIGMOID = 1
    SOFTMAX_OF_CHOSEN = 2
    SIGMOID_OF_CHOSEN = 3


class HeadNorm(IntEnum):
    """The place of the norms of queries and keys: on each head, before or after it is rotated, or
    on all heads together before that."""

    HEAD_BEFORE_ROPE = 0
    HEAD_AFTER_ROPE = 1
    WIDE_BEFORE_ROPE = 2


@dataclass(frozen=True)
class Norm:
    """float32 [width]; Gemma's weights come as 1 + weight."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Rotary:
    """The angles of all positions: float32 [context, rotary_dim / 2]; rotary_dim may be less than
    head_dim, and the rest of a head is left alone."""

    cosines: Tensor
    sines: Tensor
    factors: Tensor | None = None
    """float32 [context], by which rotated queries are multiplied; None: they are not."""


@dataclass(frozen=True)
class RouterPlan:
    """The choice of a row's experts: those of the largest scores, the lower index first of equals,
    and their weights."""

    logits: PackedMatrix
    """[experts, hidden], fp32 whatever the other weights are."""
    chosen: int
    score: Score = Score.SOFTMAX
    correction: Tensor | None = None
    """float32 [experts], added to the scores for the choice alone."""
    groups: int = 1
    """Neighbours in groups of the same size, among whose best `chosen_groups` is chosen: a group
    is worth what its two best experts are together."""
    chosen_groups: int = 1
    normalised: bool = False
    """The weights are divided by their sum, or by `least_sum` where that is more."""
    least_sum: float = 0.0
    added_sum: float = 0.0
    """The number that is added to that sum."""
    scale: float = 1.0
    norm: Norm | None = None
    """RMS, of what the router reads."""
    epsilon: float = 0.0
    """The epsilon of that norm."""
    scales: Tensor | None = None
    """float32 [experts], by which the weights are multiplied."""
    scales_input: bool = False
    """True if what an expert reads is multiplied by its weight, and not what it gives."""
    best_alone: bool = False
    """True if a group is worth what its best expert is."""


@dataclass(frozen=True)
class ExpertsPlan:
    """The MLPs of which a row goes through a few; what they give is added to the MLP that all rows
    share, where the layer has one."""

    router: RouterPlan
    gate_up: Sequence[PackedMatrix]
    """A matrix [2 units, hidden] for each expert, the gate first; else [units, hidden]."""
    down: Sequence[PackedMatrix]
    """A matrix [hidden, units] for each expert."""
    shared_gate: PackedMatrix | None = None
    """[1, hidden]: what all rows share is multiplied by its sigmoid."""
    input_norm: Norm | None = None
    """The norm of what experts read, which with it are the states before the half's norm; the
    router reads them too."""
    output_norm: Norm | None = None
    """The norm of what the experts of a row add up to."""
    shared_norm: Norm | None = None
    """The norm of what all rows share."""
    before: PackedMatrix | None = None
    """[width, hidden], of what experts of another width read; None: they read rows as they are."""
    behind: PackedMatrix | None = None
    """[hidden, width], of what the experts of a row add up to."""


@dataclass(frozen=True)
class BesidePlan:
    """A mixer with a state parallel to attention: both read the same states, each through its own
    norm, and their results are added."""

    norm: Norm
    given: PackedMatrix
    """[what the mixer reads, hidden]."""
    output: PackedMatrix
    """[hidden, what the mixer gives]."""
    factor: float = 1.0
    """The factor of what the mixer adds."""
    attention_factor: float = 1.0
    """The factor of what attention adds."""


@dataclass(frozen=True)
class InputPlan:
    """The sum that a layer adds from its own input, after the MLP: norm(projection(
    activation(gate(h), input))), with the layer's activation."""

    gate: PackedMatrix
    """[width, hidden]."""
    projection: PackedMatrix
    """[hidden, width]."""
    norm: Norm | None
    first: int = 0
    """The place in a row of the inputs of all layers where it begins."""


@dataclass(frozen=True)
class LayerPlan:
    """A decoder layer: h += o(attention(norm(h))), then h += down(activation(gate_up(norm(h)))),
    with a norm on what is added where there is a post norm. Experts may replace that MLP, or be
    parallel to it. Either half may be missing."""

    index: int
    """The index of the layer in the caches."""
    heads: int
    kv_heads: int
    head_dim: int
    qkv: PackedMatrix | None
    """[(heads + 2 kv_heads) head_dim, hidden]: all queries, all keys, all values; queries alone
    where another layer's keys and values are read; what a mixer with a state reads; or with latents
    queries, or what becomes them, a latent and a key. None: there
    is no first half."""
    output: PackedMatrix | None
    gate_up: PackedMatrix | None
    """[2 intermediate, hidden], the gate first; without a gate [intermediate, hidden]. None: of the
    MLP there are experts alone, or there is none."""
    down: PackedMatrix | None
    attention_norm: Norm | None
    """The norm before attention; None: attention reads the hidden states as they are, as in the
    first layer of an EAGLE head."""
    mlp_norm: Norm | None
    """The norm before the MLP; None: the MLP reads the hidden states as they are, or what attention
    reads; parallel to attention it is a norm of what that norms."""
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    query_norm: Norm | None = None
    """RMS, [head_dim] or of all heads, by `head_norm`."""
    key_norm: Norm | None = None
    head_norm: HeadNorm = HeadNorm.HEAD_BEFORE_ROPE
    rotary: Rotary | None = None
    norm_kind: NormKind = NormKind.RMS
    activation: Activation = Activation.SILU_GATED
    activation_numbers: tuple[float, float] = (0.0, 0.0)
    """SILU_GATED: the factor of the gate, 0 for none; XIELU: the factors of what is positive,
    squared, and of what is negative; SWIGLU_CLAMPED: the factor within the sigmoid and the
    limit."""
    epsilon: float = 1e-6
    scale: float | None = None
    """The factor of scores; None: 1 / sqrt(head_dim)."""
    softcap: float = 0.0
    """Scores become softcap tanh(score / softcap); 0: they do not."""
    window: int = 0
    """A position sees itself and window - 1 before it; 0: all."""
    chunk: int = 0
    """A position sees those before it back to a multiple of chunk; 0: all."""
    residual: float = 1.0
    """The factor of what the first half adds."""
    mlp_residual: float = 1.0
    """The factor of what the MLP adds."""
    parallel: bool = False
    """The MLP reads what attention reads, and both are added."""
    experts: ExpertsPlan | None = None
    sinks: Tensor | None = None
    """float32 [heads]: scores that no value belongs to, which take their share of the weights."""
    value_norm: Norm | None = None
    """RMS, [head_dim]."""
    scalar: float = 1.0
    """The factor of the layer's result."""
    scan: ScanPlan | None = None
    """Instead of attention, if such a layer has no heads, or parallel to it."""
    beside: BesidePlan | None = None
    """The other parts of a mixer with a state that is parallel to attention."""
    key_factor: float = 1.0
    """The factor of keys, which are cached with it."""
    latent: LatentPlan | None = None
    """With it kv_heads is 1, and head_dim that of a row of the cache: a latent and a key."""
    mixer_gate: PackedMatrix | None = None
    """[heads head_dim, hidden]: what was attended to is multiplied by its sigmoid."""
    reads: int | None = None
    """The layer whose keys and values it reads, located by `cached_before`; None if it has its
    own."""
    own_input: InputPlan | None = None
    given: int = 0
    """The width of the rows that attention reads in the place of the states, as in a head that
    reads embeddings beside them; 0: it reads the states."""
    cached_before: int | None = None
    """The numbers of a row's keys of the layers before this one in a cache; None: those of `index`
    layers like this one."""

    @property
    def before(self) -> int:
        """Return the numbers of a row's keys of the layers before this one in a cache."""
        if self.cached_before is not None:
            return self.cached_before
        return self.index * self.kv_heads * self.head_dim

    @property
    def matrices(self) -> Sequence[PackedMatrix]:
        """The matrices that all rows go through."""
        parts = [self.qkv, self.output, self.gate_up, self.down, self.mixer_gate]
        if self.beside is not None:
            parts += [self.beside.given, self.beside.output]
        if self.own_input is not None:
            parts += [self.own_input.gate, self.own_input.projection]
        if self.latent is not None:
            parts.append(self.latent.query_up)
        return [part for part in parts if part]

    @property
    def hidden(self) -> int:
        """Return the width of a row's states."""
        if self.output is not None:
            return self.output.n
        if self.gate_up is not None:
            return self.gate_up.k
        if self.experts is None:
            raise ValueError("a layer needs attention, a mixer with a state, an MLP or experts")
        return self.experts.router.logits.k

    @property
    def attends(self) -> bool:
        """True if the layer has keys and values, or latents."""
        return self.qkv is not None and (self.scan is None or self.beside is not None)

    @property
    def caches(self) -> bool:
        """True if the layer has keys and values, or latents, of its own."""
        return self.attends and self.reads is None


@dataclass(frozen=True)
class CacheRows:
    """The rows of one session in a pass: they are written to slots start .. start + count - 1 of
    its cache."""

    keys: Tensor
    """float32 or float16 [layers, kv_heads, capacity / 16, head_dim, 16] of the whole cache; of
    layers whose heads differ [numbers of a row, capacity], each as it would be alone."""
    values: Tensor
    """Their type, [layers, kv_heads, capacity, head_dim], or as keys; of latents the rows, and no
    keys."""
    start: int
    count: int
    paths: "Paths | None" = None
    """Slots that each row sees; None: row i sees slots 0 .. start + i."""
    states: StateRows | None = None
    """The state of a session, for layers that have one; None: there are none."""
    shared: "SharedRows | None" = None
    """The rows that the session begins with and that others have too. Its own cache then begins
    with the slot behind them, and no path goes through them."""


@dataclass(frozen=True)
class SharedRows:
    """The keys and values of the first `rows` slots of several sessions, which are read-only.
    `keys` and `values` are as in `CacheRows`; `rows` is a multiple of 16."""

    keys: Tensor
    values: Tensor
    rows: int


@dataclass(frozen=True)
class Paths:
    """The slots that each row sees: slots 0 .. prefix - 1 and behind them its own path, root first
    and itself last, by any slots from prefix on."""

    prefix: int
    offsets: Tensor
    """int32 [rows + 1]: the path of row i is slots[offsets[i] : offsets[i + 1]]."""
    slots: Tensor
    """int32."""


def new_cache(
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    capacity: int,
    dtype: torch.dtype = torch.float32,
    latent: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return keys and values for `capacity` slots, rounded up to a whole block. `latent`: keys have
    no numbers.

    The pages are small. The first rows of a prompt lie scattered, a few for every head of every
    layer; with huge pages nearly the whole cache would have to be backed, up to 6 ms each, before
    the pass that writes them beside other streams could end.
    """
    blocks, key_dim = -(-capacity // LANES), 0 if latent else head_dim
    keys, values = (
        torch.frombuffer(fresh_memory(dtype.itemsize * size, huge=False)[0], dtype=dtype)
        if (size := layers * kv_heads * blocks * LANES * width)
        else torch.empty(0, dtype=dtype)
        for width in (key_dim, head_dim)
    )
    return keys.view(layers, kv_heads, blocks, key_dim, LANES), values.view(
        layers, kv_heads, blocks * LANES, head_dim
    )


def lay_paths(prefix: int, paths: Sequence[Sequence[int]]) -> Paths:
    """The paths of the rows of a segment, one after the other."""
    offsets = torch.tensor([0, *accumulate(map(len, paths))], dtype=torch.int32)
    return Paths(prefix, offsets, torch.tensor(list(chain.from_iterable(paths)), dtype=torch.int32))
