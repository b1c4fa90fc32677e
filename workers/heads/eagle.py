"""EAGLE-1/2 (Li et al. 2024): embedding and last hidden state side by side through one matrix, then
one decoder layer."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from dovetail.workers.heads.arithmetic import Arithmetic
from dovetail.workers.heads.config import HeadConfig
from dovetail.workers.heads.kind import TrainedKind
from dovetail.workers.heads.parts import Body, HeadCheckpoint, Parts, layered
from dovetail.workers.heads.spec import (
    FeatureType,
    HeadSpec,
    Shape,
    Shapes,
    TargetShape,
    common_fields,
)
from dovetail.workers.heads.trainable import Block, HeadShape, Said, Seen, TrainableHead
from dovetail.workers.training.plan import Plan, Recipe
from dovetail.workers.training.run import Pace
from dovetail.workers.training.target_parts import TargetParts


class EagleHead(TrainableHead):
    """The head as it is trained."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=shape.bias)
        self.layers = nn.ModuleList([self.block(shape)])

    def block(self, shape: HeadShape) -> Block:
        """Return the decoder layer."""
        return Block(shape, 0)

    def forward(self, embedded: Tensor, state: Tensor, positions: Tensor, seen: Seen) -> Said:
        return cast(
            Said,
            self.layers[0](self.fc(torch.cat([embedded, state], -1)), self.turn(positions), seen),
        )

    def weigh_fusion(self, target: TargetParts, typical: Tensor) -> None:
        """An embedding that is small beside the feature would be learned last."""
        embedding = target.frozen.embedding.float().square().mean().sqrt()
        self.fc.weight[:, : self.shape.hidden] *= typical / embedding


class Eagle(TrainedKind):
    """EAGLE-1/2 in the format of its public checkpoints."""

    name = "eagle"
    architecture = "LlamaForCausalLMEagle"
    """SGLang's name."""
    paper = Plan(
        Pace(rate=3e-5, warm_up=2000, weight_decay=0.01, clip=0.5), Recipe(), batch=4, length=2048
    )
    """EAGLE main.py. Gradients are clipped by norm, not number by number."""
    trainable = EagleHead

    def read_spec(
        self, config: HeadConfig, shapes: Shapes, target: TargetShape, dtype: FeatureType
    ) -> HeadSpec:
        return HeadSpec(
            **common_fields(self.name, config, shapes, target, dtype, mlp="mlp.gate_proj")
        )

    def body(self, checkpoint: HeadCheckpoint, arithmetic: Arithmetic) -> Body:
        parts = Parts(checkpoint, arithmetic)
        weights = parts.layer_weights("layers.0", 0, mlp=True)
        return layered(parts.concatenation(), [arithmetic.layer(weights)])

    def fields(self, shape: HeadShape, taps: Shape) -> dict[str, Any]:
        return {"bias": shape.bias, "qkv_bias": False}


EAGLE = Eagle()
