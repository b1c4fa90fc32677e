"""DFlash (z-lab 2026): decoder layers over a block of mask tokens behind the root, which attend to
rows made of residual streams of the target. Reads the layouts of z-lab, speculators, DeepSpec and
transformers (Muse Glimmer)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from dovetail.protocol.messages import MAX_ROW, MAX_TAPS
from dovetail.workers.heads.block.views import View
from dovetail.workers.heads.config import (
    REMEDY,
    Factor,
    HeadConfig,
    Layers,
    MisfitError,
    Outputs,
    Positions,
    Read,
)
from dovetail.workers.heads.kind import HeadKind
from dovetail.workers.heads.spec import (
    Group,
    HeadSpec,
    Shapes,
    TargetShape,
    attention_groups,
    refuse_other_target,
    shared_groups,
)

if TYPE_CHECKING:
    from dovetail.workers.heads.block.layer import BlockLayer
    from dovetail.workers.heads.parts import Body, HeadParts, Inputs, Outcome

MOST_ROWS = 64  # rows of a block; published ones have 7 to 16
RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
LAYER_TYPES = ("full_attention", "sliding_attention")


class BlockKeys(Read):
    """Keys that stand in `dflash_config` or beside it."""

    block_size: Positions | None = None  # rows of a block, the root included
    mask_token_id: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    target_layer_ids: Outputs = ()
    causal: bool | None = None


class DFlashConfig(HeadConfig, BlockKeys):
    """Keys of its config.json."""

    dflash_config: BlockKeys = BlockKeys()
    aux_hidden_state_layer_ids: Layers = ()  # of speculators, counted by inputs
    model_type: str = ""
    sample_from_anchor: bool | None = None
    layer_types: Annotated[tuple[str, ...], Field(strict=False)] = ()
    sliding_window: Positions | None = None
    use_sliding_window: bool | None = None
    sliding_window_non_causal: bool = False
    use_swa: bool = False
    swa_window_size: Positions | None = None
    is_causal: bool | None = None
    is_neox_style: bool = True
    rope_is_neox_style: bool = True
    attention_bias: bool = False
    attention_value_scale: Factor = 1.0
    input_embedding_scale: Factor = 1.0


@dataclass(frozen=True, kw_only=True)
class BlockSpec(HeadSpec):
    """A DFlash drafter, or one with more parts."""

    layer_views: tuple[View, ...]
    embedding_scale: float  # the factor of embedded tokens
    value_scale: float  # the factor of the output of attention

    @property
    def views(self) -> tuple[View, ...]:
        return self.layer_views


class DFlash(HeadKind):
    """DFlash in the formats of its public checkpoints."""

    name, title = "dflash", "DFlash"
    config, spec = DFlashConfig, BlockSpec
    own_embedding = True
    sign: ClassVar[str] = ""  # a tensor that only this kind has

    def recognises(self, shapes: Shapes) -> bool:
        plain = {self.rename(name) for name in shapes}
        own = {"fc.weight", "hidden_norm.weight", "layers.0.input_layernorm.weight"}
        return own <= plain and (not self.sign or self.sign in plain)

    def rename(self, plain: str) -> str:
        for theirs, ours in RENAMED.items():
            plain = plain.replace(theirs, ours) if plain.startswith(theirs) else plain
        return plain

    def anchored(self, config: Any) -> bool:
        """Return whether the root's own row predicts, if config.json does not say."""
        return False

    def fields(self, config: Any, shapes: Shapes, target: TargetShape) -> dict[str, Any]:
        inner = config.dflash_config
        block = _required("block_size", config.block_size, inner.block_size)
        anchored = config.sample_from_anchor
        anchored = self.anchored(config) if anchored is None else anchored
        outputs = config.target_layer_ids or inner.target_layer_ids
        fc = shapes.get("fc.weight", ())
        taps = config.aux_hidden_state_layer_ids or tuple(output + 1 for output in outputs)
        return {
            "blocks": config.num_hidden_layers,
            "target_width": (fc[1] if len(fc) == 2 else 0) // max(1, len(taps)),
            "taps": taps,
            "block": block,
            "levels": block if anchored else block - 1,
            "mask_token": _required("mask_token_id", config.mask_token_id, inner.mask_token_id),
            "layer_views": _views(config),
            "embedding_scale": config.input_embedding_scale,
            "value_scale": config.attention_value_scale,
        }

    def check(self, spec: Any, config: Any, shapes: Shapes, target: TargetShape) -> None:
        if not spec.taps:
            raise MisfitError(f"has no target_layer_ids in config.json; {REMEDY}")
        if not all(0 <= tap <= target.layers for tap in spec.taps):
            raise MisfitError(
                f"reads the inputs of layers {list(spec.taps)}, but {target.name} has "
                f"{target.layers} layers: take the drafter that was trained for it"
            )
        if len(spec.taps) > MAX_TAPS or len(spec.taps) * target.width > MAX_ROW:
            raise MisfitError(
                f"reads {len(spec.taps)} layers of width {target.width}, but a row of features "
                f"has at most {MAX_TAPS} layers and {MAX_ROW} numbers"
            )
        if not 2 <= spec.block <= MOST_ROWS:
            raise MisfitError(
                f"has block_size {spec.block} in config.json: it should be 2 to {MOST_ROWS}; "
                f"{REMEDY}"
            )
        refuse_other_target(spec.target_width, spec, target)
        if spec.mask_token >= spec.vocabulary_size:
            raise MisfitError(
                f"has mask_token_id {spec.mask_token} in config.json, which is outside the "
                f"vocabulary of {spec.vocabulary_size}; {REMEDY}"
            )
        if not (config.is_neox_style and config.rope_is_neox_style):
            raise MisfitError("rotates neighbours (is_neox_style false), which is not supported")
        super().check(spec, config, shapes, target)

    def groups(self, spec: Any, config: Any) -> list[Group]:
        hidden, wide = spec.hidden, spec.intermediate
        groups = [
            Group({"fc.weight": (hidden, spec.feature_width)}),
            Group({"fc.bias": (hidden,)}, needed=False),
            Group({"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}),
            Group({"mask_embedding": (hidden,)}, needed=False),
            *shared_groups(spec),
        ]
        for index in range(spec.blocks):
            layer = f"layers.{index}."
            norms = ("input_layernorm", "post_attention_layernorm")
            up = dict.fromkeys((f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj"), (wide, hidden))
            matrices = {**up, f"{layer}mlp.down_proj": (hidden, wide)}
            biased = config.model_copy(update={"qkv_bias": config.attention_bias})
            groups += [
                Group({f"{layer}{name}.weight": (hidden,) for name in norms}),
                *attention_groups(spec, biased, layer, hidden),
                Group({f"{name}.weight": shape for name, shape in matrices.items()}),
            ]
        return groups

    def decoder_layer(self, parts: "HeadParts", index: int) -> "BlockLayer":
        """Return a decoder layer."""
        from dovetail.workers.heads.block.layer import BlockLayer

        return BlockLayer(parts, index)

    def body(self, parts: "HeadParts") -> "Body":
        import torch

        spec = parts.checkpoint.spec
        assert isinstance(spec, BlockSpec)
        fuse, context_norm, final_norm = (
            parts.linear("fc"),
            parts.norm("hidden_norm"),
            parts.norm("norm"),
        )
        layers = [self.decoder_layer(parts, index) for index in range(spec.blocks)]
        mask = parts.tensor("mask_embedding")
        mask = None if mask is None else mask.to(parts.engine.device, torch.float32)

        def body(inputs: "Inputs") -> "Outcome":
            if inputs.true:
                context = context_norm(fuse(inputs.features))
                for layer in layers:
                    layer.place(inputs.seen, context)
                return inputs.outcome(context[:0])
            states = inputs.embedded
            if mask is not None:
                states = torch.where((inputs.tokens == spec.mask_token)[:, None], mask, states)
            states = states * spec.embedding_scale
            for view, layer in zip(spec.layer_views, layers, strict=True):
                states = layer(states, inputs.seen[view])
            rows = inputs.rows
            return inputs.outcome(final_norm(states if rows is None else states[rows]))

        return body


def _required(key: str, *found: Any) -> Any:
    for value in found:
        if value is not None:
            return value
    raise MisfitError(f"has no {key} in config.json; {REMEDY}")


def _views(config: DFlashConfig) -> tuple[View, ...]:
    """Return what the rows of a block see in each layer: the whole block if attention is full,
    those up to their own if it slides, unless config.json has one rule for both."""
    count, window = config.num_hidden_layers, config.sliding_window
    types = config.layer_types
    if config.use_swa:
        types, window = ("sliding_attention",) * count, config.swa_window_size or window
    elif not types and config.use_sliding_window:
        raise MisfitError(
            "has use_sliding_window but no layer_types in config.json, which name the layers that "
            f"slide; {REMEDY}"
        )
    types = types or ("full_attention",) * count
    if len(types) != count or not {*types} <= {*LAYER_TYPES}:
        raise MisfitError(
            f"has layer_types {list(types)} in config.json: it should name each of {count} layers, "
            f"{' or '.join(LAYER_TYPES)}; {REMEDY}"
        )
    if "sliding_attention" in types and window is None:
        raise MisfitError(f"has sliding layers but no sliding_window in config.json; {REMEDY}")
    bidirectional = config.model_type == "muse_glimmer_assistant"
    rule = config.is_causal if config.is_causal is not None else config.causal
    rule = config.dflash_config.causal if rule is None else rule

    def view(kind: str) -> View:
        if kind == "full_attention":
            return View(causal=bool(rule))
        causal = not (config.sliding_window_non_causal or bidirectional)
        # transformers' two-sided window includes its end
        return View(causal if rule is None else rule, (window or 0) + bidirectional)

    return tuple(view(kind) for kind in types)


DFLASH = DFlash()
