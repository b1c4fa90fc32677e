"""Dovetail (section 3.2 of its paper): a gated fusion (DGF) of embedding and feature, then one to
six decoder layers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dovetail.workers.heads.arithmetic import Arithmetic, Product
from dovetail.workers.heads.config import HeadConfig
from dovetail.workers.heads.kind import TrainedKind
from dovetail.workers.heads.parts import Body, Fusion, HeadCheckpoint, Parts, layered
from dovetail.workers.heads.spec import (
    FeatureType,
    Group,
    HeadSpec,
    Shape,
    Shapes,
    TargetShape,
    common_fields,
)
from dovetail.workers.heads.trainable import Block, HeadShape, Norm, Said, Seen, TrainableHead
from dovetail.workers.training.plan import Plan, Recipe
from dovetail.workers.training.run import Pace
from dovetail.workers.training.target_parts import TargetParts


class DovetailConfig(HeadConfig):
    """Keys of its config.json; the paper says nothing of the SiLU and the norm on the embedding,
    and its weights need them."""

    dgf_silu: bool = True
    dgf_embed_norm: bool = True


@dataclass(frozen=True, kw_only=True)
class DovetailSpec(HeadSpec):
    """A Dovetail head."""

    dgf_silu: bool
    dgf_embed_norm: bool


def gated(
    *, norm: Product | None, feature: Product, embedding: Product, gate: Product, activated: bool
) -> Fusion:
    """Return the dynamic gating fusion: z h1 + (1 - z) h2 of the feature's h1 and the embedding's
    h2, z = sigmoid of a matrix over both.

    `norm` and `activated` (SiLU on h2) are not in the paper (section 3.2), but its weights are made
    for them.
    """

    def fuse(embedded: Tensor, features: Tensor) -> Tensor:
        first, second = feature(features), embedding(embedded if norm is None else norm(embedded))
        if activated:
            second = functional.silu(second)
        return torch.lerp(second, first, torch.sigmoid(gate(torch.cat([first, second], dim=-1))))

    return fuse


class DovetailHead(TrainableHead):
    """The head as it is trained; the matrices of its fusion are stored [in, out]."""

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
        """Return z h1 + (1 - z) h2, h1 from the feature and h2 from the embedding."""
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

    def weigh_fusion(self, target: TargetParts, typical: Tensor) -> None:
        """The gate is open half, so that twice the feature is the feature."""
        self.W_1.copy_(2 * torch.eye(self.shape.hidden))
        self.W_z.zero_()


class Dovetail(TrainedKind):
    """Dovetail in the format of its public checkpoints."""

    name = "dovetail"
    config = DovetailConfig
    architecture = "LlamaForCausalLMDovetail"
    """Nobody's name yet."""
    paper = Plan(
        Pace(rate=3e-5, warm_up=2000, weight_decay=0.01, clip=0.5), Recipe(), batch=4, length=2048
    )
    """Dovetail main.py. Gradients are clipped by norm, not number by number."""
    trainable = DovetailHead

    def read_spec(
        self, config: HeadConfig, shapes: Shapes, target: TargetShape, dtype: FeatureType
    ) -> DovetailSpec:
        assert isinstance(config, DovetailConfig)
        return DovetailSpec(
            **common_fields(self.name, config, shapes, target, dtype, mlp="mlp.gate_proj"),
            blocks=config.num_hidden_layers,
            dgf_silu=config.dgf_silu,
            dgf_embed_norm=config.dgf_embed_norm,
        )

    def fusion_groups(self, spec: HeadSpec, config: HeadConfig) -> list[Group]:
        assert isinstance(spec, DovetailSpec)
        hidden = spec.hidden
        norm = Group({"input_layernorm.weight": (hidden,)}, needed=spec.dgf_embed_norm)
        return [
            Group({"W_1": (hidden, hidden), "W_2": (hidden, hidden), "W_z": (2 * hidden, hidden)}),
            norm,
        ]

    def body(self, checkpoint: HeadCheckpoint, arithmetic: Arithmetic) -> Body:
        parts, spec = Parts(checkpoint, arithmetic), checkpoint.spec
        assert isinstance(spec, DovetailSpec)
        fuse = gated(
            norm=parts.norm("input_layernorm") if spec.dgf_embed_norm else None,
            feature=parts.transposed("W_1"),
            embedding=parts.transposed("W_2"),
            gate=parts.transposed("W_z"),
            activated=spec.dgf_silu,
        )
        layers = [
            arithmetic.layer(parts.layer_weights(f"layers.{i}", i, mlp=True))
            for i in range(spec.blocks)
        ]
        return layered(fuse, layers)

    def fields(self, shape: HeadShape, taps: Shape) -> dict[str, Any]:
        return {"dgf_silu": shape.dgf_silu, "dgf_embed_norm": shape.dgf_embed_norm}


DOVETAIL = Dovetail()
