"""DFlash (z-lab 2026): decoder layers over a block of the root and mask tokens after it, which
attend to rows made of the target's residual streams. Reads the layouts of z-lab, speculators,
DeepSpec and transformers (Muse Glimmer)."""

from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.workers.heads.block.config import (
    BlockSpec,
    DFlashConfig,
    check_block,
    required,
    taps_of,
    views_of,
)
from dovetail.workers.heads.config import HeadConfig, MisfitError
from dovetail.workers.heads.kind import HeadKind
from dovetail.workers.heads.spec import (
    Group,
    HeadSpec,
    Shapes,
    TargetShape,
    attention_groups,
    gated_mlp,
    shared_groups,
)

if TYPE_CHECKING:
    from dovetail.workers.heads.block.layer import BlockLayer
    from dovetail.workers.heads.parts import Body, HeadParts, Inputs, Outcome

RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


class DFlash(HeadKind):
    """DFlash in the formats of its public checkpoints."""

    name, title = "dflash", "DFlash"
    config: ClassVar[type[HeadConfig]] = DFlashConfig
    spec: ClassVar[type[HeadSpec]] = BlockSpec
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
        """Return the default for whether the root's own row predicts."""
        return False

    def fields(self, config: Any, shapes: Shapes, target: TargetShape) -> dict[str, Any]:
        inner = config.dflash_config
        block = required("block_size", config.block_size, inner.block_size)
        anchored = config.sample_from_anchor
        anchored = self.anchored(config) if anchored is None else anchored
        fc, taps = shapes.get("fc.weight", ()), taps_of(config)
        return {
            "blocks": config.num_hidden_layers,
            "target_width": (fc[1] if len(fc) == 2 else 0) // len(taps),
            "taps": taps,
            "block": block,
            "levels": block if anchored else block - 1,
            "mask_token": required("mask_token_id", config.mask_token_id, inner.mask_token_id),
            "layer_views": views_of(config),
            "embedding_scale": config.input_embedding_scale,
            "value_scale": config.attention_value_scale,
        }

    def check(self, spec: Any, config: Any, shapes: Shapes, target: TargetShape) -> None:
        if not (config.is_neox_style and config.rope_is_neox_style):
            raise MisfitError("rotates neighbouring pairs (is_neox_style false): not supported")
        super().check(spec, config, shapes, target)
        check_block(spec, target)

    def groups(self, spec: Any, config: Any) -> list[Group]:
        hidden = spec.hidden
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
            biased = config.model_copy(update={"qkv_bias": config.attention_bias})
            groups += [
                Group({f"{layer}{name}.weight": (hidden,) for name in norms}),
                *attention_groups(spec, biased, layer, hidden),
                gated_mlp(spec, layer),
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


DFLASH = DFlash()
