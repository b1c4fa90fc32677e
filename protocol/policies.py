"""The table of tree policies: their names, and the properties that settings, planner and commands
need. `workers/speculation/policies.py` implements them."""

from dataclasses import dataclass


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


POLICIES: dict[str, PolicyTraits] = {
    "static": PolicyTraits(fixed_shape=True),
    "dynamic": PolicyTraits(without_model=True),
    "budget": PolicyTraits(without_model=True, pass_a_level=False),
    "beam": PolicyTraits(full_levels=True),
    "heterospec": PolicyTraits(by_entropy=True),
    "goodput": PolicyTraits(without_model=True, sizes_itself=True),
}
