"""Layers in a row whose weights stay on a device, captured for passes of a few rows of one session
and replayed as one launch.

A captured pass has more rows than were asked for, and reads more slots than a row sees. So only
layers whose functions are all ours are captured: these give a row the same bytes whatever is beside
it.
Knows layers and rows; nothing of sessions.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from dovetail.workers.devices import Capture
from dovetail.workers.kernels.layer_plan import LayerPlan
from dovetail.workers.models.backends.blob import Matrix
from dovetail.workers.models.backends.device.arenas import ArenaCache
from dovetail.workers.models.backends.device.attention import CONTEST, MULTIPLE, WIDTHS
from dovetail.workers.models.backends.device.fixed import Form, Inputs, fixed_pass, form_of
from dovetail.workers.models.backends.device.levels import MOST_ROWS, has_fixed_shapes
from dovetail.workers.models.backends.device.rows import FixedRows
from dovetail.workers.models.backends.stages.engines import Engine, SettledLayer, TorchEngine
from dovetail.workers.models.cache import HALF
from dovetail.workers.models.segment import Paths, Segment
from dovetail.workers.models.states import Kept


@dataclass(frozen=True)
class Passed:
    """The states [T, hidden] behind the layers of a span, and those that enter some of them."""

    states: Tensor
    kept: Mapping[int, Tensor]


@dataclass(frozen=True, eq=False)
class Span:
    """Some layers in a row of a stage."""

    first: int
    """The number of the first layer in its stage."""
    layers: Sequence[SettledLayer]
    plans: Sequence[LayerPlan]
    engine: TorchEngine
    capture: Capture

    @property
    def stop(self) -> int:
        """Return the number of the layer behind the last one."""
        return self.first + len(self.layers)

    def covers(self, states: Tensor, segments: Sequence[Segment]) -> bool:
        """Return whether a pass over these segments is captured."""
        if len(segments) != 1 or states.dtype != torch.float32:
            return False
        cache, count = segments[0].cache, segments[0].count
        return 0 < count <= MOST_ROWS and isinstance(cache, ArenaCache)

    def run(
        self, states: Tensor, positions: Tensor, segment: Segment, kept: Kept, at: int
    ) -> Tensor:
        """Return the states behind the layers, [T, hidden] on the device, of the states in front of
        them, on the CPU or the device; positions [T] are on the CPU. `at`: the number of the first
        layer in the model."""
        if segment.paths is None:
            segment = replace(segment, paths=Paths.growing(segment.start, segment.count))
        cache, form, count = segment.cache, form_of(segment), segment.count
        assert isinstance(cache, ArenaCache)
        here, hidden = states.device.type == "cpu", states.shape[1]
        wanted = frozenset(place - at for place in kept.wanted) & frozenset(range(len(self.layers)))
        make = partial(self._open, cache, form, hidden, wanted)
        level = fixed_pass(cache, (self, wanted), form, make, self.capture)
        rows = {"positions": positions.numpy()}
        if here:
            rows["states"] = states.numpy()
        level.inputs.send(segment, rows)
        if not here:
            level.inputs["states"][:count] = states
            level.inputs["states"][count:] = states[-1]
        passed = level.replay()
        for place, tapped in passed.kept.items():
            kept.states[at + place] = tapped[:count].clone()
        return passed.states[:count].clone()

    def _open(
        self, cache: ArenaCache, form: Form, hidden: int, wanted: Collection[int]
    ) -> tuple[Inputs, Callable[[], Passed]]:
        """Return the inputs of a pass, and what computes it."""
        engine, cached = self.engine, cache.rows
        inputs = Inputs(form, {"states": (torch.float32, (form.rows, hidden))}, engine.device)
        windows = {plan.window for plan in self.plans}
        seeing = {(plan.window, plan.heads // plan.kv_heads) for plan in self.plans}

        def run() -> Passed:
            masks = {window: inputs.mask(torch.float32, window) for window in windows}
            seen = FixedRows(
                engine.turn(inputs["positions"]),
                cached,
                inputs["slots"],
                {(window, groups): masks[window].repeat(groups, 1) for window, groups in seeing},
                by=engine.by,
                turns=False,
            )
            passing, kept = inputs["states"].clone(), dict[int, Tensor]()
            for index, layer in enumerate(self.layers):
                if index in wanted:
                    kept[index] = passing.clone()
                layer(seen, passing)
            return Passed(passing, kept)

        return inputs, run


def spans_of(
    layers: Sequence[object],
    plans: Sequence[LayerPlan],
    engine: Engine,
    capture: Capture | None,
    cache: torch.dtype,
) -> Mapping[int, Span]:
    """Return the spans of a stage's layers by the number of their first layer. `cache`: the type of
    keys and values."""
    if capture is None or not isinstance(engine, TorchEngine) or not _all_ours(engine, cache):
        return {}
    found = {}
    for numbers in _runs([_is_ours(*pair) for pair in zip(layers, plans, strict=True)]):
        own = [layer for layer in (layers[n] for n in numbers) if isinstance(layer, SettledLayer)]
        first = numbers[0]
        found[first] = Span(first, own, [plans[n] for n in numbers], engine, capture)
    return found


def _runs(chosen: Sequence[bool]) -> Iterator[Sequence[int]]:
    for own, numbers in groupby(range(len(chosen)), key=lambda number: chosen[number]):
        if own:
            yield [*numbers]


def _all_ours(engine: TorchEngine, cache: torch.dtype) -> bool:
    """Return whether functions of ours compute attention and what lies between products."""
    products = engine.products
    return (
        products is not None
        and cache == HALF
        and engine.parts is not None
        and products.owner(CONTEST) is not None
    )


def _is_ours(layer: object, plan: LayerPlan) -> bool:
    """Return whether functions of ours compute a layer, in shapes that are fixed."""
    return (
        isinstance(layer, SettledLayer)
        and not any(isinstance(matrix, Matrix) for matrix in layer.matrices.values())
        and has_fixed_shapes(plan)
        and not plan.softcap
        and plan.head_dim % MULTIPLE == 0
        and plan.head_dim <= WIDTHS[-1]
    )
