"""A target on a machine for the planner: sizes, costs and drafts; for this machine the results of
`dovetail calibrate`, limits and GPUs. Functions import torch, with as many threads as the target
has cores."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dovetail.launch.files.directory import profile_path
from dovetail.launch.machine.cores import CoreLayout
from dovetail.launch.machine.others import OTHERS, Others
from dovetail.launch.machine.sharding import choice_of, layouts_for, nodes_of_layouts
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.planning.candidates import Candidate
from dovetail.launch.planning.designs import LOOKUP, Design, design_of, loss_of, read_config
from dovetail.launch.planning.planner import (
    HERE,
    MEASURED,
    Draft,
    Engine,
    Hardware,
    Machine,
    Option,
    Places,
    Planner,
    Target,
    by_budget,
)
from dovetail.launch.planning.words import settings, told, tree_of, verdict
from dovetail.launch.processes.nursery import thread_environment
from dovetail.launch.processes.preflight import free_memory_bytes, is_path
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.models import with_draft, with_target
from dovetail.protocol.calibration import Calibration, DeviceCosts, MachineLimits, RowsSeconds
from dovetail.protocol.errors import CheckpointError, UserError
from dovetail.protocol.experts import DENSE
from dovetail.protocol.profile import load_profile, machine_key
from dovetail.protocol.settings import Settings
from dovetail.runtime.costs.rounds import Origin
from dovetail.workers import kernels
from dovetail.workers.models.checkpoints.gguf.view import FILE, resolved, weight_paths
from dovetail.workers.models.checkpoints.hub import CONFIG_ALONE, find_folder

GPU = "cuda:0"  # the GPU of a described machine
PROBE_S = 0.5
STAND_IN_SHARE = 0.5
"""Share of the bandwidth that a copy within the CPU's memory reaches, since it reads and writes."""
LAYER_US = 75.0
"""Time of a layer in addition to its bytes or its products: 2.3 of the 6.0 ms of a pass over the 30
layers of SmolLM2-135M in Q4_1 on one core of a Zen 4, and more of Gemma 3 270M's."""
OF_ANOTHER = "measured with another model"
DISTURBED = "while other programs used {:.0%} of the cores: drafts may look better than they are"
"""A lower bandwidth makes further rows of a pass look cheaper."""
KINDS = 15  # the largest number of kinds of placements, for the bar
Say = Callable[[str], None]


@dataclass(frozen=True)
class Known:
    """The known facts about a target on this machine."""

    calibration: Calibration | None
    parts: DeviceCosts | None
    layout: CoreLayout
    """The places of the processes if the target is not spread over memory nodes."""
    spread: CoreLayout | None  # the places if it is; None: it cannot be
    spread_calibration: Calibration | None
    limits: tuple[MachineLimits, str]  # the limits of the cores in use, and their origin
    disturbed: str = ""  # why these limits are unreliable, in words


@dataclass
class Subject:
    """A target on a machine, with all inputs of the planner."""

    configuration: Configuration
    design: Design
    hardware: Hardware
    device: str | None
    draft_device: str
    weights: str
    here: Known | None = None  # None: it is another machine
    embedded: bool = False
    unnamed: bool = False  # true for a target that was given by its size only
    left_out: list[str] = field(default_factory=list)
    """Kinds of placements for which there is too little memory."""
    levels: dict[str, Origin] = field(default_factory=dict)  # the origin of t_D of each draft
    falls: dict[str, str] = field(default_factory=dict)
    """Draft -> why `draft.device = auto` puts it on the CPU despite a GPU."""

    @property
    def _settings_of_target(self) -> Any:
        return self.configuration.settings.target.model_copy(update={"weights": self.weights})

    def _target(self, *, host_experts: bool = False) -> Target:
        cache = self._settings_of_target.cached
        device = self.device or GPU
        return self.design.target(self.weights, device, cache, host_experts=host_experts)

    @cached_property
    def target(self) -> Target:
        return self._target()

    @cached_property
    def machine(self) -> Machine:
        known = () if self.here is None else (self.here.calibration, self.here.parts)
        found = Machine.of(self.hardware, self.target, self.design.width(self.weights), *known)
        on_cpu = self._settings_of_target.cache == "q8"  # which no GPU supports
        return replace(found, device=None, link=None) if on_cpu else found

    @property
    def planners(self) -> list[Planner]:
        """Return the planners of the target: as a whole, with its experts on the CPU, and spread
        over memory nodes."""
        found, machine, nodes = [], self.machine, self.hardware.nodes
        if self.configuration.settings.target.numa != "shard":
            found.append(Planner(self.target, machine))
            if (apart := machine.with_host_experts(self.target.mixture)) is not None:
                found.append(Planner(self._target(host_experts=True), apart, host_experts=True))
        measured = self.here.spread_calibration if self.here is not None else None
        spread = machine.over_nodes(nodes, self.target, measured)
        if spread is not None and nodes is not None:
            found.append(Planner(self.target, spread, nodes=nodes.count))
        return found

    def search(self, candidates: Sequence[Candidate], step: Say) -> list[Option]:
        """Return the best option of each kind of placement and draft, the fastest first."""
        drafts = [draft for candidate in candidates for draft in self._drafts(candidate)]
        table = [(planner, *kind) for planner in self.planners for kind in kinds_of(planner)]
        found: list[Option | None] = []
        names: dict[str, None] = {}
        for planner, name, places, wanted in table:
            if wanted is None:
                found.append(self._best(planner, name, places, [None]))
                names |= {name: None} if places else {}
        for _, name, places, wanted in table:
            if wanted is not None and places and any(map(wanted, drafts)):
                names[name] = None
        for kind in dict.fromkeys(candidate.kind for candidate in candidates):
            for planner, name, places, wanted in table:
                if wanted is not None:
                    step(f"{name}, {kind}")
                    own = [wanted(one) for one in drafts if one.candidate.kind == kind]
                    found.append(self._best(planner, name, places, [*filter(None, own)]))
        there = [one for one in found if one is not None]
        self.left_out = [name for name in names if not any(one.name == name for one in there)]
        return sorted(there, key=lambda one: (-one.tokens_per_s, one.draft is None))

    def _best(
        self, planner: Planner, name: str, places: Places, drafts: Sequence[Draft | None]
    ) -> Option | None:
        best = planner.best(places, drafts)
        if best is None or best.draft is None:
            return best and replace(best, name=name)
        place = best.computed, best.resident
        if self._ahead(best):
            best = planner.option(*place, best.draft, best.tree, best.tau, ahead=True)
        if best.candidate.kind == LOOKUP:  # it costs nothing if it finds nothing
            alone = planner.option(*place, None, None, 1.0)
            best = replace(best, least_per_s=alone.tokens_per_s)
        return replace(best, name=name)

    def _drafts(self, candidate: Candidate) -> list[Draft]:
        """Return the variants of a candidate: separate, for a target spread over memory nodes, and
        sharing with the target. One that does not fit on the GPU is priced on the CPU."""
        hardware, measured, spread = self.hardware, None, None
        lookup = candidate.kind == LOOKUP
        if lookup:
            hardware = replace(hardware, level_s=0.0, proposal_s=0.0)
        elif self.here is not None:
            if falls := self._fall(candidate):
                self.falls[candidate.name] = falls
                hardware = replace(hardware, draft=hardware.core or hardware.draft)
            measured, spread = (
                self._measured_level(candidate, layout)
                for layout in (self.here.layout, self.here.spread or self.here.layout)
            )
        if not lookup:
            origin = MEASURED if measured is not None else hardware.draft.origin
            self.levels[candidate.name] = origin
        on_device = self.device is not None and self._place_of(candidate) == self.device

        def own(known: RowsSeconds | None) -> Draft:
            level_s = candidate.size.level_s(hardware, known)
            return candidate.draft(level_s, hardware.proposal_s, on_device=on_device)

        found = [own(measured)]
        if self.hardware.nodes is not None:
            found.append(replace(own(spread), spread=True))
        device = self.machine.device
        if candidate.kind == "substitute" and on_device and device is not None:
            level_s = candidate.size.level_s(self.hardware, measured, device.layer_s)
            found.append(candidate.shared(level_s, hardware.proposal_s))
        return found

    def _fall(self, candidate: Candidate) -> str:
        """Return why `draft.device = auto` puts a draft on the CPU despite a GPU: it did so at the
        last start, or the GPU has too little memory. Empty: the GPU drafts."""
        assert self.here is not None
        if self.configuration.settings.draft.device != "auto" or self.draft_device == "cpu":
            return ""
        from dovetail.workers.devices.opening import open_device
        from dovetail.workers.drafters.trial import fall_key

        size, room = candidate.size.bytes, self.hardware.device_bytes
        if room is not None and size > room:
            return f"it takes {size / 1e9:.3g} GB, and the GPU has room for {room / 1e9:.3g}"
        opened = open_device(self.draft_device, len(self.here.layout.draft.cores))
        target = with_target(self.configuration.settings.target).model
        key = fall_key(with_draft(candidate.settings), target, opened)
        why = load_profile(profile_path()).fall_of(key)
        return f"as at its last start: {why}" if why else ""

    def _measured_level(self, candidate: Candidate, layout: CoreLayout) -> RowsSeconds | None:
        """Return the measured t_D of a draft with its cores in this layout; None: not measured."""
        if candidate.lacks and candidate.kind != "substitute":
            return None
        from dovetail.workers.devices.opening import open_device
        from dovetail.workers.drafters.levels import expected_levels

        target = with_target(self.configuration.settings.target)
        weights = weight_paths(Path(target.model).expanduser())
        if candidate.kind in ("mtp", "substitute") and not any(weights):
            return None
        opened = open_device(self._place_of(candidate), len(layout.draft.cores))
        found = expected_levels(
            profile_path(),
            with_draft(candidate.settings),
            target=target.model,
            vocabulary_size=self.design.vocabulary,
            library=opened.library,
        )
        return found.t_v if found is not None else None

    def _place_of(self, candidate: Candidate) -> str:
        return "cpu" if candidate.name in self.falls else self.draft_device

    def _ahead(self, option: Option) -> bool:
        """Return whether target and draft have separate cores or devices: on a GPU the draft shares
        it with the target's part there; on a CPU it may have a core of the target."""
        assert option.draft is not None
        if option.draft.shares:
            return False
        falls = option.draft.name in self.falls
        if (falls or self.draft_device == "cpu") and self.here is not None:
            layout = (self.here.spread if option.nodes > 1 else None) or self.here.layout
            return not layout.shared
        apart = self.device in (None, "cpu") or self.draft_device != self.device
        return apart or not option.computed

    def _measurable(self) -> str:
        """The flags of calibrations that would replace estimates by measurements; none for another
        machine."""
        origins = (*self.machine.origins.values(), *self.levels.values())
        if self.here is None or not any(origin.estimated for origin in origins):
            return ""
        typed = self.configuration.typed("target")
        target = [flag for flag in typed if not flag.startswith("--target.split")]
        # layers on a device are measured with random weights, not with blocks of a file
        beside = self.device if self.weights != FILE else None
        device = [f"--target.split.device={beside}"] if beside else []
        return " ".join([*target, *device, "--draft DRAFT"])

    def result(self, every: Sequence[Option]) -> dict[str, Any]:
        alone = next((one for one in every if one.draft is None), None)
        rows = [told(one, self.device or "cpu", self._settings(one), alone) for one in every]
        ready, hardware, origins = ready_of(every), self.hardware, self.machine.origins
        there = {one.candidate.name: one.candidate for one in every if one.draft is not None}
        limits = {"vram_gb": hardware.device_bytes, "ram_gb": hardware.host_bytes}
        said = {name: str(origin) for name, origin in origins.items()}
        levels = ((name, self.levels[name]) for name in there if name in self.levels)
        said |= {f"a level of the {name}": str(origin) for name, origin in levels}
        said |= {f"acceptance of the {name}": one.acceptance.origin for name, one in there.items()}
        read, link, layer = self.read_bytes, self.machine.link, self.target.layer
        return {
            "machine": hardware.title,
            "device": self.device,
            "kernels": "" if self.here is None else kernels.in_words(),
            "device_says": self._device_says(),
            "left_out": list(self.left_out),
            "falls": dict(self.falls),
            "weights": self.weights,
            "layers": self.target.layers,
            "parameters": self.design.parameters,
            "active_parameters": self.design.active,
            "limits": {name: size and size / 1e9 for name, size in limits.items()},
            "origins": said,
            "measurable": self._measurable(),
            "uncalibrated": self.here is not None and any(o.estimated for o in origins.values()),
            "alternatives": rows,
            "choice": rows[0],
            "at_once": None if ready is None else rows[every.index(ready)],
            "verdict": verdict(every, read, link, layer, dense=self.design.mixture is DENSE),
        }

    def brief(self, every: Sequence[Option]) -> dict[str, Any]:
        """Return the row for these weights in a comparison of weights: the best alternative,
        preferably one that is ready; empty if nothing fits."""
        best = ready_of(every) or next(iter(every), None)
        activations = self.configuration.settings.target.activations
        return {
            "weights": self.weights,
            "gb": self.read_bytes / 1e9,
            "tokens_per_s": None if best is None else best.tokens_per_s,
            "tree": None if best is None else tree_of(best),
            "computes": loss_of(self.weights, activations, self._settings_of_target.cached),
        }

    @property
    def read_bytes(self) -> int:
        return self.target.layers * self.target.layer + self.target.head

    def _device_says(self) -> str:
        if self.device:
            return ""
        in_turns = self.here is not None and bool(self.here.layout.shared)
        place = "in turns with the target" if in_turns else "on a separate core"
        said = f"there is no GPU here: everything is on the CPU, and a draft {place}"
        if self.configuration.settings.memory.vram == "auto":
            return said
        remedy = "--target.split.device=cpu uses the CPU in place of a GPU"
        return f"{said}; memory.vram has no effect: {remedy}"

    def _settings(self, one: Option) -> dict[str, Any]:
        """Return the settings that start an option. They keep a target on one node if `auto` would
        spread it because of measurements."""
        own: dict[str, Any] = {"target.weights": self.weights}
        here = self.here if self.here is not None and self.here.spread is not None else None
        if here and one.nodes == 1 and choice_of(self._settings_of_target).numa == "shard":
            own["target.numa"] = format_numbers(here.layout.target.nodes)
        draft = self.draft_device if one.draft is None else self._place_of(one.candidate)
        return settings(one, self.device or "cpu", draft, self.configuration.over("plan", own))


def kinds_of(
    planner: Planner,
) -> list[tuple[str, Places, Callable[[Draft], Draft | None] | None]]:
    """Return the kinds of placements that a plan compares: name, places, and the variant of a draft
    for them; None: without a draft."""

    def own(draft: Draft) -> Draft | None:
        return None if draft.shares or draft.spread else draft

    def large(draft: Draft) -> Draft | None:
        return None if own(draft) is None else by_budget(draft)

    cpu, split, whole = planner.on_cpu(), planner.split(), planner.whole()
    if planner.nodes > 1:
        return [
            ("target alone, over memory nodes", cpu, None),
            ("Dovetail, over memory nodes", cpu, lambda draft: draft if draft.spread else None),
        ]
    if planner.host_experts:
        both = [*split, *whole]
        return [("experts on the CPU", both, None), ("Dovetail, experts on the CPU", both, own)]
    streamed = planner.streamed()
    return [
        ("target alone", cpu, None),
        ("split target alone", split, None),
        ("plain offloading", streamed, None),
        ("all on the device", whole, None),
        ("Dovetail", cpu, own),
        ("Dovetail, split target", split, own),
        ("Dovetail, some layers streamed", planner.mixed(), own),
        ("offloading with a draft", streamed, own),
        ("offloading with a large tree (SpecExec)", streamed, large),
        ("all on the device, with a draft", whole, own),
        ("SubSpec", [*streamed, *whole], lambda draft: draft if draft.shares else None),
    ]


def ready_of(every: Sequence[Option]) -> Option | None:
    """Return the fastest of these alternatives that is ready to start. `plan` proposes it, and
    `serve` uses its draft."""
    return next((one for one in every if one.draft is None or not one.candidate.lacks), None)


def subject_here(configuration: Configuration, say: Say, before: Subject | None = None) -> Subject:
    """Return the settings' target on this machine; unknown costs are measured within a second, or
    estimated. `before`: the same target with other weights."""
    settings = configuration.settings
    if settings.target.model:
        read_config(folder_of(settings.target.model), "target model")  # before anything is measured
    layout, spread = layouts_for(settings.target)
    threads = len(layout.target.cores)
    os.environ.update(thread_environment(threads))
    device = _device_of(settings)
    from dovetail.workers.calibration.devices import known_costs, planned_config
    from dovetail.workers.calibration.limits import measure_limits
    from dovetail.workers.calibration.products import product_seconds
    from dovetail.workers.devices.opening import open_device
    from dovetail.workers.models.backends.sizes import has_sizes

    open_device("cpu", threads)
    target, path = with_target(settings.target), profile_path()
    if kernels.available():
        kernels.use_isa(kernels.isa_of(target.isa), "target.isa")
    config = planned_config(target)
    if not has_sizes(config):
        raise UserError(f"the config.json of a {config.get('model_type')} model lacks its sizes")
    say("reading the known facts about this machine")
    known, profile = known_costs(target, path, device=device or "cpu"), load_profile(path)
    spread_calibration, nodes = None, None
    if spread is not None:
        over = {"shards": len(spread.target.shards), "threads": len(spread.target.cores)}
        spread_calibration = known_costs(target, path, device="cpu", **over).calibration
        nodes = nodes_of_layouts(layout, spread, profile)
    folder, calibration = find_folder(target.model, files=CONFIG_ALONE), known.calibration
    own_entries = (entry for entry in profile.entries if entry.key.machine == machine_key())
    kept = [one for entry in own_entries for one in entry.calibrations]
    products, disturbed = None, ""
    if calibration is not None:
        limits = calibration.limits, "measured"
    else:
        say(f"measuring products with {target.weights} weights")
        products = product_seconds(target.weights, folder, target.activations)
        alike = [one.limits for one in kept if one.limits.probe == kernels.computing()]
        if before is not None and before.here is not None:
            limits, disturbed = before.here.limits, before.here.disturbed
        elif alike:
            limits = alike[-1], OF_ANOTHER
        else:
            say("measuring the memory bandwidth and arithmetic")
            others, source = Others(), f"measured now, in {PROBE_S:g} s"
            found = measure_limits(PROBE_S)
            load = others.load(lambda pid, _: pid == os.getpid())
            if load is not None and load.share > OTHERS:
                disturbed = DISTURBED.format(load.share)
                source += f", {disturbed}"
            limits = found, source
    hardware = replace(_hardware(settings, device, limits, products, threads), nodes=nodes)
    own = [] if calibration is None else [(calibration, "measured")]
    for one, words in (*own, *((one, OF_ANOTHER) for one in reversed(kept))):
        if one.overhead_s:
            origin = Origin(f"{1e3 * one.overhead_s:.2g} ms ({words})")
            messages = HERE.scaled(one.overhead_s)
            hardware = replace(hardware, messages=messages, messages_from=origin)
            break
    parts = known.parts if device is not None else None
    draft = settings.draft.device if settings.draft.device != "auto" else device or "cpu"
    return Subject(
        *(configuration, design_of(config, folder), hardware, device, draft),
        settings.target.weights,
        Known(calibration, parts, layout, spread, spread_calibration, limits, disturbed),
        embedded=not settings.target.model,
    )


def _device_of(settings: Settings) -> str | None:
    """The requested device other than the CPU, or the first GPU; None without one. The CPU counts
    as one if a split names it."""
    if settings.target.split.device:
        return settings.target.split.device
    if settings.target.device != "cpu":
        return settings.target.device
    from dovetail.workers.devices.opening import first_device

    return None if (found := first_device()) == "cpu" else found


def _hardware(
    settings: Settings,
    device: str | None,
    limits_there: tuple[MachineLimits, str],
    products: RowsSeconds | None,
    threads: int,
) -> Hardware:
    (limits, source), memory = limits_there, settings.memory
    peak = limits.peak_of(settings.target.weights, library=False)
    source = f"{source}; {LAYER_US:g} us a layer assumed"
    host = Engine(limits.bandwidth_gb_s, peak, LAYER_US, source=source, products=products)
    single = limits.peak_gflop_s["fp32"] / threads
    core = Engine(limits.bandwidth_gb_s, single, LAYER_US, source=f"{source}; a core's share")
    ram = memory.ram_bytes if memory.ram_bytes is not None else free_memory_bytes()
    if device is None:
        return Hardware("this machine", host, None, core, host_bytes=ram)
    if device == "cpu":
        return Hardware(
            *("this machine, with its CPU in place of a GPU", host, host, core),
            *(STAND_IN_SHARE * limits.bandwidth_gb_s, "half of the bandwidth"),
            overlaps=False,
            device_bytes=memory.vram_bytes if memory.vram_bytes is not None else ram,
            host_bytes=ram,
        )
    from dovetail.workers.calibration.devices import probe_device
    from dovetail.workers.devices.opening import open_device
    from dovetail.workers.serving.spread import FREE_SHARE

    opened = open_device(device, threads)
    free = int(FREE_SHARE * opened.free_bytes())
    found = probe_device(opened)
    return Hardware(
        *(f"this machine with {opened.name}", host),
        Engine(found.read_gb_s, found.gflop_s, source="measured now"),
        Engine(found.read_gb_s, found.half_gflop_s, source="measured now"),
        found.link_gb_s,
        "measured now",
        device_bytes=free if memory.vram_bytes is None else min(free, memory.vram_bytes),
        host_bytes=ram,
        core=core,
    )


def folder_of(source: str) -> Path:
    """Return the folder of a model: the named one or, for a hub id, one with its config.json."""
    folder = Path(resolved(source)).expanduser()
    if not folder.is_dir() and (folder.exists() or is_path(source)):
        wanted = "a folder with a config.json, a GGUF file or a hub id (OWNER/NAME)"
        raise CheckpointError(f"{source} is not {wanted}")
    return find_folder(str(folder), files=CONFIG_ALONE)
