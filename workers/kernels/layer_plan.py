"""The plan of a decoder layer: norms, rotary positions, matrices, and the rows of a pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from dovetail.workers.kernels import PackedMatrix, check_matrix, fresh_memory
from dovetail.workers.kernels.states import ScanPlan, StateRows

MOST_STREAMS = 8  # states of a token that a layer can have
STREAM_MATRICES = ("router", "predict", "correct", "left", "right")  # of a `StreamsPlan`
LANES = 16  # positions interleaved in a block of keys; capacities are multiples of it
CODES = torch.int8
"""Type of 8-bit keys and values: blocks of 32 codes of a head, each with a 16-bit scale."""


def stored_width(numbers: int, dtype: torch.dtype) -> int:
    """Return how many items of a cache's type a head of `numbers` numbers takes: codes are followed
    by the bytes of their scales."""
    return numbers + 2 * -(-numbers // 32) if dtype == CODES else numbers


class NormKind(IntEnum):
    """RMS norm, or layer norm (mean and variance)."""

    RMS = 0
    LAYER_NORM = 1


class Activation(IntEnum):
    """The MLP's activation; the gated ones multiply with the second half of `gate_up`."""

    SILU_GATED = 0
    GELU_TANH_GATED = 1
    GELU_TANH = 2
    RELU2 = 3
    GELU = 4
    XIELU = 5
    SWIGLU_CLAMPED = 6
    RELU = 7
    RELU2_GATED = 8

    @property
    def gated(self) -> bool:
        """True if the MLP has a gate."""
        return self in (
            Activation.SILU_GATED,
            Activation.GELU_TANH_GATED,
            Activation.SWIGLU_CLAMPED,
            Activation.RELU2_GATED,
        )


class MixerGate(IntEnum):
    """The activation of the gates after attention."""

    SIGMOID = 0
    SOFTPLUS = 1


class Score(IntEnum):
    """How an expert is scored: by its share of the softmax of all logits, the sigmoid of its logit,
    or the logit itself. In the last case the weights are the softmax or the sigmoids of the chosen
    logits or, with SPARSE_MIXER, each one's share of a softmax with the logits just below it."""

    SOFTMAX = 0
    SIGMOID = 1
    SOFTMAX_OF_CHOSEN = 2
    SIGMOID_OF_CHOSEN = 3
    SPARSE_MIXER = 4


class HeadNorm(IntEnum):
    """Where queries and keys are normed: each head, before or after rotation, or all heads together
    before it."""

    HEAD_BEFORE_ROPE = 0
    HEAD_AFTER_ROPE = 1
    WIDE_BEFORE_ROPE = 2


@dataclass(frozen=True)
class Norm:
    """float32 [width]; Gemma's weights are passed as 1 + weight."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Rotary:
    """The rotary table: float32 [context, rotary_dim / 2]; if rotary_dim is less than head_dim, the
    rest of a head is not rotated."""

    cosines: Tensor
    sines: Tensor
    factors: Tensor | None = None  # float32 [context]: factors of rotated queries, if any


@dataclass(frozen=True)
class RouterPlan:
    """How a row's experts are chosen (the largest scores, of equals the lower index first) and
    weighted."""

    logits: PackedMatrix  # [experts, hidden], always fp32
    chosen: int
    score: Score = Score.SOFTMAX
    correction: Tensor | None = None  # float32 [experts], added to the scores for the choice alone
    groups: int = 1
    """The number of equal groups of consecutive experts. Experts are chosen from the best
    `chosen_groups`; a group's score is the sum of its two best experts'."""
    chosen_groups: int = 1
    normalised: bool = False  # divide the weights by their sum, or by `least_sum` if that is larger
    least_sum: float = 0.0
    added_sum: float = 0.0  # added to that sum
    scale: float = 1.0
    norm: Norm | None = None  # RMS norm of the router's input
    epsilon: float = 0.0  # the epsilon of that norm
    scales: Tensor | None = None  # float32 [experts]: factors of the weights
    scales_input: bool = False
    """True if an expert's input is multiplied by its weight instead of its output."""
    best_alone: bool = False  # True if a group's score is its best expert's
    softcap: float = 0.0  # logits become softcap tanh(logit / softcap); 0: no softcap
    jitter: float = 0.0
    """SPARSE_MIXER: logits are near if their distance, relative to the larger magnitude, is at most
    twice this."""


@dataclass(frozen=True)
class ExpertsPlan:
    """The experts of a layer. Their output is added to that of the shared MLP, if the layer has
    one."""

    router: RouterPlan
    gate_up: Sequence[PackedMatrix]
    """For each expert a matrix [2 units, hidden], the gate first; without a gate [units,
    hidden]."""
    down: Sequence[PackedMatrix]  # for each expert a matrix [hidden, units]
    shared_gate: PackedMatrix | None = None
    """[1, hidden]: the sigmoid of its output scales the shared MLP's."""
    input_norm: Norm | None = None
    """The norm of the experts' input, which is then the states before the MLP's norm, for the
    router too."""
    output_norm: Norm | None = None  # the norm of the sum of a row's experts
    shared_norm: Norm | None = None  # the norm of the shared MLP's output
    before: PackedMatrix | None = None
    """[width, hidden]: projects rows to experts of another width; None: same width."""
    behind: PackedMatrix | None = None  # [hidden, width]: projects the sum of a row's experts back


@dataclass(frozen=True)
class BesidePlan:
    """A mixer with a state parallel to attention: both read the same states, each through its own
    norm, and their results are added."""

    norm: Norm
    given: PackedMatrix  # [input width of the mixer, hidden]
    output: PackedMatrix  # [hidden, output width of the mixer]
    factor: float = 1.0  # the factor of the mixer's output
    attention_factor: float = 1.0  # the factor of attention's output


@dataclass(frozen=True)
class InputPlan:
    """What a layer adds from its own input, after the MLP: norm(projection(activation(gate(h),
    input))), with the layer's activation."""

    gate: PackedMatrix  # [width, hidden]
    projection: PackedMatrix  # [hidden, width]
    norm: Norm | None
    first: int = 0  # where it begins in a row of all layers' inputs


@dataclass(frozen=True)
class StreamsPlan:
    """Several states per token (AltUp), with a low-rank addition to attention (LAuReL). Each state
    first becomes itself plus a mix of all; the layer computes the first, and each gets a share of
    its gain. The coefficients are a matrix's output for the tanh of a router's."""

    router: PackedMatrix  # [count, hidden]
    router_norm: Norm
    predict: PackedMatrix  # [count count, count]
    correct: PackedMatrix  # [count, count]
    scale: Tensor  # float32 [hidden]: factors of what the layer's own input reads
    left: PackedMatrix  # [rank, hidden]
    right: PackedMatrix  # [hidden, rank]
    norm: Norm  # the norm of the low-rank update

    @property
    def count(self) -> int:
        """Return the number of states."""
        return self.correct.n


@dataclass(frozen=True)
class LatentPlan:
    """Attention over latents: a row of the cache is a latent and a rotated key that all heads
    share. Instead of expanding latents to keys and values of each head, queries and results go
    through the heads' matrices."""

    rank: int  # width of a latent
    plain: int  # numbers of a head's query that are not rotated; the rotated ones follow them
    rotated: int  # how many these are; without a rotary table they are not rotated
    latent_norm: Tensor  # the weights of the latents' RMS norm, float32 [rank]
    key_up: Sequence[PackedMatrix]
    """For each head the matrix that expands latents to keys, transposed: [rank, plain]."""
    value_up: Sequence[PackedMatrix]  # for each head the matrix [value_dim, rank]
    query_up: PackedMatrix | None = None
    """[heads (plain + rotated), ...], which computes queries from the first numbers of `qkv`; None:
    these are the queries."""
    query_norm: Tensor | None = None
    """The weights of the RMS norm of those numbers, float32, if any."""
    epsilon: float = 1e-6  # the epsilon of both norms

    @property
    def value_dim(self) -> int:
        """The width of a head's value."""
        return self.value_up[0].n

    def widths(self, heads: int) -> tuple[int, int]:
        """Return the output width of the matrix before it and the input width of the one after it.
        Raises ValueError for matrices or heads that do not fit together."""
        if not len(self.key_up) == len(self.value_up) == heads:
            raise ValueError(f"{heads} heads, of which {len(self.key_up)} have matrices")
        for key_up, value_up in zip(self.key_up, self.value_up, strict=True):
            check_matrix("key_up", key_up, self.rank, self.plain)
            check_matrix("value_up", value_up, self.value_dim, self.rank)
        queries, first = heads * (self.plain + self.rotated), self.query_up
        if first is not None:
            check_matrix("query_up", first, queries, first.k)
        given = queries if first is None else first.k
        return given + self.rank + self.rotated, heads * self.value_dim


@dataclass(frozen=True)
class LayerPlan:
    """A decoder layer: h += o(attention(norm(h))), then h += down(activation(gate_up(norm(h)))),
    with post norms on what is added, if any. Experts may replace the MLP or run parallel to it.
    Either half may be missing."""

    index: int  # the index of the layer in the caches
    heads: int
    kv_heads: int
    head_dim: int
    qkv: PackedMatrix | None
    """[(heads + 2 kv_heads) head_dim, hidden]: all queries, all keys, all values. Queries alone if
    the layer reads another's keys and values; the input of a mixer with a state; or with latents
    the queries (or their low-rank input), a latent and a key. None: no first half."""
    output: PackedMatrix | None
    gate_up: PackedMatrix | None
    """[2 intermediate, hidden], the gate first; without a gate [intermediate, hidden]. None: only
    experts, or no MLP."""
    down: PackedMatrix | None
    attention_norm: Norm | None
    """The norm before attention; None: attention reads the hidden states as they are, as in the
    first layer of an EAGLE head."""
    mlp_norm: Norm | None
    """The norm before the MLP; None: the MLP reads the hidden states as they are, or attention's
    input. Parallel to attention it is a norm of that norm's input."""
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    query_norm: Norm | None = None  # RMS, [head_dim] or of all heads, by `head_norm`
    key_norm: Norm | None = None
    head_norm: HeadNorm = HeadNorm.HEAD_BEFORE_ROPE
    rotary: Rotary | None = None
    norm_kind: NormKind = NormKind.RMS
    activation: Activation = Activation.SILU_GATED
    activation_numbers: tuple[float, float] = (0.0, 0.0)
    """SILU_GATED: the factor of the gate, 0 for none; XIELU: the factors of positive numbers,
    squared, and of negative ones; SWIGLU_CLAMPED: the factor within the sigmoid and the limit."""
    epsilon: float = 1e-6
    scale: float | None = None  # the factor of scores; None: 1 / sqrt(head_dim)
    softcap: float = 0.0  # scores become softcap tanh(score / softcap); 0: no softcap
    window: int = 0  # a position attends to itself and window - 1 before it; 0: all
    chunk: int = 0  # a position attends to those before it back to a multiple of chunk; 0: all
    residual: float = 1.0  # the factor of the first half's output
    mlp_residual: float = 1.0  # the factor of the MLP's output
    parallel: bool = False  # the MLP reads attention's input, and both are added
    experts: ExpertsPlan | None = None
    sinks: Tensor | None = None
    """float32 [heads]: scores without a value, which take a share of the weights."""
    value_norm: Norm | None = None  # RMS, [head_dim]
    scalar: float = 1.0  # the factor of the layer's result
    scan: ScanPlan | None = None
    """A mixer with a state: instead of attention, if `heads` is 0, or parallel to it."""
    beside: BesidePlan | None = None  # the other parts of a mixer parallel to attention
    key_factor: float = 1.0  # the factor of keys, applied before they are cached
    latent: LatentPlan | None = None
    """If set, kv_heads is 1, and head_dim is the width of a cached row: a latent and a key."""
    mixer_gate: PackedMatrix | None = None
    """[heads head_dim or heads, hidden]: the gates of attention's result, one per number or per
    head, before `gate_kind`."""
    gate_kind: MixerGate = MixerGate.SIGMOID
    scan_gate: PackedMatrix | None = None
    """[values, low]: the gates of a mixer with a decay for each number of a key."""
    scan_decay: PackedMatrix | None = None  # [decays, low]: its decays before bias and softplus
    mixer_norm: Norm | None = None  # the norm of what `output` reads
    inner_norm: Norm | None = None  # the norm of what `down` reads
    clip: float = 0.0
    """Queries, keys and values are clipped to -clip .. clip after wide norms; 0: no clipping."""
    reads: int | None = None
    """The layer whose keys and values it reads, located by `heads_before`; None if it has its
    own."""
    own_input: InputPlan | None = None
    streams: StreamsPlan | None = None  # None: a token has one state
    cut: float = 0.0  # gates become max(0, gate - mean - cut * deviation); 0: not
    given: int = 0
    """The width of attention's own input, for heads that also read embeddings, in a layer without
    an MLP; 0: it reads the states."""
    heads_before: Sequence[tuple[int, int]] | None = None
    """The number and size of the key heads of each layer before this one in a cache; None: as for
    `index` layers like this one."""

    def before(self, dtype: torch.dtype) -> int:
        """Return the items that a row's keys take in the layers before this one, for this type."""
        heads = self.heads_before
        if heads is None:
            heads = self.index * [(self.kv_heads, self.head_dim)]
        return sum(kv_heads * stored_width(head_dim, dtype) for kv_heads, head_dim in heads)

    @property
    def matrices(self) -> Sequence[PackedMatrix]:
        """The matrices that all rows use."""
        parts = [self.qkv, self.output, self.gate_up, self.down, self.mixer_gate]
        parts += [self.scan_gate, self.scan_decay]
        if self.beside is not None:
            parts += [self.beside.given, self.beside.output]
        if self.own_input is not None:
            parts += [self.own_input.gate, self.own_input.projection]
        if self.latent is not None:
            parts.append(self.latent.query_up)
        if self.streams is not None:
            parts += [self.streams.left, self.streams.right]
        return [part for part in parts if part]

    @property
    def hidden(self) -> int:
        """The width of a row's states."""
        if self.output is not None:
            return self.output.n
        if self.gate_up is not None:
            return self.gate_up.k
        if self.experts is None:
            raise ValueError("a layer needs attention, a mixer with a state, an MLP or experts")
        return self.experts.router.logits.k

    @property
    def attends(self) -> bool:
        """Whether the layer has keys and values, or latents."""
        return self.qkv is not None and (self.scan is None or self.beside is not None)

    @property
    def caches(self) -> bool:
        """Whether the layer has keys and values, or latents, of its own."""
        return self.attends and self.reads is None


@dataclass(frozen=True)
class CacheRows:
    """The rows of one session in a pass: they are written to slots start .. start + count - 1 of
    its cache."""

    keys: Tensor
    """float32, float16 or CODES [layers, kv_heads, capacity / 16, stored_width(head_dim), 16] of
    the whole cache; if the layers' heads differ, [items of a row, capacity] with each layer laid
    out as if it were alone."""
    values: Tensor
    """Same type, [layers, kv_heads, capacity, stored_width(head_dim)], or as keys; with latents
    these are the rows, and there are no keys."""
    start: int
    count: int
    paths: Any = None
    """The slots that each row attends to, `Paths` of models/segment.py: slots 0 .. prefix - 1, then
    its own path, root first and itself last, in any slots from prefix on. None: row i attends to
    slots 0 .. start + i."""
    states: StateRows | None = None  # the state of the session, for layers that have one
    shared: "SharedRows | None" = None
    """The first rows of the session, shared with others. Its own cache then begins with the next
    slot, and no path includes them."""


@dataclass(frozen=True)
class SharedRows:
    """The keys and values of the first `rows` slots of several sessions, read-only. `keys` and
    `values` are as in `CacheRows`; `rows` is a multiple of 16."""

    keys: Tensor
    values: Tensor
    rows: int


def new_cache(
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    capacity: int,
    dtype: torch.dtype = torch.float32,
    latent: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return keys and values for `capacity` slots, rounded up to a whole block. `head_dim`: the
    stored width of a head. `latent`: keys are empty. Pages are small: the first rows of a prompt
    are scattered, a few for every head of every layer, so with huge pages nearly the whole cache
    would have to be backed, up to 6 ms each, within the first pass."""
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


def check_shapes(plan: LayerPlan) -> None:
    """Raise ValueError for matrices that do not fit together."""
    hidden = plan.hidden
    if plan.qkv is not None and plan.output is not None:
        _check_mixers(plan, plan.qkv, plan.output)
    elif plan.qkv is not None or plan.scan is not None or plan.beside is not None:
        raise ValueError("a mixer with a state, or attention, lacks a matrix")
    if plan.gate_up is not None and plan.down is not None:
        check_mlp(plan.gate_up, plan.down, hidden, plan.activation)
    if (own := plan.own_input) is not None:
        check_matrix("gate of the input", own.gate, own.projection.k, hidden)
        check_matrix("projection of the input", own.projection, hidden, own.projection.k)
    if (streams := plan.streams) is not None:
        count, rank = streams.count, streams.left.n
        if count > MOST_STREAMS or plan.parallel or None in (plan.attention_norm, plan.mlp_norm):
            raise ValueError(f"{count} streams, or streams without norms of both halves")
        first = (count, hidden), (count * count, count), (count, count)
        shapes = (*first, (rank, hidden), (hidden, rank))
        for name, shape in zip(STREAM_MATRICES, shapes, strict=True):
            check_matrix(f"{name} of streams", getattr(streams, name), *shape)


def _check_mixers(plan: LayerPlan, qkv: PackedMatrix, output: PackedMatrix) -> None:
    """Raise ValueError if attention and a mixer with a state do not fit their matrices."""
    hidden, cached = plan.hidden, 2 * plan.kv_heads if plan.reads is None else 0
    given, taken = (plan.heads + cached) * plan.head_dim, plan.heads * plan.head_dim
    if plan.beside is not None:
        if plan.scan is None or plan.parallel:
            raise ValueError("a parallel mixer without attention, or together with an MLP")
        widths = plan.scan.widths
        check_matrix("given", plan.beside.given, widths[0], hidden)
        check_matrix("output beside attention", plan.beside.output, hidden, widths[1])
    elif plan.scan is not None:
        given, taken = plan.scan.widths
        for name, width in (("scan_gate", taken), ("scan_decay", plan.scan.decays)):
            if plan.scan.low and (matrix := getattr(plan, name)) is not None:
                check_matrix(name, matrix, width, plan.scan.low)
            elif plan.scan.low:
                raise ValueError(f"a mixer without {name}")
    elif plan.latent is not None:
        rotated = plan.latent.rotated
        given, taken = plan.latent.widths(plan.heads)
        turned = 0 if plan.rotary is None else 2 * plan.rotary.cosines.shape[1]
        if (plan.kv_heads, plan.head_dim) != (1, plan.latent.rank + rotated) or (
            turned not in (0, rotated)
        ):
            raise ValueError(f"latents in {plan.kv_heads} rows of {plan.head_dim}")
    others = (plan.attention_norm, plan.parallel or None, plan.beside, plan.gate_up)
    if plan.given and any(other is not None for other in others):
        raise ValueError("attention has its own input, but a norm, an MLP or a mixer reads it")
    check_matrix("qkv", qkv, given, plan.given or hidden)
    check_matrix("output", output, hidden, taken)
    if plan.mixer_gate is not None:
        gates = plan.heads if plan.mixer_gate.n == plan.heads else taken
        check_matrix("mixer_gate", plan.mixer_gate, gates, plan.given or hidden)
    if plan.attends:
        check_heads(plan)


def check_mlp(gate_up: PackedMatrix, down: PackedMatrix, hidden: int, how: Activation) -> None:
    """Raise ValueError if the matrices of an MLP or an expert do not fit together."""
    check_matrix("gate_up", gate_up, down.k * (2 if how.gated else 1), hidden)
    check_matrix("down", down, hidden, down.k)


def check_heads(plan: LayerPlan) -> None:
    """Raise ValueError if heads cannot share their keys evenly, or more of a head is rotated than
    it has."""
    rotated = 0 if plan.rotary is None else 2 * plan.rotary.cosines.shape[1]
    if plan.kv_heads < 1 or plan.heads % plan.kv_heads or rotated > plan.head_dim:
        raise ValueError(
            f"{plan.heads} heads of {plan.head_dim} with {plan.kv_heads} key heads, of which "
            f"{rotated} numbers are rotated"
        )
