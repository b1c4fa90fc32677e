"""Collects what is known of this machine and of models on it: limits, what `dovetail calibrate` has
kept, GPUs. torch comes in with the functions, on the target's cores in number."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dovetail.launch.files.directory import profile_path
from dovetail.launch.machine.cores import CoreLayout
from dovetail.launch.machine.sharding import layouts_for, nodes_of_layouts
from dovetail.launch.planning.candidates import Candidate
from dovetail.launch.planning.designs import Design, design_of
from dovetail.launch.planning.prices import HERE, Engine, Hardware
from dovetail.launch.processes.nursery import thread_environment
from dovetail.launch.processes.preflight import free_memory_bytes
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.embedded import with_draft, with_target
from dovetail.protocol.calibration import Calibration, DeviceCosts, MachineLimits, RowsSeconds
from dovetail.protocol.errors import UserError
from dovetail.protocol.profile import load_profile, machine_key
from dovetail.protocol.settings import Settings
from dovetail.runtime.costs.rounds import Origin
from dovetail.workers import kernels
from dovetail.workers.models.checkpoints.gguf.view import weight_paths
from dovetail.workers.models.checkpoints.hub import CONFIG_ALONE, find_folder

PROBE_S = 0.5
STAND_IN_SHARE = 0.5
"""Share of the bandwidth that a copy in the CPU's memory carries: it reads and writes."""

OF_ANOTHER = "measured with another model"
Say = Callable[[str], None]


def device_of(settings: Settings) -> str | None:
    """The requested device besides the CPU, or the first GPU; None without one. The CPU counts as
    one if a split names it."""
    if settings.target.split.device:
        return settings.target.split.device
    if settings.target.device != "cpu":
        return settings.target.device
    from dovetail.workers.devices.opening import first_device

    return None if (found := first_device()) == "cpu" else found


@dataclass
class Here:
    """This machine, for one target."""

    configuration: Configuration
    device: str | None
    design: Design
    hardware: Hardware
    calibration: Calibration | None
    parts: DeviceCosts | None
    layout: CoreLayout
    """The places of the processes where the target is not spread over memory nodes."""
    spread: CoreLayout | None  # the places where it is; None: it cannot be
    spread_calibration: Calibration | None
    limits: tuple[MachineLimits, str]  # the limits of the cores in use, and their origin

    def fall(self, candidate: Candidate) -> str:
        """Return why `draft.device = auto` puts a draft on the CPU, though there is a GPU: it did
        so at the last start, or the GPU has too little memory. Empty: the GPU drafts."""
        if self.configuration.settings.draft.device != "auto" or self.draft_device == "cpu":
            return ""
        from dovetail.workers.devices.opening import open_device
        from dovetail.workers.drafters.trial import fall_key

        size, room = candidate.size.bytes, self.hardware.device_bytes
        if room is not None and size > room:
            return f"it takes {size / 1e9:.3g} GB, and the GPU has room for {room / 1e9:.3g}"
        opened = open_device(self.draft_device, len(self.layout.draft.cores))
        target = with_target(self.configuration.settings.target).model
        key = fall_key(with_draft(candidate.settings), target, opened)
        why = load_profile(profile_path()).fall_of(key)
        return f"as at its last start: {why}" if why else ""

    def level(self, candidate: Candidate, device: str, layout: CoreLayout) -> RowsSeconds | None:
        """Return t_D of a draft on a device as measured here, with its cores in this layout; None:
        not measured."""
        settings = candidate.settings
        if candidate.lacks and candidate.kind != "substitute":
            return None
        from dovetail.workers.devices.opening import open_device
        from dovetail.workers.drafters.levels import expected_levels

        target = with_target(self.configuration.settings.target)
        if candidate.kind == "substitute" and not any(
            weight_paths(Path(target.model).expanduser())
        ):
            return None
        threads = len(layout.draft.cores)
        library = open_device(device, threads).library
        found = expected_levels(
            profile_path(),
            with_draft(settings),
            target=target.model,
            vocabulary_size=self.design.vocabulary,
            library=library,
        )
        return found.t_v if found is not None else None

    @property
    def draft_device(self) -> str:
        """Return the placement of a draft."""
        wanted = self.configuration.settings.draft.device
        return wanted if wanted != "auto" else self.device or "cpu"


def look_here(configuration: Configuration, say: Say, before: Here | None = None) -> Here:
    """Return what is known of the settings' target on this machine; unknown costs are measured
    within a second, or estimated. `before`: those of the same target with other weights."""
    settings = configuration.settings
    layout, spread = layouts_for(settings.target)
    threads = len(layout.target.cores)
    os.environ.update(thread_environment(threads))
    say("looking at what is known of this machine")
    device = device_of(settings)
    from dovetail.workers.calibration.devices import known_costs, planned_config
    from dovetail.workers.calibration.products import product_seconds
    from dovetail.workers.devices.opening import open_device
    from dovetail.workers.models.backends.sizes import has_sizes

    open_device("cpu", threads)
    target = with_target(settings.target)
    if kernels.available():
        kernels.use_isa(kernels.isa_of(target.isa))
    config = planned_config(target)
    if not has_sizes(config):
        raise UserError(f"the config.json of a {config.get('model_type')} model lacks its sizes")
    profile = profile_path()
    known = known_costs(target, profile, device=device or "cpu")
    spread_calibration = None
    if spread is not None:
        over = {"shards": len(spread.target.shards), "threads": len(spread.target.cores)}
        spread_calibration = known_costs(target, profile, device="cpu", **over).calibration
    parts = known.parts if device is not None else None
    folder = find_folder(target.model, files=CONFIG_ALONE)
    calibration = known.calibration
    kept = [
        one
        for entry in load_profile(profile).entries
        if entry.key.machine == machine_key()
        for one in entry.calibrations
    ]
    limits = _limits(calibration, kept, say) if before is None or calibration else before.limits
    products = None if calibration else product_seconds(target.weights, folder, target.activations)
    hardware = _hardware(settings, device, limits, products, threads)
    sources = [(calibration, "measured"), *((one, OF_ANOTHER) for one in reversed(kept))]
    for one, words in sources:
        if one is not None and one.overhead_s:
            origin = Origin(f"{1e3 * one.overhead_s:.2g} ms ({words})")
            messages = HERE.scaled(one.overhead_s)
            hardware = replace(hardware, messages=messages, messages_from=origin)
            break
    if spread is not None:
        nodes = nodes_of_layouts(layout, spread, load_profile(profile))
        hardware = replace(hardware, nodes=nodes)
    design = design_of(config, folder)
    return Here(
        *(configuration, device, design, hardware, calibration, parts),
        *(layout, spread, spread_calibration, limits),
    )


def _limits(
    calibration: Calibration | None, kept: Sequence[Calibration], say: Say
) -> tuple[MachineLimits, str]:
    """Return the limits of the cores in use: by the target's calibration, by any other, or measured
    now."""
    if calibration is not None:
        return calibration.limits, "measured"
    from dovetail.workers.calibration.limits import measure_limits

    if alike := [one.limits for one in kept if one.limits.probe == kernels.computing()]:
        return alike[-1], OF_ANOTHER
    say("measuring bandwidth and arithmetic")
    return measure_limits(PROBE_S), f"measured now, in {PROBE_S:g} s"


def _hardware(
    settings: Settings,
    device: str | None,
    limits_there: tuple[MachineLimits, str],
    products: RowsSeconds | None,
    threads: int,
) -> Hardware:
    weights, memory = settings.target.weights, settings.memory
    limits, source = limits_there
    peak = limits.peak_of(weights, library=False)
    host = Engine(limits.bandwidth_gb_s, peak, source=source, products=products)
    core = Engine(
        limits.bandwidth_gb_s,
        limits.peak_gflop_s["fp32"] / threads,
        source=f"{source}; a core's share",
    )
    ram = memory.ram_bytes if memory.ram_bytes is not None else free_memory_bytes()
    if device is None:
        return Hardware("this machine", host, None, core, host_bytes=ram)
    if device == "cpu":
        link = STAND_IN_SHARE * limits.bandwidth_gb_s
        vram = memory.vram_bytes if memory.vram_bytes is not None else ram
        return Hardware(
            "this machine, whose CPU stands for a GPU",
            host,
            host,
            core,
            link,
            "half of the bandwidth",
            False,
            vram,
            ram,
        )
    return _with_gpu(settings, device, host, core, threads, ram)


def _with_gpu(
    settings: Settings, device: str, host: Engine, core: Engine, threads: int, ram: int
) -> Hardware:
    from dovetail.workers.calibration.devices import probe_device
    from dovetail.workers.devices.opening import open_device
    from dovetail.workers.serving.spread import FREE_SHARE

    opened = open_device(device, threads)
    free = int(FREE_SHARE * opened.free_bytes())
    vram = free if settings.memory.vram_bytes is None else min(free, settings.memory.vram_bytes)
    found = probe_device(opened)
    own = Engine(found.read_gb_s, found.gflop_s, source="measured now")
    drafts = Engine(found.read_gb_s, found.half_gflop_s, source="measured now")
    return Hardware(
        f"this machine with {opened.name}",
        host,
        own,
        drafts,
        found.link_gb_s,
        "measured now",
        True,
        vram,
        ram,
        core=core,
    )
