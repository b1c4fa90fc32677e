"""The recipes of DFlash and DSpark."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.protocol.errors import UserError
from dovetail.workers.heads.spec import Shape
from dovetail.workers.training.block_losses import block_loss, simulate_blocks
from dovetail.workers.training.data.features import Batch
from dovetail.workers.training.heads.block import BlockHead, BlockShape
from dovetail.workers.training.heads.recipe import HeadRecipe
from dovetail.workers.training.losses import Acceptance, Held
from dovetail.workers.training.plan import Plan, Recipe
from dovetail.workers.training.run import Pace
from dovetail.workers.training.target_parts import Frozen


class DFlashRecipe(HeadRecipe):
    """DFlash: roots drawn at random, and levels weighted exp(-(l - 1) / 4), for blocks of 8. The
    loss is the cross entropy against the target's distribution instead of its tokens. Weights, rate
    and schedule were not compared with the authors' code, or with others."""

    architecture = "DFlashDraftModel"
    paper = Plan(
        Pace(rate=6e-4, warm_up=2000, weight_decay=0.01, clip=1.0, decay="cosine"),
        Recipe(feature=0.0, cross_entropy=1.0, decay=0.78, noise=0.0),
        batch=2,
        length=3072,
    )
    trainable, shape = BlockHead, BlockShape

    def choices(self, options: Mapping[str, Any], *, taps: Sequence[int]) -> dict[str, Any]:
        if not taps or 0 in taps:
            raise UserError(
                "a block drafter reads outputs of layers of the target, but the features have the "
                f"inputs of layers {list(taps)}: write them with --taps auto"
            )
        return {**options, "taps": len(taps), "head_norms": True}

    def fields(self, shape: BlockShape, taps: Shape) -> dict[str, Any]:
        outputs = [tap - 1 for tap in taps]
        return {
            "model_type": "qwen3",
            "block_size": shape.block_size,
            "dflash_config": {"mask_token_id": shape.mask_token, "target_layer_ids": outputs},
            "sample_from_anchor": shape.anchored,
        }

    def loss(
        self,
        head: BlockHead,
        frozen: Frozen,
        batch: Batch,
        recipe: Recipe,
        random: torch.Generator | None = None,
    ) -> Tensor:
        return block_loss(head, frozen, batch, recipe, random)

    def simulated(self, head: BlockHead, frozen: Frozen, held: Held, depth: int) -> Acceptance:
        return simulate_blocks(head, frozen, held, depth)

    def shape_words(self, shape: BlockShape) -> list[str]:
        markov = [f"pairs of rank {shape.rank}"] if shape.rank else []
        return [f"{shape.levels} levels in a pass", *markov]


class DSparkRecipe(DFlashRecipe):
    """As DFlash, with a Markov head; the root's own row predicts."""

    architecture = "DSparkDraftModel"

    def choices(self, options: Mapping[str, Any], *, taps: Sequence[int]) -> dict[str, Any]:
        return {**super().choices(options, taps=taps), "anchored": True}

    def fields(self, shape: BlockShape, taps: Shape) -> dict[str, Any]:
        own = {"markov_rank": shape.rank, "markov_head_type": "vanilla"}
        return {**super().fields(shape, taps), **own, "enable_confidence_head": False}
