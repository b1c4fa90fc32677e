"""Jakiro and Jakiro*: EAGLE's head with a mixture of experts in the place of its layer's MLP, two
experts for each row, weighted by a router.

Jakiro (no star) also subtracts them (the contrast), which predicts one token further; Jakiro* lets
each of the two predict for itself, and what is drafted follows the exact mixture of their
distributions. With more than two experts the router's two first choices count, as in Mixtral, and
everything else is what it is with two. All experts lie side by side as one wide MLP whose middle is
weighted expert by expert, so that any number of them costs two matrices.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from dovetail.workers.heads.arithmetic import Arithmetic, Product
from dovetail.workers.heads.config import HeadConfig
from dovetail.workers.heads.eagle import EagleHead
from dovetail.workers.heads.kind import HeadKind, TrainedKind
from dovetail.workers.heads.parts import (
    Body,
    HeadCheckpoint,
    Inputs,
    Outcome,
    Parts,
    attention_half,
)
from dovetail.workers.heads.spec import (
    EXPERTS,
    FeatureType,
    Group,
    HeadSpec,
    Shape,
    Shapes,
    TargetShape,
    common_fields,
    gated_shapes,
    rows_of,
)
from dovetail.workers.heads.trainable import Block, HeadShape, Mlp, Said, Seen, Turn
from dovetail.workers.training.plan import Plan, Recipe
from dovetail.workers.training.run import Pace


@dataclass(frozen=True, kw_only=True)
class JakiroSpec(HeadSpec):
    """A Jakiro head."""

    experts: int


@dataclass(frozen=True)
class Choice:
    """The experts that the gate chooses for each row."""

    shares: Tensor
    """[R, E]: shares of the experts in the mixture; 0 for all but two."""
    contrast: Tensor | None
    """[R, E]: shares in the contrast; the weaker of the two by the gate's last two rows is
    negative."""
    first: Tensor
    """int64 [R, 1]: the expert with the larger share."""
    second: Tensor


def choose(gate: Tensor, experts: int, *, contrast: bool) -> Choice:
    """Return the choice of a gate [R, E], or with contrast [R, E + 2], as it comes from its matrix.

    The two contrast rows belong to experts 0 and 1 where there are no more, else to the router's
    first and second choice.
    """
    router = gate[:, :experts].float()
    order = router.argsort(dim=-1, descending=True, stable=True)[:, :2]
    shares = torch.zeros_like(router).scatter(1, order, router.gather(1, order).softmax(dim=-1))
    signed = None
    if contrast:
        weights = gate[:, experts:].float().softmax(dim=-1)
        signs = (weights >= weights.flip(-1)) * 2.0 - 1.0
        signs[:, 1] = -signs[:, 0]  # of equal ones the first counts as the larger
        owners = order if experts > 2 else torch.arange(2, device=gate.device).expand_as(order)
        signed = torch.zeros_like(router).scatter(1, owners, weights * signs)
    return Choice(shares, signed, order[:, :1], order[:, 1:])


@dataclass(frozen=True)
class Gated:
    """Jakiro's experts, which are gated MLPs."""

    count: int
    contrast: bool
    gate: Product
    gate_up: Product
    """[T, H] -> [T, 2 E I]: the gates of all experts, then their ups."""
    gated: Product
    down: Product
    """[T, E I] -> [T, H]."""

    def __call__(self, x: Tensor, *, contrast: bool) -> tuple[Tensor, Tensor | None]:
        """Return the mixture of x [R, H] and, where asked for, the contrast, each [R, H]."""
        choice = choose(self.gate(x), self.count, contrast=self.contrast)
        middle = self.gated(self.gate_up(x))
        mixed = self.down(_weighted(middle, choice.shares))
        return mixed, self.down(
            _weighted(middle, choice.contrast)
        ) if contrast and choice.contrast is not None else None


@dataclass(frozen=True)
class Branched:
    """Jakiro*'s experts, each two matrices with an exact GELU between them."""

    count: int
    gate: Product
    up: Product
    down: Product

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the first and the second choice add to x [R, H], each [R, H], and the share
        of the first [R, 1]."""
        choice = choose(self.gate(x), self.count, contrast=False)
        middle = gelu(self.up(x))
        single = torch.zeros_like(choice.shares)
        first, second = (
            self.down(_weighted(middle, single.scatter(1, expert, 1.0)))
            for expert in (choice.first, choice.second)
        )
        return first, second, choice.shares.gather(1, choice.first)


def _weighted(middle: Tensor, weights: Tensor) -> Tensor:
    """Return middle [R, E I] times the weight [R, E] of the expert that each number belongs to."""
    rows, experts = weights.shape
    return (middle.view(rows, experts, -1) * weights.unsqueeze(-1).to(middle.dtype)).view(rows, -1)


class Experts(nn.Module):
    """The mixture as it is trained: the two best experts weighted by the router, and their
    difference weighted by two more rows of the gate (the contrast).

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
    """The decoder layer as it is trained."""

    def add_mlp(self, shape: HeadShape) -> None:
        self.mlp_moe = Experts(shape)

    def forward(self, x: Tensor, by: Turn, seen: Seen) -> Said:
        x = self.attend(x, by, seen)
        mixed, contrast = self.mlp_moe(self.post_attention_layernorm(x))
        return Said(x + mixed, None if contrast is None else x + contrast)


class JakiroHead(EagleHead):
    """The head as it is trained."""

    def block(self, shape: HeadShape) -> Block:
        return JakiroBlock(shape, 0)


class _Mixed(HeadKind):
    """The parts that both kinds share."""

    expert: ClassVar[str]
    """The first matrix of an expert, as high as the expert is wide."""

    def read_spec(
        self, config: HeadConfig, shapes: Shapes, target: TargetShape, dtype: FeatureType
    ) -> JakiroSpec:
        names = (name for name in shapes if name.startswith(f"{EXPERTS}.experts."))
        experts = len({name.split(".")[4] for name in names})
        return JakiroSpec(
            **common_fields(
                self.name, config, shapes, target, dtype, mlp=f"mlp_moe.experts.0.{self.expert}"
            ),
            experts=experts,
            contrast=self.has_contrast(shapes, experts),
        )

    def has_contrast(self, shapes: Shapes, experts: int) -> bool:
        """Return whether there are gate rows for the token after the next."""
        return False

    def expert_shapes(self, spec: HeadSpec) -> Shapes:
        """Return the matrices of one expert."""
        return gated_shapes(spec)

    def mlp_group(self, spec: HeadSpec, layer: str) -> Group:
        assert isinstance(spec, JakiroSpec)
        gate = {f"{layer}mlp_moe.gate.weight": (spec.experts + 2 * spec.contrast, spec.hidden)}
        experts = {
            f"{layer}mlp_moe.experts.{i}.{name}": shape
            for i in range(max(2, spec.experts))
            for name, shape in self.expert_shapes(spec).items()
        }
        return Group(gate | experts)


class Jakiro(_Mixed, TrainedKind):
    """Jakiro in the format of its public checkpoints."""

    name = "jakiro"
    expert = "gate_proj"
    architecture = "LlamaForCausalLMJakiro"
    """Nobody's name yet."""
    paper = Plan(
        Pace(rate=9e-5, warm_up=2000, weight_decay=1e-3, clip=0.5, decay="cosine"),
        Recipe(),
        batch=4,
        length=2048,
    )
    """Jakiro main.py. Gradients are clipped by norm, not number by number."""
    trainable = JakiroHead

    def has_contrast(self, shapes: Shapes, experts: int) -> bool:
        return rows_of(shapes, f"{EXPERTS}.gate.weight", experts) > experts

    def body(self, checkpoint: HeadCheckpoint, arithmetic: Arithmetic) -> Body:
        parts, spec, at = Parts(checkpoint, arithmetic), checkpoint.spec, EXPERTS
        assert isinstance(spec, JakiroSpec)
        count = spec.experts
        fuse = parts.concatenation()
        attend, norm = attention_half(parts, "layers.0")
        wide = [f"{at}.experts.{i}.{name}_proj" for name in ("gate", "up") for i in range(count)]
        down = torch.cat(
            [parts.stacked(f"{at}.experts.{i}.down_proj") for i in range(count)], dim=1
        )
        mixture = Gated(
            count,
            spec.contrast,
            parts.exact(f"{at}.gate"),
            parts.linear(*wide),
            arithmetic.gated,
            arithmetic.linear(down),
        )

        def body(inputs: Inputs) -> Outcome:
            states = fuse(inputs.embedded, inputs.features)
            states = inputs.asked(attend(states, states, inputs.seen))
            mixed, contrast = (
                mixture(norm(states), contrast=inputs.contrast)
                if len(states)
                else (states, states if inputs.contrast else None)
            )
            return Outcome(
                states + mixed,
                (states + mixed,),
                contrast=None if contrast is None else states + contrast,
            )

        return body

    def intermediate(self, hidden: int, of_target: int) -> int:
        return hidden

    def fields(self, shape: HeadShape, taps: Shape) -> dict[str, Any]:
        return {
            "bias": shape.bias,
            "qkv_bias": False,
            "num_local_experts": shape.experts,
            "num_experts_per_tok": 2,
        }

    def shape_words(self, shape: HeadShape) -> list[str]:
        return [f"{shape.experts} experts, {'with' if shape.contrast else 'without'} contrast"]

    def loss_words(self, shape: HeadShape, recipe: Recipe) -> list[str]:
        if not shape.contrast:
            return []
        weights = f"{recipe.contrast_feature:g} and {recipe.contrast_cross_entropy:g}"
        return [f"contrast {weights} of these"]


class JakiroStar(_Mixed):
    """Jakiro* in the format of its public checkpoints."""

    name = "jakiro*"
    expert = "fc"
    silu = False

    def expert_shapes(self, spec: HeadSpec) -> Shapes:
        hidden, wide = spec.hidden, spec.intermediate
        return {"fc.weight": (wide, hidden), "proj.weight": (hidden, wide)}

    def body(self, checkpoint: HeadCheckpoint, arithmetic: Arithmetic) -> Body:
        parts, spec, at = Parts(checkpoint, arithmetic), checkpoint.spec, EXPERTS
        assert isinstance(spec, JakiroSpec)
        count = spec.experts
        fuse = parts.concatenation()
        attend, norm = attention_half(parts, "layers.0")
        up = parts.linear(*(f"{at}.experts.{i}.fc" for i in range(count)))
        down = arithmetic.linear(
            torch.cat([parts.stacked(f"{at}.experts.{i}.proj") for i in range(count)], dim=1)
        )
        branches = Branched(count, parts.exact(f"{at}.gate"), up, down)

        def body(inputs: Inputs) -> Outcome:
            states = fuse(inputs.embedded, inputs.features)
            states = inputs.asked(attend(states, states, inputs.seen))
            if not len(states):
                return Outcome(states, (states, states))
            first, second, share = branches(norm(states))
            mixed = states + share.to(first.dtype) * first + (1.0 - share).to(first.dtype) * second
            return Outcome(mixed, (states + first, states + second), share)

        return body


JAKIRO, JAKIRO_STAR = Jakiro(), JakiroStar()
