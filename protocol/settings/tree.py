"""Settings of the token tree of a round."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

from annotated_types import MaxLen
from pydantic import AfterValidator, BeforeValidator, FailFast, Field

from dovetail.protocol.settings.values import Frozen, words


@dataclass(frozen=True)
class PolicyTraits:
    """The properties of a policy."""

    fixed_shape: bool = False
    """The tree's shape does not depend on drawn tokens, so that rejection sampling is possible."""
    without_model: bool = False
    """Works with a draft without a model, which grows its whole tree at once, best first."""
    by_entropy: bool = False  # the policy needs entropy thresholds
    full_levels: bool = False  # whole levels are offered, so gamma = width x depth
    pass_a_level: bool = True
    """A pass expands a level; False: a pass expands the best nodes of any level."""
    sizes_itself: bool = False
    """The number of nodes follows the measured costs; gamma, depth and width are bounds."""


POLICIES: dict[str, PolicyTraits] = {  # implemented by workers/speculation/policies.py
    "static": PolicyTraits(fixed_shape=True),
    "dynamic": PolicyTraits(without_model=True),
    "budget": PolicyTraits(without_model=True, pass_a_level=False),
    "beam": PolicyTraits(full_levels=True),
    "heterospec": PolicyTraits(by_entropy=True),
    "goodput": PolicyTraits(without_model=True, sizes_itself=True),
}


MAX_GAMMA, MAX_DEPTH, MAX_WIDTH = 1023, 128, 64
MAX_BINS = 8
"""The most entropy bins of heterospec."""


def _listed(value: Any) -> Any:
    """Convert a list of TOML or JSON, or the text "0.3,0.6", to a tuple; anything else is returned
    unchanged and left to validation."""
    if isinstance(value, list):
        return tuple(value)
    return (
        tuple(part.strip() for part in value.split(",") if part.strip())
        if isinstance(value, str)
        else value
    )


def _numbers(value: Any) -> Any:
    parts = _listed(value)
    try:
        return (
            tuple(float(part) if isinstance(part, str) else part for part in parts)
            if isinstance(parts, tuple)
            else parts
        )
    except ValueError:
        raise ValueError(
            "write numbers, such as 0.3,0.6,1.0 on a command line or [0.3, 0.6, 1.0] in a file"
        ) from None


def _path_or_numbers(value: Any) -> Any:
    """Return a tuple if all parts are numbers, else the text as a file name."""
    try:
        return _numbers(value) or ""
    except ValueError:
        return value


def _ascending(bounds: tuple[float, ...] | str) -> tuple[float, ...] | str:
    if not isinstance(bounds, str) and any(after <= before for before, after in pairwise(bounds)):
        raise ValueError("the bounds between bins ascend")
    return bounds


Shares = Annotated[
    tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...],
    FailFast(),
    MaxLen(MAX_BINS),
    BeforeValidator(_numbers),
]
Thresholds = Annotated[
    str | Annotated[tuple[Annotated[float, Field(ge=0.0, le=1e6)], ...], MaxLen(MAX_BINS - 1)],
    BeforeValidator(_path_or_numbers),
    AfterValidator(_ascending),
]
Adaptations = Annotated[
    tuple[Literal["extend", "prune", "compute"], ...],
    FailFast(),
    MaxLen(3),
    BeforeValidator(_listed),
]


class TreeSettings(Frozen):
    """The shape of the token tree of a round; gamma 0 decodes with the target alone."""

    policy: Annotated[str, words(POLICIES, "tree policy")] = Field(
        "goodput",
        description="how the tree is shaped: goodput (as large as pays off, from no nodes to "
        "gamma), dynamic (expand and rerank, EAGLE-2), static (a fixed shape; 25/5/10 is "
        "EAGLE-1's), budget (best first up to gamma, SpecExec), beam (the best of every level, "
        "SubSpec: gamma = width x depth) or heterospec (deeper and narrower where the draft is "
        "sure)",
    )
    gamma: Annotated[int, Field(ge=0, le=MAX_GAMMA)] = Field(
        15, description="drafted nodes verified in a round at most, root not counted"
    )
    depth: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = Field(8, description="levels below the root")
    width: Annotated[int, Field(ge=1, le=MAX_WIDTH)] = Field(
        10, description="nodes expanded per level, and children considered per node"
    )
    insist: bool = Field(
        False,
        description="true: draft and verify the whole tree in every round, even if that is slower; "
        "false: less of it, or nothing, if that is faster",
    )
    sharpening: Annotated[float, Field(gt=0.0, le=100.0)] | Literal["auto"] = Field(
        "auto",
        description="scores of children are log_softmax(z / sharpening); 1.0 is EAGLE-2; auto: "
        "fitted to what the target accepts",
    )
    thresholds: Thresholds = Field(
        "",
        description="heterospec: the file that `dovetail stratify` wrote, or the bounds "
        "between its bins of entropy in nats, ascending",
    )
    prune: Shares = Field(
        (0.3, 0.6, 1.0),
        description="heterospec: share of the gamma + 1 rows that is verified in each of the bins "
        "of lowest entropy",
    )
    adapt: Adaptations = Field(
        ("extend", "prune", "compute"),
        description="heterospec: what adapts to the entropy - extend (more levels), prune (fewer "
        "rows), compute (a prepared shape for each bin)",
    )

    @property
    def traits(self) -> PolicyTraits:
        """The properties of the policy."""
        return POLICIES[self.policy]

    @property
    def low_bins(self) -> int:
        """Return in how many of the lowest entropy bins heterospec adapts the tree; never in the
        last bin, which has no upper bound."""
        return (
            0
            if not self.traits.by_entropy or isinstance(self.thresholds, str)
            else min(len(self.prune), len(self.thresholds))
        )

    def size_in(self, stratum: int) -> tuple[int, int]:
        """Return the nodes and levels of the tree in an entropy bin; 0 is the lowest (HeteroSpec,
        section 4.3).

        The paper's depth counts the levels below the first one; in levels its alpha is ceil((depth
        - 1) / 2), and Delta = alpha - bin. The bin's share of the gamma + 1 rows (the paper's N
        counts the root) plus Delta is verified; never fewer than a path to the deepest level
        takes."""
        if stratum >= self.low_bins or not self.gamma:
            return self.gamma, self.depth
        longer = max(0, self.depth // 2 - stratum) if "extend" in self.adapt else 0
        levels = min(self.depth + longer, MAX_DEPTH)
        rows = (
            math.ceil(round(self.prune[stratum] * (self.gamma + 1), 6)) + longer
            if "prune" in self.adapt
            else self.gamma + 1
        )
        return min(max(rows - 1, levels), MAX_GAMMA), levels

    @property
    def most_nodes(self) -> int:
        """Return the largest number of nodes of any proposal."""
        return max(self.size_in(stratum)[0] for stratum in range(self.low_bins + 1))

    @property
    def most_levels(self) -> int:
        """Return the largest number of levels of any proposal."""
        return max(self.size_in(stratum)[1] for stratum in range(self.low_bins + 1))
