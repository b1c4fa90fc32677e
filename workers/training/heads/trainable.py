"""Draft heads in training: plain torch over whole sequences, with the tensor names of the public
checkpoints.

Row j of a pass takes the target's feature at position j and token x_{j+1}, has position j, and
predicts x_{j+2}. A pass can be repeated on its own output (training-time test, the EAGLE-3 paper):
at step i row j takes its own state of step i - 1 and token x_{j+1+i}, stands at position j + i, and
attends to the rows <= j of step 0 and to itself at the steps 1..i, exactly as a chain drafted from
row j. These modules are the slow oracle of `head.py`. The target's embedding and output head are
not part of them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dovetail.workers.training.target_parts import Frozen, TargetParts

READS = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
WRITES = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
STREAM = 8.0
"""Root mean square of a residual stream near its end, if nothing better is known; training corrects
it."""
Turn = tuple[Tensor, Tensor]  # cosines and sines [B, 1, n, head_dim]


@dataclass(frozen=True)
class HeadShape:
    """The shape of a head before it is built; all widths are numbers of one row. Kinds with further
    numbers have a subclass."""

    kind: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int  # tokens of the target, V
    draft_vocabulary: int = field(default=0, kw_only=True)
    """How many frequent tokens it can propose, Vd; 0: all."""
    blocks: int = 1
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    context: int = 2048  # positions that it is trained for
    head_norms: bool = field(default=False, kw_only=True)
    """True if the queries and keys of each attention head are normed, as in Qwen3."""

    @property
    def own_vocabulary(self) -> int:
        """The number of logits of this head, Vd."""
        return self.draft_vocabulary or self.vocabulary


@dataclass
class Seen:
    """The mask of one batch, and the keys and values of the steps so far: `kept[layer][step]`, each
    [B, heads, n, head_dim]."""

    mask: Tensor  # bool [B, 1, n, n]: which rows of step 0 a row attends to
    kept: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)

    def of(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Return the steps of one layer, oldest first."""
        while len(self.kept) <= layer:
            self.kept.append([])
        return self.kept[layer]


@dataclass(frozen=True)
class HeadOutput:
    """The result of a pass: the recurrent state [B, n, H], and with Jakiro's contrast the state
    that predicts one token further."""

    state: Tensor
    contrast: Tensor | None = None


def mask_of(document: Tensor) -> Tensor:
    """Return bool [B, 1, n, n]: causal within the documents of a packed row (`document` [B, n], -1
    for padding; padding attends to padding, so that no row is empty)."""
    causal = torch.ones(
        document.shape[1], document.shape[1], dtype=torch.bool, device=document.device
    ).tril()
    return (causal & (document[:, :, None] == document[:, None, :]))[:, None]


def turn(positions: Tensor, head_dim: int, theta: float) -> Turn:
    """Return the rotation of positions [B, n] in Llama's layout (the two halves of a head rotate
    together)."""
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, None, :, None].float() / theta**steps
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _turned(x: Tensor, by: Turn) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * by[0] + torch.cat([-second, first], -1) * by[1]


class Norm(nn.Module):
    """RMSNorm in 32 bits."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention without biases; `width` is the width of its input (2 H in
    EAGLE-3)."""

    def __init__(self, shape: HeadShape, width: int) -> None:
        super().__init__()
        self.shape = shape
        if shape.head_norms:
            self.q_norm = Norm(shape.head_dim, shape.norm_eps)
            self.k_norm = Norm(shape.head_dim, shape.norm_eps)
        self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, by: Turn, seen: Seen, layer: int) -> Tensor:
        """x [B, n, width] -> [B, n, H]; its keys and values become the newest step of this
        layer."""
        steps, query = seen.of(layer), self.queries(x, by)
        steps.append(self.memory(x, by))
        mixed = (
            first_attention(query, *steps[0], seen.mask)
            if len(steps) == 1
            else later_attention(query, steps, seen.mask)
        )
        return self.joined(mixed)

    def queries(self, x: Tensor, by: Turn) -> Tensor:
        """Return the queries [B, heads, n, head_dim] of rows x [B, n, width]."""
        query = self._split(self.q_proj(x))
        normed = self.q_norm(query) if self.shape.head_norms else query
        return _turned(normed, by).to(query.dtype)

    def memory(self, x: Tensor, by: Turn) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, heads, n, head_dim] of rows x [B, n, width]."""
        key, value = self._split(self.k_proj(x)), self._split(self.v_proj(x))
        normed = self.k_norm(key) if self.shape.head_norms else key
        return self._repeat(_turned(normed, by).to(value.dtype)), self._repeat(value)

    def joined(self, mixed: Tensor) -> Tensor:
        """Return the output [B, n, H] for the mixed values [B, heads, n, head_dim]."""
        return cast(Tensor, self.o_proj(mixed.transpose(1, 2).flatten(2)))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.shape.head_dim).transpose(1, 2)

    def _repeat(self, x: Tensor) -> Tensor:
        times = self.shape.heads // self.shape.kv_heads
        return x if times == 1 else x.repeat_interleave(times, dim=1)


def first_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention of step 0: all [B, heads, n, head_dim], over the rows that the mask shows."""
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def later_attention(query: Tensor, steps: Sequence[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    """Attention of a later step: over the rows of step 0 that the mask shows, and the row's own
    keys of every later step up to this one."""
    scale = 1 / math.sqrt(query.shape[-1])
    rows = (query @ steps[0][0].transpose(-1, -2)).float() * scale
    rows = rows.masked_fill(~mask, -torch.inf)
    own = (
        torch.stack([(query * key).sum(-1, dtype=torch.float32) for key, _ in steps[1:]], -1)
        * scale
    )
    weights = torch.softmax(torch.cat([rows, own], -1), -1).to(query.dtype)
    count = rows.shape[-1]
    mixed = weights[..., :count] @ steps[0][1]
    for index, (_, value) in enumerate(steps[1:]):
        mixed = mixed + weights[..., count + index, None] * value
    return mixed


class Mlp(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        return cast(Tensor, self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x)))


class Block(nn.Module):
    """A Llama decoder layer. `normed`: with a norm before its attention, which the first layer of
    most heads lacks."""

    def __init__(self, shape: HeadShape, index: int, *, normed: bool | None = None) -> None:
        super().__init__()
        self.index = index
        normed = index > 0 if normed is None else normed
        self.input_layernorm: nn.Module | None = (
            Norm(shape.hidden, shape.norm_eps) if normed else None
        )
        self.self_attn = Attention(shape, shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.add_mlp(shape)

    def add_mlp(self, shape: Any) -> None:
        """Add the MLP, or what replaces it."""
        self.mlp = Mlp(shape.hidden, shape.intermediate)

    def forward(self, x: Tensor, by: Turn, seen: Seen) -> HeadOutput:
        """Return the residual stream after this layer for x [B, n, H]."""
        x = self.attend(x, by, seen)
        return HeadOutput(x + self.mlp(self.post_attention_layernorm(x)))

    def attend(self, x: Tensor, by: Turn, seen: Seen) -> Tensor:
        """Return the residual stream [B, n, H] after the attention."""
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        return x + cast(Tensor, self.self_attn(normed, by, seen, self.index))


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """Return the `size` most frequent ids by counts [V] (of equal ones the lower first),
    ascending."""
    return torch.argsort(counts, descending=True, stable=True)[:size].sort().values


class TrainableDraft(nn.Module, ABC):
    """A head of any kind, with its draft vocabulary."""

    d2t: Tensor
    t2d: Tensor
    reads_taps: ClassVar[bool] = False
    """True if its features are residual streams instead of the last hidden state."""
    own_output: ClassVar[bool] = False  # True if it has its own output head

    def __init__(self, shape: Any) -> None:
        """`shape`: of the kind's own class."""
        super().__init__()
        self.shape: HeadShape = shape
        if self.shape.own_vocabulary < self.shape.vocabulary:
            ids = torch.arange(self.shape.vocabulary)
            self.register_buffer("d2t", torch.zeros(self.shape.own_vocabulary, dtype=torch.int64))
            self.register_buffer("t2d", ids < self.shape.own_vocabulary)

    def turn(self, positions: Tensor) -> Turn:
        """Return the rotation of these positions in this head."""
        return turn(positions, self.shape.head_dim, self.shape.rope_theta)

    @property
    def known(self) -> Tensor | None:
        """The target's ids of the draft vocabulary, ascending [Vd], one for each logit; None: all
        of them."""
        if self.shape.own_vocabulary == self.shape.vocabulary:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @torch.no_grad()
    def learn_vocabulary(self, known: Tensor) -> None:
        """Set the draft vocabulary to these ids of the target, ascending [Vd]."""
        self.d2t.copy_(known - torch.arange(len(known)))
        self.t2d.zero_()
        self.t2d[known] = True

    def begin_output(self, frozen: Frozen) -> None:
        """Initialise the output head, if it is this head's own, with the target's rows for its
        vocabulary."""

    @abstractmethod
    def begin_with(self, target: TargetParts, stream: float = STREAM) -> int:
        """Initialise a new head from the target where possible, and leave the rest random; return
        how many tensors of the target's layers were copied: none if its norms are not where a
        head's are. `stream`: the root mean square of its last residual streams."""


class TrainableHead(TrainableDraft):
    """A head that drafts level by level: `begin` takes the target's features, every `forward` is
    one step."""

    def begin(self, features: Tensor) -> Tensor:
        """Return the input state of step 0: features [B, n, W] -> [B, n, H]."""
        return features

    @abstractmethod
    def forward(self, embedded: Tensor, state: Tensor, positions: Tensor, seen: Seen) -> HeadOutput:
        """Compute one step: embeddings of the tokens x_{j+1+i} and states [B, n, H], positions j +
        i [B, n]."""

    def output(self, state: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of the logits of states [..., H]: rows [..., H] and a matrix [Vd, H];
        target_head has the target's rows for this head's vocabulary [Vd, H]."""
        return state, target_head

    def logits(self, state: Tensor, target_head: Tensor) -> Tensor:
        """States [..., H] -> logits [..., Vd]."""
        rows, matrix = self.output(state, target_head)
        return functional.linear(rows.to(matrix.dtype), matrix).float()

    @torch.no_grad()
    def begin_with(self, target: TargetParts, stream: float = STREAM) -> int:
        """Initialise a new head. Its state is a feature, the residual stream after the final norm,
        so the copied layers' outputs are scaled as by that norm, and their inputs scaled back: the
        first pass is then roughly the target's last layers applied to the feature."""
        final = target.norm("norm.weight")
        typical = final.square().mean().sqrt()
        self.weigh_fusion(target, typical)
        if not target.is_plain:
            return 0
        parameters, taken = dict(self.named_parameters()), 0
        for name, value in _last_layers(self.shape, target, final, float(typical), stream):
            if name in parameters and parameters[name].shape == value.shape:
                parameters[name].copy_(value)
                taken += 1
        return taken

    def weigh_fusion(self, target: TargetParts, typical: Tensor) -> None:
        """Initialise the fusion so that feature and embedding have equal weight; `typical`: the
        size of a feature's numbers."""


def _last_layers(
    shape: HeadShape, target: TargetParts, final: Tensor, typical: float, stream: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the target's last layers by their names in the head."""
    depth, blocks = int(target.config["num_hidden_layers"]), shape.blocks
    for block in range(blocks):
        source, goal = f"layers.{depth - blocks + block}.", f"layers.{block}."
        for part in target.parts(source):
            value = target.read(source + part).float()
            if part in WRITES:
                value = value * (final / stream)[:, None]
            elif part in READS and block == 0:  # its input is not normed
                value = value * (target.norm(source + "input_layernorm.weight") / final)
            elif part.endswith("layernorm.weight"):
                value = target.norm(source + part) * typical / final
            yield goal + part, value
