"""Consecutive layers that stay on a device, captured for passes of a few rows and replayed as one
launch. Passes are padded, so only layers whose functions are all ours are captured: their rows have
the same bytes in any batch."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from dovetail.workers.devices.base import Capture
from dovetail.workers.kernels.layer_plan import LayerPlan
from dovetail.workers.models.backends.blob import Matrix
from dovetail.workers.models.backends.device.fixed import (
    MOST_ROWS,
    ArenaCache,
    FixedPass,
    Form,
    Graphs,
    Inputs,
    form_of,
    passes_of,
)
from dovetail.workers.models.backends.device.levels import (
    fixed_rows,
    has_fixed_shapes,
    is_placeable,
)
from dovetail.workers.models.backends.device.rows import Ours, PlacedRows
from dovetail.workers.models.backends.stages.engines import Engine, SettledLayer, TorchEngine
from dovetail.workers.models.cache import HALF
from dovetail.workers.models.segment import Paths, Segment
from dovetail.workers.models.states import Kept


@dataclass(frozen=True)
class Passed:
    """The states [T, hidden] after the layers of a span, and those that enter some of them."""

    states: Tensor
    kept: Mapping[int, Tensor]


@dataclass(frozen=True, eq=False)
class Span:
    """Some consecutive layers of a stage."""

    first: int  # the number of the first layer in its stage
    layers: Sequence[SettledLayer]
    plans: Sequence[LayerPlan]
    engine: TorchEngine
    ours: Ours
    capture: Capture
    graphs: Graphs = field(default_factory=Graphs)

    @property
    def stop(self) -> int:
        """Return the number of the layer after the last one."""
        return self.first + len(self.layers)

    def covers(self, states: Tensor, segments: Sequence[Segment]) -> bool:
        """Return whether a pass over these segments is captured."""
        caches = all(
            isinstance(segment.cache, ArenaCache) and segment.cache.rows.dtype == HALF
            for segment in segments
        )
        return caches and states.dtype == torch.float32 and 0 < len(states) <= MOST_ROWS

    def run(
        self, states: Tensor, positions: Tensor, segments: Sequence[Segment], kept: Kept, at: int
    ) -> Tensor:
        """Return the states [T, hidden] after the layers, on the device, from those before, on host
        or device; positions [T] are on the CPU. `at`: the first layer's number."""
        segments = [
            segment
            if segment.paths is not None
            else replace(segment, paths=Paths.growing(segment.start, segment.count))
            for segment in segments
        ]
        form, (count, hidden) = form_of(segments, placed=True), states.shape
        cache, here = segments[0].cache, states.device.type == "cpu"
        assert isinstance(cache, ArenaCache)
        wanted = frozenset(place - at for place in kept.wanted) & frozenset(range(len(self.layers)))
        make = partial(self._open, cache, form, hidden, wanted)
        level = passes_of(self.graphs.captured, (wanted, form), make)
        rows = {"positions": positions.numpy()}
        if here:
            rows["states"] = states.numpy()
        level.inputs.send(segments, rows)
        if not here:
            level.inputs["states"][:count] = states
            level.inputs["states"][count:] = states[-1]
        passed = level.replay()
        for place, tapped in passed.kept.items():
            kept.states[at + place] = tapped[:count].clone()
        return passed.states[:count].clone()

    def _open(
        self, cache: ArenaCache, form: Form, hidden: int, wanted: Collection[int]
    ) -> FixedPass[Inputs, Passed]:
        """Capture a pass. `cache`: one of those that it will be for."""
        engine, scratch = self.engine, self.graphs.scratch(cache)
        shapes = {"states": (torch.float32, (form.rows, hidden))}
        inputs = Inputs(form, shapes, engine.device, scratch)
        cached = PlacedRows(self.ours, inputs["places"], inputs["slots"], form.slots)

        def run() -> Passed:
            seen = fixed_rows(inputs, self.plans, cached, engine.turn, engine.by, turns=False)
            passing, kept = inputs["states"].clone(), dict[int, Tensor]()
            for index, layer in enumerate(self.layers):
                if index in wanted:
                    kept[index] = passing.clone()
                layer(seen, passing)
            return Passed(passing, kept)

        return FixedPass(inputs, self.capture(run))


def spans_of(
    layers: Sequence[object],
    plans: Sequence[LayerPlan],
    engine: Engine,
    capture: Capture | None,
    cache: torch.dtype,
) -> Mapping[int, Span]:
    """Return the spans of a stage's layers by their first layer. `cache`: type of keys and
    values."""
    if capture is None or not isinstance(engine, TorchEngine) or cache != HALF:
        return {}
    if (ours := engine.ours_for(())) is None:
        return {}
    found = {}
    for numbers in _runs([_is_ours(*pair) for pair in zip(layers, plans, strict=True)]):
        own = [layer for layer in (layers[n] for n in numbers) if isinstance(layer, SettledLayer)]
        first = numbers[0]
        found[first] = Span(first, own, [plans[n] for n in numbers], engine, ours, capture)
    return found


def _runs(chosen: Sequence[bool]) -> Iterator[Sequence[int]]:
    for own, numbers in groupby(range(len(chosen)), key=lambda number: chosen[number]):
        if own:
            yield [*numbers]


def _is_ours(layer: object, plan: LayerPlan) -> bool:
    """Return whether our functions compute a layer in fixed shapes."""
    return (
        isinstance(layer, SettledLayer)
        and not any(isinstance(matrix, Matrix) for matrix in layer.matrices.values())
        and has_fixed_shapes(plan)
        and is_placeable(plan)
    )
