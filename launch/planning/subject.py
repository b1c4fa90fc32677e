"""A target on a machine, as the planner takes it: sizes, costs and drafts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail.launch.machine.sharding import choice_of
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.planning.alternatives import (
    Alternative,
    Offered,
    alternatives,
    names_of,
    ready_of,
)
from dovetail.launch.planning.candidates import Candidate
from dovetail.launch.planning.designs import LOOKUP, Design, loss_of, read_config
from dovetail.launch.planning.prices import (
    MEASURED,
    Hardware,
    Prices,
    level,
    over_nodes,
    price,
    with_host_experts,
)
from dovetail.launch.planning.this_machine import Here, look_here
from dovetail.launch.planning.words import settings, told, tree_of, verdict
from dovetail.launch.processes.preflight import is_path
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.calibration import RowsSeconds
from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.experts import DENSE
from dovetail.runtime.costs.rounds import Origin
from dovetail.runtime.planner import Draft, Option, Planner
from dovetail.workers import kernels
from dovetail.workers.models.checkpoints.gguf.view import FILE, resolved

GPU = "cuda:0"  # the GPU of a described machine


class Subject:
    """A target on a machine, with all that the planner asks."""

    def __init__(
        self,
        configuration: Configuration,
        design: Design,
        hardware: Hardware,
        device: str | None,
        draft_device: str,
        weights: str,
    ) -> None:
        self.configuration, self.design, self.hardware = configuration, design, hardware
        self.device, self.draft_device, self.weights = device, draft_device, weights
        target = configuration.settings.target.model_copy(update={"weights": weights})
        self.cache = target.cached
        self.target = design.target(weights, device or GPU, self.cache)
        self.embedded = self.unnamed = False
        self.left_out: list[str] = []  # kinds of placements for which there is too little memory
        self.prices: Prices = price(hardware, self.target, design.width(weights))
        self.here: Here | None = None
        self.levels: dict[str, Origin] = {}  # the origin of t_D of each draft
        self.falls: dict[str, str] = {}
        """Draft -> why `draft.device = auto` puts it on the CPU, though there is a GPU."""

    @property
    def needs(self) -> str:
        return f"{(self.target.host_bytes(0, 0)) / 1e9:.3g} GB on the CPU"

    @property
    def planner(self) -> Planner:
        """Return what places the target, and places it with its experts on the CPU, or spread over
        memory nodes."""
        machine, spread = self.prices.machine, self._over_nodes()
        if self.configuration.settings.target.numa == "shard":
            nowhere_else = replace(machine, host=None, device=None)
            return Planner(self.target, nowhere_else, spread=spread)
        whole = Planner(self.target, machine, spread=spread)
        beside = with_host_experts(self.prices, self.target.mixture)
        if beside is None:
            return whole
        target = self.design.target(self.weights, self.device or GPU, self.cache, host_experts=True)
        return replace(whole, apart=Planner(target, beside, host_experts=True))

    def _over_nodes(self) -> Planner | None:
        measured = self.here.spread_calibration if self.here is not None else None
        machine = over_nodes(self.prices, self.hardware, self.target, measured)
        if machine is None or self.hardware.nodes is None:
            return None
        return Planner(self.target, machine, nodes=self.hardware.nodes.count)

    def search(
        self, candidates: Sequence[Candidate], step: Callable[[str], None]
    ) -> list[Alternative]:
        """Return all alternatives, the fastest first."""
        offered = [one for candidate in candidates for one in self.offered(candidate)]
        found = alternatives(self.planner, offered, ahead=self.ahead, step=step)
        self.left_out = [
            name
            for name in names_of(self.planner, offered)
            if not any(one.name == name for one in found)
        ]
        return found

    def offered(self, candidate: Candidate) -> list[Offered]:
        """Return the variants of a candidate: separate, for a target spread over memory nodes, and
        sharing with the target. One that does not fit on the GPU is priced on the CPU."""
        hardware, measured, spread = self.hardware, None, None
        lookup = candidate.kind == LOOKUP
        if lookup:
            hardware = replace(hardware, level_s=0.0, proposal_s=0.0)
        elif self.here is not None:
            if falls := self.here.fall(candidate):
                self.falls[candidate.name] = falls
                hardware = replace(hardware, draft=hardware.core or hardware.draft)
            measured, spread = (
                self.here.level(candidate, self._place_of(candidate), layout)
                for layout in (self.here.layout, self.here.spread or self.here.layout)
            )
        if not lookup:
            self.levels[candidate.name] = (
                MEASURED if measured is not None else hardware.draft.origin
            )
        on_device = self.device is not None and self._place_of(candidate) == self.device
        beside_s = hardware.proposal_s

        def own(known: RowsSeconds | None) -> Draft:
            level_s = level(hardware, candidate.size, known)
            return candidate.draft(level_s, beside_s, on_device=on_device)

        found = [Offered(candidate, own(measured))]
        if self.hardware.nodes is not None:
            found.append(Offered(candidate, own(spread), spread=True))
        device = self.prices.machine.device
        if candidate.kind == "substitute" and on_device and device is not None:
            level_s = level(self.hardware, candidate.size, measured, device.layer_s)
            found.append(Offered(candidate, candidate.shared(level_s, beside_s)))
        return found

    def _place_of(self, candidate: Candidate) -> str:
        return "cpu" if candidate.name in self.falls else self.draft_device

    def ahead(self, option: Option) -> bool:
        """Return whether target and draft have separate cores or devices: on a GPU the draft shares
        it with the target's part there; on a CPU it may have a core of the target."""
        assert option.draft is not None
        if option.draft.shares:
            return False
        falls = option.draft.name in self.falls
        if (falls or self.draft_device == "cpu") and self.here is not None:
            layout = (self.here.spread if option.nodes > 1 else None) or self.here.layout
            return not layout.shared
        return (
            self.device in (None, "cpu") or self.draft_device != self.device or not option.computed
        )

    def _origins(self, every: Sequence[Alternative]) -> dict[str, str]:
        """Describe the sources of the numbers, including those of the drafts in the table."""
        there = {one.candidate.name: one.candidate for one in every if one.candidate is not None}
        levels = {
            f"a level of the {name}": str(self.levels[name])
            for name in there
            if name in self.levels
        }
        return {
            **{name: str(origin) for name, origin in self.prices.origins.items()},
            **levels,
            **{f"what the {name} brings": one.acceptance.origin for name, one in there.items()},
        }

    def _measurable(self) -> str:
        """The flags of the calibrations that would put measurements in the place of estimates;
        nothing for another machine."""
        if self.here is None or not any(
            origin.estimated for origin in (*self.prices.origins.values(), *self.levels.values())
        ):
            return ""
        target = [
            flag
            for flag in self.configuration.typed("target")
            if not flag.startswith("--target.split")
        ]
        # layers on a device are measured with random weights, which are no blocks of a file
        beside = self.device if self.weights != FILE else None
        device = [f"--target.split.device={beside}"] if beside else []
        return " ".join([*target, *device, "--draft DRAFT"])

    def result(self, every: Sequence[Alternative]) -> dict[str, Any]:
        alone = next((one for one in every if one.candidate is None), None)
        rows = [told(one, self.device or "cpu", self._settings(one), alone) for one in every]
        choice = rows[0]
        ready = ready_of(every)
        link = self.prices.machine.link
        return {
            "machine": self.hardware.title,
            "device": self.device,
            "kernels": "" if self.here is None else kernels.in_words(),
            "device_says": self._device_says(),
            "left_out": list(self.left_out),
            "falls": dict(self.falls),
            "weights": self.weights,
            "layers": self.target.layers,
            "parameters": self.design.parameters,
            "active_parameters": self.design.active,
            "limits": {
                "vram_gb": _giga(self.hardware.device_bytes),
                "ram_gb": _giga(self.hardware.host_bytes),
            },
            "origins": self._origins(every),
            "measurable": self._measurable(),
            "uncalibrated": self.here is not None
            and any(one.estimated for one in self.prices.origins.values()),
            "alternatives": rows,
            "choice": choice,
            "at_once": None if ready is None else rows[every.index(ready)],
            "verdict": verdict(
                every, self.read_bytes, link, self.target.layer, dense=self.design.mixture is DENSE
            ),
        }

    def brief(self, every: Sequence[Alternative]) -> dict[str, Any]:
        """Return the entry for these weights in a comparison of weights: the best alternative that
        lacks nothing, if there is one; empty if nothing fits."""
        best = ready_of(every) or next(iter(every), None)
        activations = self.configuration.settings.target.activations
        return {
            "weights": self.weights,
            "gb": self.read_bytes / 1e9,
            "tokens_per_s": None if best is None else best.tokens_per_s,
            "tree": None if best is None else tree_of(best),
            "computes": loss_of(self.weights, activations),
        }

    @property
    def read_bytes(self) -> int:
        return self.target.layers * self.target.layer + self.target.head

    @property
    def _in_turns(self) -> bool:
        return self.here is not None and bool(self.here.layout.shared)

    def _device_says(self) -> str:
        if self.device:
            return ""
        place = "in turns with the target" if self._in_turns else "on a separate core"
        said = f"there is no GPU here: everything is on the CPU, and a draft {place}"
        if self.configuration.settings.memory.vram == "auto":
            return said
        return (
            f"{said}; memory.vram limits nothing: --target.split.device=cpu has the CPU "
            "stand for a GPU, --machine plans for another machine"
        )

    def _settings(self, one: Alternative) -> dict[str, Any]:
        return settings(
            one,
            self.device or "cpu",
            self.draft_device if one.candidate is None else self._place_of(one.candidate),
            self.configuration.over("plan", {"target.weights": self.weights, **self._node(one)}),
        )

    def _node(self, one: Alternative) -> dict[str, Any]:
        """Return the setting that keeps a target on the node of an alternative if `auto` would
        spread it because of measurements; else none."""
        if self.here is None or self.here.spread is None or one.option.nodes > 1:
            return {}
        target = self.configuration.settings.target.model_copy(update={"weights": self.weights})
        nodes = format_numbers(self.here.layout.target.nodes)
        return {"target.numa": nodes} if choice_of(target).numa == "shard" else {}


def _giga(size: int | None) -> float | None:
    return None if size is None else size / 1e9


def subject_here(
    configuration: Configuration, say: Callable[[str], None], before: Here | None = None
) -> Subject:
    """The target of the settings on this machine; `before`: of the same one in other weights."""
    if model := configuration.settings.target.model:
        read_config(folder_of(model), "target model")  # an error before anything is measured
    here = look_here(configuration, say, before)
    target = configuration.settings.target
    subject = Subject(
        configuration, here.design, here.hardware, here.device, here.draft_device, target.weights
    )
    subject.embedded, subject.here = not target.model, here
    subject.prices = price(
        subject.hardware,
        subject.target,
        here.design.width(target.weights),
        here.calibration,
        here.parts,
    )
    return subject


def folder_of(source: str) -> Path:
    """Return the folder of a model: the one that is named, or of a hub id one with its
    config.json."""
    folder = Path(resolved(source)).expanduser()
    if not folder.is_dir() and (folder.exists() or is_path(source)):
        raise CheckpointError(
            f"{source} is not a folder with a config.json, a GGUF file or a hub id (OWNER/NAME)"
        )
    from dovetail.workers.models.checkpoints.hub import CONFIG_ALONE, find_folder  # half a second

    return find_folder(str(folder), files=CONFIG_ALONE)
