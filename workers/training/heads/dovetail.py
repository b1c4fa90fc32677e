"""Dovetail in training."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dovetail.workers.heads.spec import Shape
from dovetail.workers.training.heads.recipe import EAGLE_PLAN, HeadRecipe
from dovetail.workers.training.heads.trainable import (
    Block,
    HeadOutput,
    HeadShape,
    Norm,
    Seen,
    TrainableHead,
)
from dovetail.workers.training.target_parts import TargetParts


@dataclass(frozen=True)
class DovetailShape(HeadShape):
    """The shape of a Dovetail head."""

    dgf_silu: bool = True
    dgf_embed_norm: bool = True


class DovetailHead(TrainableHead):
    """The trainable head; the matrices of its fusion are stored [in, out]."""

    shape: DovetailShape

    def __init__(self, shape: DovetailShape) -> None:
        super().__init__(shape)
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.W_1 = nn.Parameter(torch.empty(shape.hidden, shape.hidden))
        self.W_2 = nn.Parameter(torch.empty(shape.hidden, shape.hidden))
        self.W_z = nn.Parameter(torch.empty(2 * shape.hidden, shape.hidden))
        for matrix in (self.W_1, self.W_2, self.W_z):
            nn.init.xavier_uniform_(matrix)
        self.layers = nn.ModuleList(Block(shape, index) for index in range(shape.blocks))

    def fuse(self, embedded: Tensor, state: Tensor) -> Tensor:
        """Return z h1 + (1 - z) h2, h1 from the feature and h2 from the embedding."""
        embedded = self.input_layernorm(embedded) if self.shape.dgf_embed_norm else embedded
        first, second = state @ self.W_1, embedded @ self.W_2
        second = functional.silu(second) if self.shape.dgf_silu else second
        gate = torch.sigmoid(torch.cat([first, second], -1) @ self.W_z)
        return gate * first + (1 - gate) * second

    def forward(self, embedded: Tensor, state: Tensor, positions: Tensor, seen: Seen) -> HeadOutput:
        by, found = self.turn(positions), HeadOutput(self.fuse(embedded, state))
        for layer in self.layers:
            found = layer(found.state, by, seen)
        return found

    def weigh_fusion(self, target: TargetParts, typical: Tensor) -> None:
        """Begin with the gate half open, so that twice the feature becomes the feature."""
        self.W_1.copy_(2 * torch.eye(self.shape.hidden))
        self.W_z.zero_()


class DovetailRecipe(HeadRecipe):
    """Dovetail main.py."""

    architecture = "LlamaForCausalLMDovetail"  # a placeholder name
    paper, trainable, shape = EAGLE_PLAN, DovetailHead, DovetailShape

    def fields(self, shape: DovetailShape, taps: Shape) -> dict[str, Any]:
        return {"dgf_silu": shape.dgf_silu, "dgf_embed_norm": shape.dgf_embed_norm}
