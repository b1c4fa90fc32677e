"""Block drafters in training: decoder layers over blocks of a root and the mask tokens after it,
which attend to rows made of the target's residual streams. These modules are the slow oracle of
`workers/heads/block`."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dovetail.workers.training.heads.trainable import (
    STREAM,
    Attention,
    HeadShape,
    Mlp,
    Norm,
    TrainableDraft,
    Turn,
)
from dovetail.workers.training.target_parts import TargetParts


@dataclass(frozen=True, kw_only=True)
class BlockShape(HeadShape):
    """The shape of a DFlash drafter."""

    taps: int  # how many residual streams of the target it reads, concatenated
    block_size: int = 8  # rows of a block, the root's included
    anchored: bool = False  # True if the root's own row predicts
    rank: int = 0  # of DSpark's Markov head; 0: there is none

    @property
    def mask_token(self) -> int:
        """The token of the rows after the root: the last id, which is reserved or rare."""
        return self.vocabulary - 1

    @property
    def levels(self) -> int:
        """How many positions a pass predicts."""
        return self.block_size - (0 if self.anchored else 1)


class BlockLayer(nn.Module):
    """The trainable decoder layer."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape, shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.mlp = Mlp(shape.hidden, shape.intermediate)

    def forward(self, x: Tensor, context: Tensor, by: Turn, by_all: Turn, mask: Tensor) -> Tensor:
        """Return the states [B, R, H] of the rows of blocks after this layer; context [B, n, H],
        rotations of the rows and of context and rows, mask [B, 1, R, n + R]."""
        rows, attention = self.input_layernorm(x).to(x.dtype), self.self_attn
        keys, values = attention.memory(torch.cat([context, rows], 1), by_all)
        mixed = functional.scaled_dot_product_attention(
            attention.queries(rows, by), keys, values, attn_mask=mask
        )
        x = x + attention.joined(mixed)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class MarkovHead(nn.Module):
    """DSpark's table of pairs: the product of two of low rank."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(shape.vocabulary, shape.rank)
        self.markov_w2 = nn.Linear(shape.rank, shape.own_vocabulary, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=shape.rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)


class BlockHead(TrainableDraft):
    """The trainable drafter."""

    reads_taps = True
    shape: BlockShape

    def __init__(self, shape: BlockShape) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(shape.taps * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = Norm(shape.hidden, shape.norm_eps)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(shape.blocks))
        self.norm = Norm(shape.hidden, shape.norm_eps)
        self.markov_head = MarkovHead(shape) if shape.rank else None

    def forward(
        self, embedded: Tensor, features: Tensor, positions: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """Return the normed states [B, R, H] of the rows of blocks, from their embeddings
        [B, R, H], the features [B, n, W] and the positions of features [B, n] and rows [B, R];
        mask bool [B, 1, R, n + R]."""
        context = self.hidden_norm(self.fc(features))
        by, by_all = self.turn(positions[1]), self.turn(torch.cat(positions, 1))
        x = embedded
        for layer in self.layers:
            x = layer(x, context, by, by_all, mask)
        return cast(Tensor, self.norm(x))

    def output(self, state: Tensor, previous: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of the logits of states [N, H] after the tokens `previous` [N]: rows
        [N, ...] and a matrix [Vd, ...]; target_head [Vd, H]."""
        if self.markov_head is None:
            return state, target_head
        before = self.markov_head.markov_w1(previous).to(state.dtype)
        after = self.markov_head.markov_w2.weight
        return torch.cat([state, before], -1), torch.cat([target_head.to(after.dtype), after], 1)

    @torch.no_grad()
    def begin_with(self, target: TargetParts, stream: float = STREAM) -> int:
        """Initialise the layers with the target's last ones, and the fusion with its last tap."""
        hidden, depth = self.shape.hidden, int(target.config["num_hidden_layers"])
        self.fc.weight.zero_()[:, -hidden:] = torch.eye(hidden)
        self.norm.weight.copy_(target.norm("norm.weight"))
        if not target.is_plain:
            return 0
        parameters, taken = dict(self.layers.named_parameters()), 0
        for block in range(self.shape.blocks):
            source = f"layers.{depth - self.shape.blocks + block}."
            for part in target.parts(source):
                goal, value = parameters.get(f"{block}.{part}"), target.read(source + part).float()
                if goal is not None and goal.shape == value.shape:
                    is_norm = part.endswith("norm.weight")
                    goal.copy_(target.norm(source + part) if is_norm else value)
                    taken += 1
        self.hidden_norm.weight.copy_(parameters["0.input_layernorm.weight"])
        return taken
