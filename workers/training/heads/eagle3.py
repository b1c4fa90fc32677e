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
    most_frequent,
)
from dovetail.workers.training.plan import Plan, Recipe
from dovetail.workers.training.run import Pace
from dovetail.workers.training.target_parts import Frozen, TargetParts


@dataclass(frozen=True)
class Eagle3Shape(HeadShape):
    """The shape of an EAGLE-3 head."""

    draft_vocabulary: int = 0  # the size of its output head's vocabulary; 0: all tokens
    taps: int = 3  # how many residual streams of the target it reads, concatenated

    @property
    def own_vocabulary(self) -> int:
        return self.draft_vocabulary or self.vocabulary


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
    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: Eagle3Shape) -> None:
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

    def forward(self, embedded: Tensor, state: Tensor, positions: Tensor, seen: Seen) -> HeadOutput:
        return HeadOutput(self.midlayer(embedded, state, self.turn(positions), seen))

    def output(self, state: Tensor, target_head: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(state), self.lm_head.weight

    @property
    def known(self) -> Tensor | None:
        if self.shape.own_vocabulary == self.shape.vocabulary:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @torch.no_grad()
    def learn_vocabulary(self, known: Tensor) -> None:
        """Set the draft vocabulary to these ids of the target, ascending [Vd]."""
        self.d2t.copy_(known - torch.arange(len(known)))
        self.t2d.zero_()
        self.t2d[known] = True

    @torch.no_grad()
    def begin_output(self, frozen: Frozen, counts: Tensor) -> float:
        """Choose the draft vocabulary by frequency, and begin with the target's output rows for
        it."""
        known = most_frequent(counts, self.shape.own_vocabulary)
        self.lm_head.weight.copy_(frozen.head[known])
        if self.known is not None:
            self.learn_vocabulary(known)
        return float(counts[known].sum() / counts.sum().clamp(min=1))

    @torch.no_grad()
    def begin_with(self, target: TargetParts, stream: float = STREAM) -> int:
        """Begin as the target's last layer behind the highest tap, with the final norm: the state
        is a residual stream, so the layer is copied as it is. The weights for the embedding stay
        random."""
        final = target.read("norm.weight").float()
        hidden, source = self.shape.hidden, f"layers.{int(target.config['num_hidden_layers']) - 1}."
        self.fc.weight.zero_()[:, -hidden:] = torch.eye(hidden)
        self.norm.weight.copy_(final)
        parameters, taken = dict(self.midlayer.named_parameters()), 1
        parameters["hidden_norm.weight"].copy_(
            target.read(source + "input_layernorm.weight").float()
        )
        for part in target.parts(source):
            goal = parameters.get(part)
            if (
                goal is None or part == "input_layernorm.weight"
            ):  # that name is the embedding's norm in the head
                continue
            value = target.read(source + part).float()
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

    def choices(
        self, options: Mapping[str, Any], *, taps: Sequence[int], vocabulary_size: int
    ) -> dict[str, Any]:
        if len(taps) != 3:
            raise UserError(
                "an EAGLE-3 head reads three residual streams of the target, but the features "
                f"have {len(taps)}: write them with --taps auto"
            )
        wanted = options["draft_vocabulary"] or 0
        if wanted > vocabulary_size:
            raise UserError(
                f"--draft-vocabulary {wanted} is more than the target's {vocabulary_size} tokens"
            )
        return {"draft_vocabulary": wanted}

    def fields(self, shape: Eagle3Shape, taps: Shape) -> dict[str, Any]:
        return {
            "draft_vocab_size": shape.own_vocabulary,
            "eagle_aux_hidden_state_layer_ids": list(taps),
        }

    def shape_words(self, shape: Eagle3Shape) -> list[str]:
        return [f"{shape.own_vocabulary:,} of {shape.vocabulary:,} tokens"]
