"""EAGLE-3 (Li et al. 2025): residual streams of three layers of the target through one matrix, one
decoder layer over embedding and state side by side, and an output head of its own.

Its tensors come in the names of its own repository, of vLLM and of SpecForge.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import MAX_LAYERS, MAX_ROW, MAX_TAPS
from dovetail.workers.heads.arithmetic import Arithmetic, Product
from dovetail.workers.heads.config import HeadConfig, MisfitError, Read, Width
from dovetail.workers.heads.kind import TrainedKind
from dovetail.workers.heads.parts import (
    Body,
    HeadCheckpoint,
    Inputs,
    Outcome,
    Parts,
    attention_half,
)
from dovetail.workers.heads.spec import (
    FeatureType,
    Group,
    HeadSpec,
    Shape,
    Shapes,
    TargetShape,
    attention_groups,
    common_fields,
    gated_mlp,
    rows_of,
    shared_groups,
)
from dovetail.workers.heads.trainable import (
    READS,
    STREAM,
    Attention,
    HeadShape,
    Mlp,
    Norm,
    Said,
    Seen,
    TrainableHead,
    Turn,
    most_frequent,
)
from dovetail.workers.training.plan import Plan, Recipe
from dovetail.workers.training.run import Pace
from dovetail.workers.training.target_parts import Frozen, TargetParts

LAYER = "midlayer."
Layers = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=MAX_LAYERS)], ...], Field(max_length=MAX_TAPS, strict=False)
]
Outputs = Annotated[
    tuple[Annotated[int, Field(ge=-1, lt=MAX_LAYERS - 1)], ...],
    Field(max_length=MAX_TAPS, strict=False),
]


class NestedConfig(Read):
    """The object `eagle_config` of SGLang, SpecForge and ModelOpt; layers are counted by their
    outputs: one less."""

    use_aux_hidden_state: bool = True
    eagle_aux_hidden_state_layer_ids: Outputs = ()
    aux_hidden_state_layer_ids: Outputs = ()


class Eagle3Config(HeadConfig):
    """Keys of its config.json."""

    target_hidden_size: Width | None = None
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    eagle_aux_hidden_state_layer_ids: Layers = ()
    """vLLM's: the layers whose incoming stream is read; () also stands for the usual ones."""
    aux_hidden_state_layer_ids: Layers = ()
    eagle_config: NestedConfig = NestedConfig()


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec(HeadSpec):
    """An EAGLE-3 head."""

    norm_before_residual: bool
    """The residual of its layer is the normed state."""
    norm_output: bool
    """The recurrent state is the one behind the final norm."""
    fc_norm: bool
    """Each tap has a norm of its own before they are fused."""


def _taps(config: Eagle3Config, target: TargetShape) -> tuple[int, ...]:
    """Return the layers whose incoming streams are read: as config.json says, else 2, L // 2 and
    L - 3."""
    nested = config.eagle_config
    if not nested.use_aux_hidden_state:
        return ()
    outputs = nested.eagle_aux_hidden_state_layer_ids or nested.aux_hidden_state_layer_ids
    given = (
        config.eagle_aux_hidden_state_layer_ids
        or config.aux_hidden_state_layer_ids
        or tuple(output + 1 for output in outputs)
    )
    taps = given or (2, target.layers // 2, target.layers - 3)
    if not given and len(set(taps)) < len(taps):
        where = f"{target.name}, which has {target.layers}"
        raise MisfitError(
            f"reads layers {list(taps)} of {where}: name three different ones in "
            "eagle_aux_hidden_state_layer_ids"
        )
    if not all(0 <= tap < target.layers for tap in taps):
        raise MisfitError(
            f"reads layers {list(taps)}, but {target.name} has layers 0 to "
            f"{target.layers - 1}: take the head that was trained for it"
        )
    if len(taps) * target.width > MAX_ROW:
        raise MisfitError(
            f"reads {len(taps)} layers of width {target.width}; {MAX_ROW} numbers are the most "
            "that a row of features may have"
        )
    return taps


def tapped(fc: Product | None, norms: Sequence[Product]) -> Product:
    """Return the fusion of the target's streams: one matrix over all taps side by side, each normed
    first where it has a norm."""

    def fuse(features: Tensor) -> Tensor:
        if norms:
            taps = features.chunk(len(norms), dim=-1)
            features = torch.cat(
                [norm(tap.contiguous()) for norm, tap in zip(norms, taps, strict=True)], dim=-1
            )
        return features if fc is None else fc(features)

    return fuse


class MiddleLayer(nn.Module):
    """The decoder layer as it is trained: attention over [normed embedding, normed state], the
    state as the residual."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.hidden_norm = Norm(shape.hidden, shape.norm_eps)
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape, 2 * shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.mlp = Mlp(shape.hidden, shape.intermediate)

    def forward(self, embedded: Tensor, state: Tensor, by: Turn, seen: Seen) -> Tensor:
        """Return the residual stream behind this layer for embedded, state [B, n, H]."""
        x = state + self.self_attn(
            torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], -1), by, seen, 0
        )
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class Eagle3Head(TrainableHead):
    """The head as it is trained, with an output head over a draft vocabulary."""

    reads_taps = True
    own_output = True

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
        """Choose the draft vocabulary by frequency and begin with the target's rows of it."""
        known = most_frequent(counts, self.shape.own_vocabulary)
        self.lm_head.weight.copy_(frozen.head[known])
        if self.known is not None:
            self.learn_vocabulary(known)
        return float(counts[known].sum() / counts.sum().clamp(min=1))

    @torch.no_grad()
    def begin_with(self, target: TargetParts, stream: float = STREAM) -> int:
        """Begin as the target's last layer behind the highest tap, with the final norm: the state
        is a residual stream, so that the layer is taken over as it is. What it makes of the
        embedding is still random."""
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
            ):  # the head's of that name is the embedding's
                continue
            value = target.read(source + part).float()
            if part in READS:
                goal[:, hidden:] = value
            elif goal.shape == value.shape:
                goal.copy_(value)
            taken += 1
        return taken


class Eagle3(TrainedKind):
    """EAGLE-3 in the formats of its public checkpoints."""

    name = "eagle3"
    config = Eagle3Config
    own_embedding = True
    architecture = "LlamaForCausalLMEagle3"
    """SGLang's name."""
    paper = Plan(
        Pace(rate=5e-5, warm_up=12000, weight_decay=0.0, clip=0.5),
        Recipe(feature=0.0, cross_entropy=1.0, steps=7, noise=0.0),
        batch=2,
        length=2048,
    )
    """EAGLE-3 ds_config.json. Gradients are clipped by norm, not number by number."""
    trainable = Eagle3Head

    def rename(self, plain: str) -> str:
        return re.sub(r"^layers\.0\.", LAYER, plain)

    def read_spec(
        self, config: HeadConfig, shapes: Shapes, target: TargetShape, dtype: FeatureType
    ) -> Eagle3Spec:
        assert isinstance(config, Eagle3Config)
        common = common_fields(
            self.name, config, shapes, target, dtype, mlp="mlp.gate_proj", layer=LAYER
        )
        return Eagle3Spec(
            **common
            | {
                "target_width": config.target_hidden_size or config.hidden_size,
                "taps": _taps(config, target),
                "draft_vocabulary": rows_of(shapes, "lm_head.weight", target.vocabulary_size),
            },
            norm_before_residual=config.norm_before_residual,
            norm_output=config.norm_output,
            fc_norm="fc_norm.0.weight" in shapes,
        )

    def target_width(self, spec: HeadSpec, shapes: Shapes) -> int:
        fc = shapes.get("fc.weight", ())
        return fc[1] // max(1, len(spec.taps)) if len(fc) == 2 else spec.target_width

    def groups(self, spec: HeadSpec, config: HeadConfig) -> list[Group]:
        hidden = spec.hidden
        norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        mapped = spec.draft_vocabulary != spec.vocabulary_size
        return [
            *self.fusion_groups(spec, config),
            *shared_groups(spec),
            Group(
                {
                    f"{name}.weight": (hidden,)
                    for name in (*(LAYER + norm for norm in norms), "norm")
                }
            ),
            *attention_groups(spec, config, LAYER, 2 * hidden),
            gated_mlp(spec, LAYER),
            Group({"d2t": (spec.draft_vocabulary,)}, needed=mapped),
            Group({"t2d": (spec.vocabulary_size,)}, needed=False),
        ]

    def fusion_groups(self, spec: HeadSpec, config: HeadConfig) -> list[Group]:
        assert isinstance(config, Eagle3Config)
        hidden, fused = spec.hidden, spec.taps != () or spec.target_width != spec.hidden
        norms = {f"fc_norm.{i}.weight": (spec.target_width,) for i in range(max(1, len(spec.taps)))}
        return [
            Group({"fc.weight": (hidden, spec.feature_width)}, needed=fused),
            Group({"fc.bias": (hidden,)}, needed=False),
            Group(norms, needed=config.fc_norm),
        ]

    def body(self, checkpoint: HeadCheckpoint, arithmetic: Arithmetic) -> Body:
        parts, spec = Parts(checkpoint, arithmetic), checkpoint.spec
        assert isinstance(spec, Eagle3Spec)
        norms = (
            [parts.norm(f"fc_norm.{i}") for i in range(max(1, len(spec.taps)))]
            if spec.fc_norm
            else []
        )
        fuse = tapped(parts.linear("fc") if parts.tensor("fc.weight") is not None else None, norms)
        attend, norm = attention_half(parts, "midlayer")
        hidden_norm, embedding_norm, final_norm = (
            parts.norm(name)
            for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm")
        )
        gate_up, down = (
            parts.linear("midlayer.mlp.gate_proj", "midlayer.mlp.up_proj"),
            parts.linear("midlayer.mlp.down_proj"),
        )

        def body(inputs: Inputs) -> Outcome:
            states = fuse(inputs.features) if inputs.true else inputs.features
            normed = hidden_norm(states)
            both = torch.cat([embedding_norm(inputs.embedded), normed], dim=-1)
            states = inputs.asked(
                attend(both, normed if spec.norm_before_residual else states, inputs.seen)
            )
            if not len(states):
                return Outcome(states, (states,))
            states = states + down(arithmetic.gated(gate_up(norm(states))))
            final = final_norm(states)
            return Outcome(final if spec.norm_output else states, (final,))

        return body

    def choices(
        self, options: Mapping[str, Any], *, taps: Sequence[int], vocabulary_size: int
    ) -> dict[str, Any]:
        if len(taps) != 3:
            raise UserError(
                "an EAGLE-3 head reads three residual streams of the target, and the features "
                f"have {len(taps)}: write them with --taps auto"
            )
        wanted = options["draft_vocabulary"] or 0
        if wanted > vocabulary_size:
            raise UserError(
                f"--draft-vocabulary {wanted} is more than the target's {vocabulary_size} tokens"
            )
        return {"draft_vocabulary": wanted}

    def fields(self, shape: HeadShape, taps: Shape) -> dict[str, Any]:
        return {
            "draft_vocab_size": shape.own_vocabulary,
            "eagle_aux_hidden_state_layer_ids": list(taps),
        }

    def shape_words(self, shape: HeadShape) -> list[str]:
        return [f"{shape.own_vocabulary:,} of {shape.vocabulary:,} tokens"]


EAGLE3 = Eagle3()
