"""Draft heads as they are trained: plain torch over whole sequences, with the tensor names of the
public checkpoints.

Row j of a pass takes what the target says at position j and token x_{j+1}, stands at position j,
and predicts x_{j+2}. A pass can be made again on its own output (training-time test, the EAGLE-3
paper): at step i row j takes its own state of step i - 1 and token x_{j+1+i}, stands at position j
+ i, and sees the rows <= j of step 0 and itself at the steps 1..i; so does a chain that is drafted
from row j. These modules are the slow oracle of `workers.models.heads`. They know neither losses
nor data, and the target's embedding and output head are not theirs.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

Kind = Literal["eagle", "eagle3", "dovetail", "jakiro"]
KINDS: tuple[Kind, ...] = ("eagle", "eagle3", "dovetail", "jakiro")
Turn = tuple[Tensor, Tensor]
"""Cosines and sines [B, 1, n, head_dim]."""


@dataclass(frozen=True)
class HeadShape:
    """What there is to know of a head before it is built; all widths are numbers of one row."""

    kind: Kind
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    """Of the target, V."""
    draft_vocabulary: int = 0
    """EAGLE-3: how many tokens its own output head knows; 0 stands for all."""
    taps: int = 3
    """EAGLE-3: how many residual streams of the target it reads, side by side."""
    blocks: int = 1
    experts: int = 2
    contrast: bool = True
    dgf_silu: bool = True
    dgf_embed_norm: bool = True
    bias: bool = True
    """EAGLE-1/2 and Jakiro: whether `fc` has a bias."""
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    context: int = 2048
    """Positions that it is trained for."""

    @property
    def own_vocabulary(self) -> int:
        """The rows of the logits that this head gives, Vd."""
        return self.draft_vocabulary or self.vocabulary

    @property
    def reads_taps(self) -> bool:
        """Whether the features are residual streams instead of the last hidden state."""
        return self.kind == "eagle3"


@dataclass
class Seen:
    """What the rows of one batch may look at, and the keys and values of the steps made so far:
    `kept[layer][step]`, each [B, heads, n, head_dim]."""

    mask: Tensor
    """bool [B, 1, n, n]: which rows of step 0 a row sees."""
    kept: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)

    def of(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """The steps of one layer, oldest first."""
        while len(self.kept) <= layer:
            self.kept.append([])
        return self.kept[layer]


@dataclass(frozen=True)
class Said:
    """What a pass gives: the recurrent state [B, n, H], and with Jakiro's contrast the state that
    predicts one token further."""

    state: Tensor
    contrast: Tensor | None = None


def mask_of(document: Tensor) -> Tensor:
    """bool [B, 1, n, n]: causal within the documents of a packed row (`document` [B, n], -1 for
    padding; padding sees padding, so that no row is empty)."""
    causal = torch.ones(
        document.shape[1], document.shape[1], dtype=torch.bool, device=document.device
    ).tril()
    return (causal & (document[:, :, None] == document[:, None, :]))[:, None]


def turn(positions: Tensor, head_dim: int, theta: float) -> Turn:
    """The rotation of positions [B, n] in Llama's layout (the two halves of a head turn
    together)."""
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[:, None, :, None].float() / theta**steps
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _turned(x: Tensor, by: Turn) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * by[0] + torch.cat([-second, first], -1) * by[1]


class Norm(nn.Module):
    """RMSNorm, in 32 bits whatever comes in."""

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
        self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, by: Turn, seen: Seen, layer: int) -> Tensor:
        """x [B, n, width] -> [B, n, H]; its keys and values become the newest step of this
        layer."""
        query, key, value = (self._split(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        query, key = _turned(query, by).to(value.dtype), _turned(key, by).to(value.dtype)
        steps = seen.of(layer)
        steps.append((self._repeat(key), self._repeat(value)))
        mixed = (
            first_attention(query, *steps[0], seen.mask)
            if len(steps) == 1
            else later_attention(query, steps, seen.mask)
        )
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
    """Attention of a later step: over the rows of step 0 that the mask shows, and over the row's
    own keys of every later step up to this one."""
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


class Experts(nn.Module):
    """Jakiro's mixture: the two best experts weighted by the router, and their difference weighted
    by two more rows of the gate (the contrast).

    With two experts both run, and the contrast rows belong to expert 0 and 1. With more, the
    router's two first choices run, its softmax is taken over these two, and the contrast rows
    belong to its first and its second choice.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.count, self.contrast = shape.experts, shape.contrast
        self.gate = nn.Linear(
            shape.hidden, shape.experts + (2 if shape.contrast else 0), bias=False
        )
        self.experts = nn.ModuleList(
            Mlp(shape.hidden, shape.intermediate) for _ in range(shape.experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [B, n, H] -> the mixture and the contrast, each [B, n, H] without the residual."""
        gate = self.gate(x).float()
        outputs = torch.stack([expert(x) for expert in self.experts], -2)
        router = gate[..., : self.count]
        if self.count > 2:
            chosen = torch.argsort(router, dim=-1, descending=True, stable=True)[..., :2]
            outputs = outputs.gather(-2, chosen[..., None].expand(*chosen.shape, x.shape[-1]))
            router = router.gather(-1, chosen)
        mixed = (torch.softmax(router, -1)[..., None] * outputs).sum(-2)
        if not self.contrast:
            return mixed, None
        weights = torch.softmax(gate[..., self.count :], -1)
        sign = torch.where(weights[..., :1] >= weights[..., 1:], 1.0, -1.0) * torch.tensor(
            [1.0, -1.0], device=x.device
        )
        return mixed, ((weights * sign)[..., None] * outputs).sum(-2)


class Block(nn.Module):
    """A Llama decoder layer; the first of a head has no norm before its attention, and Jakiro's has
    experts."""

    def __init__(self, shape: HeadShape, index: int) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm: nn.Module | None = (
            Norm(shape.hidden, shape.norm_eps) if index else None
        )
        self.self_attn = Attention(shape, shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        if shape.kind == "jakiro":
            self.mlp_moe = Experts(shape)
        else:
            self.mlp = Mlp(shape.hidden, shape.intermediate)

    def forward(self, x: Tensor, by: Turn, seen: Seen) -> Said:
        """x [B, n, H] -> the residual stream behind this layer."""
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self.self_attn(normed, by, seen, self.index)
        normed = self.post_attention_layernorm(x)
        if hasattr(self, "mlp"):
            return Said(x + self.mlp(normed))
        mixed, contrast = self.mlp_moe(normed)
        return Said(x + mixed, None if contrast is None else x + contrast)


class Head(nn.Module, ABC):
    """A head of any kind: `begin` takes the target's features, every `forward` is one step."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape

    def begin(self, features: Tensor) -> Tensor:
        """The state that step 0 takes: features [B, n, W] -> [B, n, H]."""
        return features

    @abstractmethod
    def forward(self, embedded: Tensor, state: Tensor, positions: Tensor, seen: Seen) -> Said:
        """One step: embeddings of the tokens x_{j+1+i} and states [B, n, H], positions j + i [B,
        n]."""

    def output(self, state: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor]:
        """What is multiplied for the logits of states [..., H]: rows [..., H] and a matrix [Vd, H];
        target_head is the target's own [V, H]."""
        return state, target_head

    def logits(self, state: Tensor, target_head: Tensor) -> Tensor:
        """States [..., H] -> logits [..., Vd]."""
        return functional.linear(*self.output(state, target_head))

    def turn(self, positions: Tensor) -> Turn:
        """The rotation of these positions in this head."""
        return turn(positions, self.shape.head_dim, self.shape.rope_theta)


class EagleHead(Head):
    """EAGLE-1/2, and with experts in its layer Jakiro: embedding and feature side by side through
    `fc`, then one decoder layer."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=shape.bias)
        self.layers = nn.ModuleList([Block(shape, 0)])

    def forward(self, embedded: Tensor, state: Tensor, positions: Tensor, seen: Seen) -> Said:
        return cast(
            Said,
            self.layers[0](self.fc(torch.cat([embedded, state], -1)), self.turn(positions), seen),
        )


class JakiroHead(EagleHead):
    """Jakiro: EAGLE's head whose layer has experts (`HeadShape.kind` decides)."""


class DovetailHead(Head):
    """Dovetail: the gated fusion (DGF) of embedding and feature, then one to six decoder layers.
    Its matrices are stored [in, out]."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.W_1 = nn.Parameter(torch.empty(shape.hidden, shape.hidden))
        self.W_2 = nn.Parameter(torch.empty(shape.hidden, shape.hidden))
        self.W_z = nn.Parameter(torch.empty(2 * shape.hidden, shape.hidden))
        for matrix in (self.W_1, self.W_2, self.W_z):
            nn.init.xavier_uniform_(matrix)
        self.layers = nn.ModuleList(Block(shape, index) for index in range(shape.blocks))

    def fuse(self, embedded: Tensor, state: Tensor) -> Tensor:
        """z h1 + (1 - z) h2, h1 from the feature and h2 from the embedding (Dovetail, section
        3.2)."""
        embedded = self.input_layernorm(embedded) if self.shape.dgf_embed_norm else embedded
        first, second = state @ self.W_1, embedded @ self.W_2
        second = functional.silu(second) if self.shape.dgf_silu else second
        gate = torch.sigmoid(torch.cat([first, second], -1) @ self.W_z)
        return gate * first + (1 - gate) * second

    def forward(self, embedded: Tensor, state: Tensor, positions: Tensor, seen: Seen) -> Said:
        by, said = self.turn(positions), Said(self.fuse(embedded, state))
        for layer in self.layers:
            said = layer(said.state, by, seen)
        return said


class MiddleLayer(nn.Module):
    """EAGLE-3's layer: attention over [normed embedding, normed state], the state as the
    residual."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.hidden_norm = Norm(shape.hidden, shape.norm_eps)
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape, 2 * shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.mlp = Mlp(shape.hidden, shape.intermediate)

    def forward(self, embedded: Tensor, state: Tensor, by: Turn, seen: Seen) -> Tensor:
        """embedded, state [B, n, H] -> [B, n, H]."""
        x = state + self.self_attn(
            torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], -1), by, seen, 0
        )
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class Eagle3Head(Head):
    """EAGLE-3: three residual streams of the target through `fc`, one layer, an output head of its
    own over a draft vocabulary."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(shape.taps * shape.hidden, shape.hidden, bias=False)
        self.midlayer = MiddleLayer(shape)
        self.norm = Norm(shape.hidden, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.own_vocabulary, bias=False)
        if shape.own_vocabulary < shape.vocabulary:
            self.register_buffer("d2t", torch.zeros(shape.own_vocabulary, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(shape.vocabulary) < shape.own_vocabulary)

    def begin(self, features: Tensor) -> Tensor:
        return cast(Tensor, self.fc(features))

    def forward(self, embedded: Tensor, state: Tensor, positions: Tensor, seen: Seen) -> Said:
        return Said(self.midlayer(embedded, state, self.turn(positions), seen))

    def output(self, state: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(state), self.lm_head.weight

    @property
    def known(self) -> Tensor | None:
        """The target's ids of the draft vocabulary, ascending [Vd]; None: all of them."""
        if self.shape.own_vocabulary == self.shape.vocabulary:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @torch.no_grad()
    def learn_vocabulary(self, known: Tensor) -> None:
        """Set the draft vocabulary to these ids of the target, ascending [Vd]."""
        self.d2t.copy_(known - torch.arange(len(known)))
        self.t2d.zero_()
        self.t2d[known] = True


def own_ids(head: Head) -> Tensor | None:
    """The target's ids that the columns of a head's logits stand for [Vd]; None: column v is token
    v."""
    return head.known if isinstance(head, Eagle3Head) else None


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """The `size` ids that occur most often (of equal ones the lower first), ascending; counts
    [V]."""
    return torch.argsort(counts, descending=True, stable=True)[:size].sort().values


def new_head(shape: HeadShape, *, seed: int) -> Head:
    """A head of that shape with random weights."""
    torch.manual_seed(seed)
    classes: dict[Kind, type[Head]] = {
        "eagle": EagleHead,
        "eagle3": Eagle3Head,
        "dovetail": DovetailHead,
        "jakiro": JakiroHead,
    }
    return classes[shape.kind](shape)
