"""The tree policies by their names in the settings."""

from dovetail.protocol.settings import TreeSettings
from dovetail.workers.speculation.heterospec import Heterospec
from dovetail.workers.speculation.policies import (
    DECAY,
    Beam,
    BestFirst,
    Dynamic,
    Policy,
    Static,
)
from dovetail.workers.speculation.shapes import fixed_shape


def open_policy(settings: TreeSettings) -> Policy:
    """Return a new policy as `settings.policy` names it; `ValueError` for a name that is none."""
    match settings.policy:
        case "static":
            return Static(fixed_shape(settings.gamma, settings.depth, settings.width))
        case "dynamic":
            return Dynamic()
        case "beam":
            return Beam()
        case "budget":
            return BestFirst(DECAY)
        case "goodput":
            return BestFirst()
        case "heterospec":
            return Heterospec(settings)
        case unknown:
            raise ValueError(f"no tree policy is called {unknown!r}")
