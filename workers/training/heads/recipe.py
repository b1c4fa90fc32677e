"""The recipe of a kind of draft head: its module, its paper's training, and what a trained head
records about itself."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from dovetail.workers.heads.spec import Shape
from dovetail.workers.training.data.features import Batch
from dovetail.workers.training.heads.trainable import HeadShape, TrainableDraft
from dovetail.workers.training.losses import Acceptance, Held, head_loss, simulate
from dovetail.workers.training.plan import Plan, Recipe
from dovetail.workers.training.run import Pace
from dovetail.workers.training.target_parts import Frozen

EAGLE_PLAN = Plan(
    Pace(rate=3e-5, warm_up=2000, weight_decay=0.01, clip=0.5), Recipe(), batch=4, length=2048
)
"""EAGLE's and Dovetail's main.py. Gradients are clipped by norm rather than by value."""


class HeadRecipe:
    """The training of a kind of head."""

    architecture: ClassVar[str]  # `architectures` in its config.json
    paper: ClassVar[Plan]  # the recipe of its paper
    trainable: ClassVar[type[TrainableDraft]]
    shape: ClassVar[type[HeadShape]] = HeadShape
    layer_of_target: ClassVar[bool] = False
    """True if it is a layer of its target, so that MLP and vocabulary are the target's."""

    def choices(self, options: Mapping[str, Any], *, taps: Sequence[int]) -> dict[str, Any]:
        """Return the fields of `HeadShape` that this kind's options set, for features with those
        `taps` of a target. Raises `UserError` if they do not fit."""
        return dict(options)

    def of_target(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of `HeadShape` that follow from the target's config.json. Raises
        `UserError` for a target that is not supported."""
        return {}

    def loss(
        self,
        head: Any,
        frozen: Frozen,
        batch: Batch,
        recipe: Recipe,
        random: torch.Generator | None = None,
    ) -> Tensor:
        """Return the loss of a batch; `head`: of the kind's own class."""
        return head_loss(head, frozen, batch, recipe, random)

    def simulated(self, head: Any, frozen: Frozen, held: Held, depth: int) -> Acceptance:
        """Return the accepted length of simulated chains of at most `depth` tokens."""
        return simulate(head, frozen, held, depth)

    def intermediate(self, hidden: int, of_target: int) -> int:
        """Return the default width of the MLP."""
        return of_target

    def fields(self, shape: Any, taps: Shape) -> dict[str, Any]:
        """Return the keys of config.json that only this kind has; `shape` is of its own class."""
        return {}

    def shape_words(self, shape: Any) -> list[str]:
        """Return further lines about a head's shape for its model card."""
        return []

    def loss_words(self, shape: Any, recipe: Recipe) -> list[str]:
        """Return further lines about a head's losses for its model card."""
        return []
