"""Jakiro in training."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.workers.heads.spec import Shape
from dovetail.workers.training.heads.eagle import EagleHead, EagleShape
from dovetail.workers.training.heads.recipe import HeadRecipe
from dovetail.workers.training.heads.trainable import Block, HeadOutput, Mlp, Seen, Turn
from dovetail.workers.training.plan import Plan, Recipe
from dovetail.workers.training.run import Pace


@dataclass(frozen=True)
class JakiroShape(EagleShape):
    """The shape of a Jakiro head."""

    experts: int = 2
    contrast: bool = True


class Experts(nn.Module):
    """The trainable mixture: the two best experts weighted by the router, and their difference
    weighted by two more rows of the gate (the contrast).

    With two experts both run, and the contrast rows belong to expert 0 and 1. With more, the
    router's two first choices run, its softmax is taken over these two, and the contrast rows
    belong to its first and second choice."""

    def __init__(self, shape: JakiroShape) -> None:
        super().__init__()
        self.count, self.contrast = shape.experts, shape.contrast
        self.gate = nn.Linear(
            shape.hidden, shape.experts + (2 if shape.contrast else 0), bias=False
        )
        self.experts = nn.ModuleList(
            Mlp(shape.hidden, shape.intermediate) for _ in range(shape.experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the mixture of x [B, n, H] and the contrast, each without the residual."""
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


class JakiroBlock(Block):
    """The trainable decoder layer."""

    def add_mlp(self, shape: Any) -> None:
        self.mlp_moe = Experts(shape)

    def forward(self, x: Tensor, by: Turn, seen: Seen) -> HeadOutput:
        x = self.attend(x, by, seen)
        mixed, contrast = self.mlp_moe(self.post_attention_layernorm(x))
        return HeadOutput(x + mixed, None if contrast is None else x + contrast)


class JakiroHead(EagleHead):
    """The trainable head."""

    def block(self, shape: JakiroShape) -> Block:
        return JakiroBlock(shape, 0)


class JakiroRecipe(HeadRecipe):
    """Jakiro main.py. Gradients are clipped by norm rather than by value."""

    architecture = "LlamaForCausalLMJakiro"  # a placeholder name
    paper = Plan(
        Pace(rate=9e-5, warm_up=2000, weight_decay=1e-3, clip=0.5, decay="cosine"),
        Recipe(),
        batch=4,
        length=2048,
    )
    trainable, shape = JakiroHead, JakiroShape

    def intermediate(self, hidden: int, of_target: int) -> int:
        return hidden

    def fields(self, shape: JakiroShape, taps: Shape) -> dict[str, Any]:
        return {
            "bias": shape.bias,
            "qkv_bias": False,
            "num_local_experts": shape.experts,
            "num_experts_per_tok": 2,
        }

    def shape_words(self, shape: JakiroShape) -> list[str]:
        return [f"{shape.experts} experts, {'with' if shape.contrast else 'without'} contrast"]

    def loss_words(self, shape: JakiroShape, recipe: Recipe) -> list[str]:
        if not shape.contrast:
            return []
        weights = f"{recipe.contrast_feature:g} and {recipe.contrast_cross_entropy:g}"
        return [f"contrast {weights} of these"]
