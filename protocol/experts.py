"""Mixtures of experts: the share of a model's weights that a pass over some rows reads.

Each row goes through a few of the experts of a layer, so a pass over one row reads little of a
model, and one over the rows of a tree reads more with each of them. Rows are taken to choose
independently of each other, and every expert as often as any other; those of one text agree more
often than that, and read less: `Routing` predicts how many experts M rows go through, from how
varied their choices are. Knows counts and shares only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Annotated, Any

from pydantic import Field, model_validator

from dovetail.protocol.settings import Frozen

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
"""Names of both numbers in a config.json; where it has a list, one number a layer."""


@dataclass(frozen=True)
class Mixture:
    """The experts of a model: `chosen` of `count` for each row of a layer, with a `share` of all
    weights that passes read."""

    count: int = 1
    chosen: int = 1
    share: float = 0.0

    @property
    def active(self) -> float:
        """Return the share of the weights that one row is multiplied with."""
        return self.read(1)

    def read(self, rows: float) -> float:
        """Return the share of the weights that a pass over this many rows reads, on average: of
        `count` experts each is missed by a row with probability 1 - chosen / count."""
        missed: float = (1.0 - self.chosen / self.count) ** rows
        return 1.0 - self.share * missed


DENSE = Mixture()
"""A model without experts: a pass reads all of its weights."""

MAX_EXPERTS = 1 << 24
Experts = Annotated[int, Field(ge=0, le=MAX_EXPERTS)]
"""The number of experts that a pass goes through, each counted once in every layer."""


class Routing(Frozen):
    """The numbers of experts that a model has and that a row goes through, summed over layers."""

    row: Annotated[int, Field(ge=1, le=MAX_EXPERTS)]
    """Experts that one row goes through: top-k times the layers with experts."""
    most: Annotated[int, Field(ge=1, le=MAX_EXPERTS)]
    """All experts of all layers."""

    @model_validator(mode="after")
    def _goes_through_some(self) -> "Routing":
        if self.row > self.most:
            raise ValueError(
                f"a row goes through {self.row} experts, but the model has {self.most}"
            )
        return self

    def unique(self, rows: float, variety: float = 1.0) -> float:
        """Return how many experts U a pass over `rows` rows M goes through on average:
        U = E (1 - (1 - k / E)^(M^variety)), with k = `row` and E = `most`. At `variety` 1 rows
        choose independently, at 0 all choose the same experts. The exponent is as in Heaps' law
        for the number of different words in a text."""
        missed: float = (1.0 - self.row / self.most) ** (rows**variety)
        return self.most * (1.0 - missed)

    def variety(self, rows: int, unique: float) -> float:
        """Return the exponent by which a pass over `rows` rows, at least two, went through `unique`
        experts (see the method `unique`); 0 where all rows chose the same experts."""
        if self.row == self.most:
            return 1.0
        missed = 1.0 - min(unique, self.most - 0.5) / self.most
        return log(max(1.0, log(missed) / log(1.0 - self.row / self.most))) / log(rows)


def count_experts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many experts a layer has by a config.json, and how many of them a row goes
    through; (1, 1) for a model without experts."""
    count = max((_number(config.get(name)) for name in COUNTS), default=0)
    if count <= 1:
        return 1, 1
    chosen = next((n for name in CHOSEN if (n := _number(config.get(name)))), count)
    return count, min(count, chosen)


def _number(value: object) -> int:
    """Return a positive number, or the largest of a list of them; 0 for anything else."""
    if isinstance(value, list | tuple):
        return max(map(_number, value), default=0)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
