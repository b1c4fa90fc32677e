"""EAGLE-3 in training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import UserError
from dovetail.workers.heads.spec import Shape
from dovetail.workers.training.heads.recipe import HeadRecipe
from dovetail.workers.training.heads.trainable import (
    READS,
    STREAM,
    Attention,
    HeadOutput,
    HeadShape,
    Mlp,
    Norm,
    Seen,
    TrainableHead,
    Turn,
)
from dovetail.workers.training.plan import Plan, Recipe
from dovetail.workers.training.run import Pace
from dovetail.workers.training.target_parts import Frozen, TargetParts


@dataclass(frozen=True)
class Eagle3Shape(HeadShape):
    """The shape of an EAGLE-3 head."""

    taps: int = 3  # how many residual streams of the target it reads, concatenated


class MiddleLayer(nn.Module):
    """The trainable decoder layer: attention over [normed embedding, normed state], with the state
    as the residual."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.hidden_norm = Norm(shape.hidden, shape.norm_eps)
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape, 2 * shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.mlp = Mlp(shape.hidden, shape.intermediate)

    def forward(self, embedded: Tensor, state: Tensor, by: Turn, seen: Seen) -> Tensor:
        """Return the residual stream after this layer for embedded, state [B, n, H]."""
        x = state + self.self_attn(
            torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], -1), by, seen, 0
        )
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class Eagle3Head(TrainableHead):
    """The trainable head, with an output head over a draft vocabulary."""

    reads_taps = True
    own_output = True

    shape: Eagle3Shape

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__(shape)
        self.fc_norm = nn.ModuleList(Norm(shape.hidden, shape.norm_eps) for _ in range(shape.taps))
        self.fc = nn.Linear(shape.taps * shape.hidden, shape.hidden, bias=False)
        self.midlayer = MiddleLayer(shape)
        self.norm = Norm(shape.hidden, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.own_vocabulary, bias=False)

    def begin(self, features: Tensor) -> Tensor:
        taps = features.chunk(len(self.fc_norm), -1)
        normed = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
        return cast(Tensor, self.fc(torch.cat(normed, -1)))

    def forward(self, embedded: Tensor, state: Tensor, positions: Tensor, seen: Seen) -> HeadOutput:
        return HeadOutput(self.midlayer(embedded, state, self.turn(positions), seen))

    def output(self, state: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(state), self.lm_head.weight

    @torch.no_grad()
    def begin_output(self, frozen: Frozen) -> None:
        self.lm_head.weight.copy_(frozen.head)

    @torch.no_grad()
    def begin_with(self, target: TargetParts, stream: float = STREAM) -> int:
        """Begin as the target's last layer after the highest tap, with the final norm: the state
        is a residual stream, so the layer is copied as it is. The weights for the embedding stay
        random, and so does the layer if the target's norms are placed differently. Since taps are
        normed, the fusion begins with `stream`, the root mean square of a residual stream."""
        final = target.norm("norm.weight")
        hidden, source = self.shape.hidden, f"layers.{int(target.config['num_hidden_layers']) - 1}."
        self.fc.weight.zero_()[:, -hidden:] = stream * torch.eye(hidden)
        self.norm.weight.copy_(final)
        if not target.is_plain:
            return 0
        parameters, taken = dict(self.midlayer.named_parameters()), 1
        parameters["hidden_norm.weight"].copy_(target.norm(source + "input_layernorm.weight"))
        for part in target.parts(source):
            goal = parameters.get(part)
            if (
                goal is None or part == "input_layernorm.weight"
            ):  # that name is the embedding's norm in the head
                continue
            is_norm = part.endswith("layernorm.weight")
            value = target.norm(source + part) if is_norm else target.read(source + part).float()
            if part in READS:
                goal[:, hidden:] = value
            elif goal.shape == value.shape:
                goal.copy_(value)
            taken += 1
        return taken


class Eagle3Recipe(HeadRecipe):
    """EAGLE-3 ds_config.json. Gradients are clipped by norm rather than by value."""

    architecture = "LlamaForCausalLMEagle3"  # SGLang's name
    paper = Plan(
        Pace(rate=5e-5, warm_up=12000, weight_decay=0.0, clip=0.5),
        Recipe(feature=0.0, cross_entropy=1.0, steps=7, noise=0.0),
        batch=2,
        length=2048,
    )
    trainable, shape = Eagle3Head, Eagle3Shape

    def choices(self, options: Mapping[str, Any], *, taps: Sequence[int]) -> dict[str, Any]:
        if len(taps) != 3:
            raise UserError(
                "an EAGLE-3 head reads three residual streams of the target, but the features "
                f"have {len(taps)}: write them with --taps auto"
            )
        return dict(options)

    def fields(self, shape: Eagle3Shape, taps: Shape) -> dict[str, Any]:
        return {
            "fc_norm": True,
            "eagle_aux_hidden_state_layer_ids": list(taps),
        }
