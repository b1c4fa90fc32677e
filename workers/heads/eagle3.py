"""EAGLE-3 (Li et al. 2025): one matrix over the residual streams of three target layers, one
decoder layer over the concatenated embedding and state, and an output head of its own. Reads the
tensor names of its repository, of vLLM and of SpecForge."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.protocol.messages import MAX_ROW
from dovetail.workers.heads.config import HeadConfig, Layers, MisfitError, Outputs, Read
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

if TYPE_CHECKING:
    from torch import Tensor

    from dovetail.workers.heads.parts import Body, HeadParts, Inputs, Outcome
    from dovetail.workers.models.backends.device.products import Product

LAYER = "midlayer."


class NestedConfig(Read):
    """The object `eagle_config` of SGLang, SpecForge and ModelOpt, which counts layers by their
    outputs: one less."""

    use_aux_hidden_state: bool = True
    eagle_aux_hidden_state_layer_ids: Outputs = ()
    aux_hidden_state_layer_ids: Outputs = ()


class Eagle3Config(HeadConfig):
    """Keys of its config.json."""

    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    eagle_aux_hidden_state_layer_ids: Layers = ()
    """vLLM's: the layers whose inputs are read; () for the default ones."""
    aux_hidden_state_layer_ids: Layers = ()
    eagle_config: NestedConfig = NestedConfig()


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec(HeadSpec):
    """An EAGLE-3 head."""

    norm_before_residual: bool  # the layer's residual is the normed state
    norm_output: bool  # the recurrent state is taken after the final norm
    fc_norm: bool  # each tap is normed before the fusion


def _taps(config: Eagle3Config, target: TargetShape) -> tuple[int, ...]:
    """Return the layers whose inputs are read: those of config.json, else 2, L // 2 and L - 3."""
    nested, count = config.eagle_config, target.layers
    if not nested.use_aux_hidden_state:
        return ()
    outputs = nested.eagle_aux_hidden_state_layer_ids or nested.aux_hidden_state_layer_ids
    given = (
        config.eagle_aux_hidden_state_layer_ids
        or config.aux_hidden_state_layer_ids
        or tuple(output + 1 for output in outputs)
    )
    taps = given or (2, count // 2, count - 3)
    reads = f"reads layers {list(taps)}"
    if not given and len(set(taps)) < len(taps):
        raise MisfitError(
            f"{reads} of {target.name}, which has {count}: name three different ones in "
            "eagle_aux_hidden_state_layer_ids"
        )
    if not all(0 <= tap <= count for tap in taps):
        raise MisfitError(
            f"{reads}, but {target.name} has {count} layers: take the head that was trained for it"
        )
    if len(taps) * target.width > MAX_ROW:
        raise MisfitError(
            f"reads {len(taps)} layers of width {target.width}, but a row of features has at most "
            f"{MAX_ROW} numbers"
        )
    return taps


class Eagle3(HeadKind):
    """EAGLE-3 in the formats of its public checkpoints."""

    name, title, config, spec = "eagle3", "EAGLE-3", Eagle3Config, Eagle3Spec
    layer, own_embedding = LAYER, True
    figures = Figures((6.15,), GPU, "HeteroSpec paper, Table 1: EAGLE-3 with Llama-3.1 8B")

    def recognises(self, shapes: Shapes) -> bool:
        own = {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}
        return not own.isdisjoint(shapes)

    def rename(self, plain: str) -> str:
        return plain.replace("layers.0.", LAYER, 1)

    def fields(self, config: Eagle3Config, shapes: Shapes, target: TargetShape) -> dict[str, Any]:
        return {
            "target_width": config.target_hidden_size or config.hidden_size,
            "taps": _taps(config, target),
            "draft_vocabulary": rows_of(shapes, "lm_head.weight", target.vocabulary_size),
            "norm_before_residual": config.norm_before_residual,
            "norm_output": config.norm_output,
            "fc_norm": "fc_norm.0.weight" in shapes,
        }

    def target_width(self, spec: HeadSpec, shapes: Shapes) -> int:
        fc = shapes.get("fc.weight", ())
        return fc[1] // max(1, len(spec.taps)) if len(fc) == 2 else spec.target_width

    def groups(self, spec: Eagle3Spec, config: Eagle3Config) -> list[Group]:
        hidden, reads = spec.hidden, range(max(1, len(spec.taps)))
        fused = spec.taps != () or spec.target_width != hidden
        norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        return [
            Group({"fc.weight": (hidden, spec.feature_width)}, needed=fused),
            Group({"fc.bias": (hidden,)}, needed=False),
            Group(
                {f"fc_norm.{i}.weight": (spec.target_width,) for i in reads}, needed=config.fc_norm
            ),
            *shared_groups(spec),
            Group({f"{LAYER}{norm}.weight": (hidden,) for norm in norms}),
            Group({"norm.weight": (hidden,)}),
            *attention_groups(spec, config, LAYER, 2 * hidden),
            gated_mlp(spec, LAYER),
        ]

    def body(self, parts: "HeadParts") -> "Body":
        import torch

        spec = parts.checkpoint.spec
        assert isinstance(spec, Eagle3Spec)
        fuse, final_norm = _tapped(parts, spec), parts.norm("norm")
        hidden_norm, embedding_norm = (
            parts.norm(f"{LAYER}{name}") for name in ("hidden_norm", "input_layernorm")
        )
        layer = parts.layer(LAYER, given=2 * spec.hidden)

        def body(inputs: "Inputs") -> "Outcome":
            states = fuse(inputs.features) if inputs.true else inputs.features
            normed = hidden_norm(states)
            both = torch.cat([embedding_norm(inputs.embedded), normed], dim=-1)
            states = normed if spec.norm_before_residual else states.clone()
            states = layer(states, inputs.seen, inputs.rows, given=both)
            if not len(states):
                return inputs.outcome(states)
            final = final_norm(states)
            return inputs.outcome(final if spec.norm_output else states, final)

        return body


def _tapped(parts: "HeadParts", spec: Eagle3Spec) -> "Product":
    """Return the fusion of the target's streams: one matrix over all taps concatenated, each normed
    first if it has a norm."""
    import torch

    count = max(1, len(spec.taps)) if spec.fc_norm else 0
    norms = [parts.norm(f"fc_norm.{i}") for i in range(count)]
    fc = parts.linear("fc") if parts.tensor("fc.weight") is not None else None

    def fuse(features: "Tensor") -> "Tensor":
        if norms:
            taps = (tap.contiguous() for tap in features.chunk(len(norms), dim=-1))
            features = torch.cat([norm(tap) for norm, tap in zip(norms, taps, strict=True)], dim=-1)
        return features if fc is None else fc(features)

    return fuse


EAGLE3 = Eagle3()
