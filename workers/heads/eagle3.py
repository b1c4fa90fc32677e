"""EAGLE-3 (Li et al. 2025): one matrix over the residual streams of three target layers, a decoder
layer over the concatenated embedding and state, in some heads further Llama layers, and a separate
output head. EAGLE-3.1 norms the streams first. Reads the names of its repository, vLLM, SpecForge,
speculators and ModelOpt."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from dovetail.workers.heads.config import REMEDY, HeadConfig, MisfitError
from dovetail.workers.heads.kind import GPU, Figures, HeadKind
from dovetail.workers.heads.spec import (
    Group,
    HeadSpec,
    Shapes,
    TargetShape,
    attention_groups,
    gated_mlp,
    rows_of,
    shared_groups,
)
from dovetail.workers.heads.taps import TapsConfig, taps_of

if TYPE_CHECKING:
    from torch import Tensor

    from dovetail.workers.heads.parts import Body, HeadParts, Inputs, Outcome
    from dovetail.workers.models.backends.device.products import Product

LAYER = "midlayer."
LAYERS = re.compile(r"layers\.(\d{1,4})\.")  # the names of the tensors of further layers


class Eagle3Config(TapsConfig):
    """Keys of its config.json."""

    architectures: tuple[str, ...] = Field(default=(), strict=False)
    fc_norm: bool = False
    norm_before_fc: bool | None = None
    norm_before_residual: bool | None = None
    norm_output: bool = False
    transformer_layer_config: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec(HeadSpec):
    """An EAGLE-3 head."""

    norm_before_residual: bool  # the layer's residual is the normed state
    norm_output: bool  # the recurrent state is taken after the final norm
    fc_norm: bool  # each tap is normed before the fusion
    norm_before_fc: bool  # all taps, concatenated, are normed before the fusion


class Eagle3(HeadKind):
    """EAGLE-3 in the formats of its public checkpoints."""

    name, title, spec = "eagle3", "EAGLE-3", Eagle3Spec
    config: ClassVar[type[HeadConfig]] = Eagle3Config
    layer, own_embedding = LAYER, True
    figures: ClassVar[Figures | None] = Figures(
        (6.15,), GPU, "HeteroSpec paper, Table 1: EAGLE-3 with Llama-3.1 8B"
    )

    def recognises(self, shapes: Shapes) -> bool:
        own = {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}
        return not own.isdisjoint(shapes)

    def rename(self, plain: str) -> str:
        return plain.replace("layers.0.", LAYER, 1)

    def fields(self, config: Eagle3Config, shapes: Shapes, target: TargetShape) -> dict[str, Any]:
        taps, fc = taps_of(config, target), shapes.get("fc.weight", ())
        width = fc[1] // max(1, len(taps)) if len(fc) == 2 else config.hidden_size
        flags = (config.norm_before_fc, config.eagle_config.norm_before_fc)
        said = next((flag for flag in flags if flag is not None), "input_norm.weight" in shapes)
        indices = (LAYERS.match(name) for name in shapes)
        return {
            "blocks": max(config.num_hidden_layers, *(1 + int(i[1]) for i in indices if i), 1),
            "target_width": config.target_hidden_size or width,
            "taps": taps,
            "draft_vocabulary": rows_of(shapes, "lm_head.weight", target.vocabulary_size),
            "norm_before_residual": config.norm_before_residual or False,
            "norm_output": config.norm_output,
            "fc_norm": config.fc_norm or "fc_norm.0.weight" in shapes,
            "norm_before_fc": said,
        }

    def check(
        self, spec: HeadSpec, config: HeadConfig, shapes: Shapes, target: TargetShape
    ) -> None:
        assert isinstance(spec, Eagle3Spec)
        assert isinstance(config, Eagle3Config)
        if any(".kv_a_proj_with_mqa." in name for name in shapes):
            named = ", ".join(config.architectures)[:100] or "Eagle3DeepseekV2ForCausalLM"
            raise MisfitError(
                f"is an EAGLE-3 head whose attention is over latents ({named}), which is not "
                "supported; use another draft"
            )
        if spec.fc_norm and spec.norm_before_fc:
            raise MisfitError(
                f"has both fc_norm and norm_before_fc, of which a head has at most one; {REMEDY}"
            )
        super().check(spec, config, shapes, target)

    def notes(self, config: Eagle3Config) -> list[str]:
        if config.norm_before_residual is not None or not config.transformer_layer_config:
            return []
        return [
            "its config.json has no norm_before_residual: false is used, the default of the "
            "speculators library; vLLM uses true"
        ]

    def target_width(self, spec: HeadSpec, shapes: Shapes) -> int:
        fc = shapes.get("fc.weight", ())
        return fc[1] // max(1, len(spec.taps)) if len(fc) == 2 else spec.target_width

    def groups(self, spec: Eagle3Spec, config: Eagle3Config) -> list[Group]:
        hidden, reads = spec.hidden, range(max(1, len(spec.taps)))
        fused = spec.taps != () or spec.target_width != hidden
        return [
            Group({"fc.weight": (hidden, spec.feature_width)}, needed=fused),
            Group({"fc.bias": (hidden,)}, needed=False),
            Group(
                {f"fc_norm.{i}.weight": (spec.target_width,) for i in reads} if spec.fc_norm else {}
            ),
            Group({"input_norm.weight": (spec.feature_width,)} if spec.norm_before_fc else {}),
            *shared_groups(spec),
            Group({"norm.weight": (hidden,)}),
            Group({f"{LAYER}hidden_norm.weight": (hidden,)}),
            *(
                group
                for index in range(spec.blocks)
                for group in _layer_groups(spec, config, f"layers.{index}." if index else LAYER)
            ),
        ]

    def body(self, parts: "HeadParts") -> "Body":
        import torch

        spec = parts.checkpoint.spec
        assert isinstance(spec, Eagle3Spec)
        fuse, final_norm = _tapped(parts, spec), parts.norm("norm")
        hidden_norm, embedding_norm = (
            parts.norm(f"{LAYER}{name}") for name in ("hidden_norm", "input_layernorm")
        )
        first = parts.layer(LAYER, given=2 * spec.hidden)
        others = [parts.layer(f"layers.{i}.", i, normed=True) for i in range(1, spec.blocks)]

        def body(inputs: "Inputs") -> "Outcome":
            states = fuse(inputs.features) if inputs.true else inputs.features
            normed = hidden_norm(states)
            both = torch.cat([embedding_norm(inputs.embedded), normed], dim=-1)
            states = normed if spec.norm_before_residual else states.clone()
            states = first(states, inputs.seen, None if others else inputs.rows, given=both)
            for layer in others:
                states = layer(states, inputs.seen, inputs.rows if layer is others[-1] else None)
            if not len(states):
                return inputs.outcome(states)
            final = final_norm(states)
            return inputs.outcome(final if spec.norm_output else states, final)

        return body


def _layer_groups(spec: Eagle3Spec, config: Eagle3Config, layer: str) -> list[Group]:
    """Return the tensors of a layer: the first reads the concatenated embedding and state."""
    names, width = ("input_layernorm", "post_attention_layernorm"), spec.hidden
    return [
        Group({f"{layer}{norm}.weight": (spec.hidden,) for norm in names}),
        *attention_groups(spec, config, layer, 2 * width if layer == LAYER else width),
        gated_mlp(spec, layer),
    ]


def _tapped(parts: "HeadParts", spec: Eagle3Spec) -> "Product":
    """Return the fusion of the target's streams: one matrix over all taps concatenated, normed
    first, each by its norm or all by one, if there are norms."""
    import torch

    count = max(1, len(spec.taps)) if spec.fc_norm else 0
    norms = [parts.norm(f"fc_norm.{i}") for i in range(count)]
    norms += [parts.norm("input_norm")] if spec.norm_before_fc else []
    fc = parts.linear("fc") if parts.tensor("fc.weight") is not None else None

    def fuse(features: "Tensor") -> "Tensor":
        if norms:
            taps = (tap.contiguous() for tap in features.chunk(len(norms), dim=-1))
            features = torch.cat([norm(tap) for norm, tap in zip(norms, taps, strict=True)], dim=-1)
        return features if fc is None else fc(features)

    return fuse


EAGLE3 = Eagle3()
