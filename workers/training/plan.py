"""The plan of a head's training: the weights of its losses, and the size of a step. Numbers
only."""

from dataclasses import dataclass
from typing import Literal

from dovetail.workers.training.run import Pace


@dataclass(frozen=True)
class Recipe:
    """The weights of the losses; `HeadRecipe.paper` has the papers' own."""

    feature: float = 1.0  # SmoothL1 between state and feature (EAGLE 1.0, EAGLE-3 none)
    cross_entropy: float = 0.1
    """Soft cross entropy against the target's distribution (EAGLE 0.1, EAGLE-3 1.0)."""
    contrast_feature: float = 0.5
    """Jakiro: the weight of the contrast's feature loss relative to the mixture's: 0.5 in its code,
    1.0 in its equation 14."""
    contrast_cross_entropy: float = 0.5  # Jakiro: the same for the cross entropy
    steps: int = 1  # steps of the training-time test
    decay: float = 0.8  # the weight of a step relative to the previous one (EAGLE-3)
    noise: float = 0.2
    """Width of the uniform noise on the features for rows of 512 tokens, narrower for longer ones
    (EAGLE)."""


@dataclass(frozen=True)
class Plan:
    """The plan of a training: pace, losses, and the size of a step."""

    pace: Pace
    recipe: Recipe
    batch: int = 8  # rows a step
    length: int = 256  # columns a row
    alone: float = 0.0
    """Share of the run in which the first step is trained alone: a new head learns more from twice
    the text than from its own mistakes."""
    number: Literal["fp32", "bf16"] = "fp32"  # the type of the matrix products of a step
    held: float = 0.03  # share of the sequences that is held out
    checks: int = 20  # the number of measurements on them in a run
    check_rows: int = 24
    depth: int = 6  # the depth of the simulated chains
