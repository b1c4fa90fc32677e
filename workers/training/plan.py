"""The plan of a head's training: the weights of its losses, and what a step looks at. Numbers
only."""

from dataclasses import dataclass
from typing import Literal

from dovetail.workers.training.run import Pace


@dataclass(frozen=True)
class Recipe:
    """The weights of the losses; `paper` of a kind of head has its paper's own."""

    feature: float = 1.0
    """SmoothL1 between state and feature (EAGLE 1.0, EAGLE-3 none)."""
    cross_entropy: float = 0.1
    """Soft cross entropy against the target's distribution (EAGLE 0.1, EAGLE-3 1.0)."""
    contrast_feature: float = 0.5
    """Jakiro: what the contrast's feature loss counts against the mixture's. Its code has 0.5, its
    equation 14 has 1.0."""
    contrast_cross_entropy: float = 0.5
    """Jakiro: the same for the cross entropy."""
    steps: int = 1
    """Steps of the training-time test."""
    decay: float = 0.8
    """The weight of a step against the one before it (EAGLE-3)."""
    noise: float = 0.2
    """Uniform noise on the features, this wide for rows of 512 tokens and narrower for longer ones
    (EAGLE)."""


@dataclass(frozen=True)
class Plan:
    """The plan of a training: the pace of the run, the losses, and what a step looks at."""

    pace: Pace
    recipe: Recipe
    batch: int = 8
    """Rows a step."""
    length: int = 256
    """Columns a row."""
    alone: float = 0.0
    """Share of the run in which the first step is trained alone: a head that is new learns more
    from twice the text than from its own mistakes."""
    number: Literal["fp32", "bf16"] = "fp32"
    """The type in which the matrix products of a step are computed."""
    held: float = 0.03
    """Share of the sequences that is held out."""
    checks: int = 20
    """The number of measurements on them in a run."""
    check_rows: int = 24
    depth: int = 6
    """The depth of the simulated chains."""
