"""MTP layers in training, for targets with Llama's or Qwen3's decoder layer, with the tensor names
of the speculators library."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import UserError
from dovetail.workers.heads.spec import Shape
from dovetail.workers.training.heads.recipe import HeadRecipe
from dovetail.workers.training.heads.trainable import (
    STREAM,
    Block,
    HeadOutput,
    HeadShape,
    Norm,
    Seen,
    TrainableHead,
    Turn,
)
from dovetail.workers.training.plan import Plan, Recipe
from dovetail.workers.training.run import Pace
from dovetail.workers.training.target_parts import TargetParts

HEAD_NORMS = {"llama": False, "qwen3": True}
"""Model types of targets -> whether the queries and keys of their attention heads are normed."""


class MtpBlock(Block):
    """The trainable layer with what joins embedding and state."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape, 0, normed=True)
        self.token_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.hidden_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.input_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.final_layernorm = Norm(shape.hidden, shape.norm_eps)

    def join(self, embedded: Tensor, state: Tensor) -> Tensor:
        """Return the input of the layer for embedded, state [B, n, H]."""
        both = torch.cat([self.token_layernorm(embedded), self.hidden_layernorm(state)], -1)
        return cast(Tensor, self.input_proj(both))

    def predict(self, embedded: Tensor, state: Tensor, by: Turn, seen: Seen) -> Tensor:
        """Return the normed state [B, n, H], which the next step reads."""
        found: HeadOutput = self(self.join(embedded, state), by, seen)
        return cast(Tensor, self.final_layernorm(found.state))


class MtpHead(TrainableHead):
    """The trainable MTP layer."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.mtp_layers = nn.ModuleList([MtpBlock(shape)])

    def forward(self, embedded: Tensor, state: Tensor, positions: Tensor, seen: Seen) -> HeadOutput:
        layer = cast(MtpBlock, self.mtp_layers[0])
        return HeadOutput(layer.predict(embedded, state, self.turn(positions), seen))

    @torch.no_grad()
    def begin_with(self, target: TargetParts, stream: float = STREAM) -> int:
        """Initialise the layer with the target's last one, whose input is the residual stream of
        which the feature is the norm, plus a random mixture of the embedding of equal weight."""
        layer, hidden = cast(MtpBlock, self.mtp_layers[0]), self.shape.hidden
        final, source = (
            target.norm("norm.weight"),
            f"layers.{target.config['num_hidden_layers'] - 1}.",
        )
        typical = final.square().mean().sqrt()
        fusion = layer.input_proj.weight
        fusion[:, :hidden].normal_(std=stream / hidden**0.5)
        fusion[:, hidden:] = torch.diag(stream * typical / final)
        layer.final_layernorm.weight.copy_(final)
        parameters = dict(layer.named_parameters())
        for part in target.parts(source):
            parameters[part].copy_(target.read(source + part))
        return len(target.parts(source))


class MtpRecipe(HeadRecipe):
    """The speculators library's fine-tuning: three steps, each weighted 0.6 of the one before
    (0.51, 0.31, 0.18), and cross entropy alone. The rate is that of EAGLE-3."""

    architecture = "MTPDraftModel"
    paper = Plan(
        Pace(rate=5e-5, warm_up=2000, weight_decay=0.01, clip=1.0),
        Recipe(feature=0.0, cross_entropy=1.0, steps=3, decay=0.6, noise=0.0),
        batch=2,
        length=2048,
    )
    trainable = MtpHead
    layer_of_target = True

    def of_target(self, config: Mapping[str, Any]) -> dict[str, Any]:
        kind = str(config.get("model_type"))
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        unusual = [
            key for key in ("attention_bias", "mlp_bias", "use_sliding_window") if config.get(key)
        ]
        unusual += ["rope_scaling"] if rope.get("rope_type", "default") != "default" else []
        if kind not in HEAD_NORMS or unusual:
            found = f"of model type {kind}" + (f" with {', '.join(unusual)}" if unusual else "")
            raise UserError(
                f"an MTP layer is a layer of its target's kind, and training knows those of "
                f"{' and '.join(HEAD_NORMS)} without biases, sliding windows and scaled positions; "
                f"the target is {found}: train another kind of head"
            )
        return {"head_norms": HEAD_NORMS[kind]}

    def fields(self, shape: HeadShape, taps: Shape) -> dict[str, Any]:
        return {
            "model_type": "mtp",
            "speculators_model_type": "mtp",
            "num_nextn_predict_layers": 1,
        }
