"""The places of layers in a cache, and in the states of a session."""

from dataclasses import replace

from dovetail.workers.kernels.layer_plan import LayerPlan
from dovetail.workers.kernels.states import placed


class Layout:
    """Gives layers, one after the other, their places."""

    def __init__(self) -> None:
        self.plans: list[LayerPlan] = []
        """The layers in their places, but for those that read keys and values of others."""
        self._places: dict[int, LayerPlan] = {}
        """By the number of a layer in its model."""

    def take(self, plan: LayerPlan) -> LayerPlan:
        """Return a layer in its place behind the others; `plan.index`: its number in the model."""
        if plan.reads is not None:
            source = self._places[plan.reads]
            return replace(plan, index=source.index, cached_before=source.cached_before)
        caching = [other for other in self.plans if other.caches]
        shapes = [other.scan.shape for other in self.plans if other.scan is not None]
        own = replace(
            plan,
            index=len(caching),
            cached_before=sum(other.kv_heads * other.head_dim for other in caching),
            scan=None if plan.scan is None else placed(plan.scan, shapes),
        )
        self.plans.append(own)
        self._places[plan.index] = own
        return own

    def caching(self, layer: int) -> LayerPlan:
        """Return a layer of the model in its place, which has its own keys and values."""
        return self._places[layer]

    def has(self, layer: int) -> bool:
        """Return whether the keys and values of a layer of the model have a place."""
        return layer in self._places
