"""EAGLE-1/2 in training."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from dovetail.workers.heads.spec import Shape
from dovetail.workers.training.heads.recipe import EAGLE_PLAN, HeadRecipe
from dovetail.workers.training.heads.trainable import (
    Block,
    HeadOutput,
    HeadShape,
    Seen,
    TrainableHead,
)
from dovetail.workers.training.target_parts import TargetParts


@dataclass(frozen=True)
class EagleShape(HeadShape):
    """The shape of an EAGLE-1/2 head."""

    bias: bool = True  # of `fc`


class EagleHead(TrainableHead):
    """The trainable head."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=shape.bias)
        self.layers = nn.ModuleList([self.block(shape)])

    def block(self, shape: Any) -> Block:
        """Return the decoder layer."""
        return Block(shape, 0)

    def forward(self, embedded: Tensor, state: Tensor, positions: Tensor, seen: Seen) -> HeadOutput:
        return cast(
            HeadOutput,
            self.layers[0](self.fc(torch.cat([embedded, state], -1)), self.turn(positions), seen),
        )

    def weigh_fusion(self, target: TargetParts, typical: Tensor) -> None:
        """Scale the embedding's half: if it were small compared with the feature, it would be
        learned last."""
        embedding = target.frozen.embedding.float().square().mean().sqrt()
        self.fc.weight[:, : self.shape.hidden] *= typical / embedding


class EagleRecipe(HeadRecipe):
    """EAGLE main.py."""

    architecture = "LlamaForCausalLMEagle"  # SGLang's name
    paper, trainable, shape = EAGLE_PLAN, EagleHead, EagleShape

    def fields(self, shape: EagleShape, taps: Shape) -> dict[str, Any]:
        return {"bias": shape.bias, "qkv_bias": False}
