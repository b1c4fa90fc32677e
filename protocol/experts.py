"""Mixtures of experts: the share of a model's weights that a pass over M rows reads. Each row uses
a few experts of a layer, so a pass over one row reads little of a model, and each further row of a
tree reads more. `Mixture` assumes that rows choose independently and uniformly. Rows of one text
agree more often and read less: `Routing` predicts the number of experts from the variety of their
choices. Knows counts and shares only."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Annotated, Any

from pydantic import Field, model_validator

from dovetail.protocol.settings import Frozen

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
"""Names of both numbers in a config.json; a list has one number per layer."""


@dataclass(frozen=True)
class Mixture:
    """The experts of a model: each row uses `chosen` of `count` in each layer; they hold a `share`
    of all weights."""

    count: int = 1
    chosen: int = 1
    share: float = 0.0

    @property
    def active(self) -> float:
        """Return the share of the weights that one row uses."""
        return self.read(1)

    def read(self, rows: float) -> float:
        """Return the expected share of the weights that a pass over this many rows reads: a row
        misses each of the `count` experts with probability 1 - chosen / count."""
        missed: float = (1.0 - self.chosen / self.count) ** rows
        return 1.0 - self.share * missed


DENSE = Mixture()
"""A model without experts: every pass reads all weights."""

MAX_EXPERTS = 1 << 24
Experts = Annotated[int, Field(ge=0, le=MAX_EXPERTS)]
"""The number of distinct experts that a pass uses, summed over layers."""


class Routing(Frozen):
    """How many experts a model has and how many a row uses, summed over layers."""

    row: Annotated[int, Field(ge=1, le=MAX_EXPERTS)]
    """Experts that one row uses: top-k times the layers with experts."""
    most: Annotated[int, Field(ge=1, le=MAX_EXPERTS)]
    """All experts of all layers."""

    @model_validator(mode="after")
    def _uses_some(self) -> "Routing":
        if self.row > self.most:
            raise ValueError(f"a row uses {self.row} experts, but the model has {self.most}")
        return self

    def unique(self, rows: float, variety: float = 1.0) -> float:
        """Return the expected number of experts U that a pass over M = `rows` rows uses: U = E (1 -
        (1 - k / E)^(M^variety)), with k = `row` and E = `most`. At `variety` 1 rows choose
        independently, at 0 all choose the same experts. The exponent is as in Heaps' law for the
        number of different words in a text."""
        missed: float = (1.0 - self.row / self.most) ** (rows**variety)
        return self.most * (1.0 - missed)

    def variety(self, rows: int, unique: float) -> float:
        """Return the exponent for which `unique` predicts this many experts for `rows` rows (at
        least two); 0 if all rows chose the same experts."""
        if self.row == self.most:
            return 1.0
        missed = 1.0 - min(unique, self.most - 0.5) / self.most
        return log(max(1.0, log(missed) / log(1.0 - self.row / self.most))) / log(rows)


def count_experts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the experts of a layer and those that a row uses, from a config.json; (1, 1) for a
    model without experts."""
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
