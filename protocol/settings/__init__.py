"""The settings: one tree of frozen models; unknown keys are errors.

`launch/settings/configure.py` decides where a setting comes from (flag, environment, file,
default); sampling and tree settings are also part of messages. Sizes are in bytes, probabilities
within 0..1. Everything is imported from here; each file covers one subject."""

from dovetail.protocol.settings.cluster import *
from dovetail.protocol.settings.models import *
from dovetail.protocol.settings.sampling import *
from dovetail.protocol.settings.service import *
from dovetail.protocol.settings.tree import *
from dovetail.protocol.settings.values import *


class Settings(Frozen):
    """Every setting, with its default."""

    target: TargetSettings = TargetSettings()
    draft: DraftSettings = DraftSettings()
    tree: TreeSettings = TreeSettings()
    sampling: SamplingSettings = SamplingSettings()
    memory: MemorySettings = MemorySettings()
    cache: CacheSettings = CacheSettings()
    coordinator: CoordinatorSettings = CoordinatorSettings()
    http: HttpSettings = HttpSettings()
    ray: RaySettings = RaySettings()


def misfit(sampling: Sampling, tree: TreeSettings, kind: str = "auto") -> str | None:
    """Return why these settings do not work with a draft of that kind, in one line; None if they
    do."""
    if sampling.acceptance == "rejection" and not tree.traits.fixed_shape:
        return (
            "sampling.acceptance 'rejection' needs a shape that does not depend on drawn tokens: "
            f"set tree.policy to {_named('fixed_shape')}, not {tree.policy!r}"
        )
    if sampling.acceptance == "rejection" and not DRAFT_KINDS[kind].draws:
        return (
            "sampling.acceptance 'rejection' needs a draft that draws from probabilities: "
            f"choose another draft.kind than {kind!r}, or 'coupled'"
        )
    if not DRAFT_KINDS[kind].any_policy and not tree.traits.without_model:
        return (
            f"a draft of kind {kind!r} grows its tree best first: set tree.policy to "
            f"{_named('without_model')}, not {tree.policy!r}"
        )
    return None


def _named(trait: str) -> str:
    """Return the policies that have a property, for an error message."""
    return " or ".join(repr(name) for name, traits in POLICIES.items() if getattr(traits, trait))
