"""Costs of a model's parts on a machine, each with its origin: measured by `dovetail calibrate`, or
estimated by the roofline (the larger of reading the bytes and computing the products) and a
constant for each layer."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from dovetail.launch.planning.designs import DraftSize
from dovetail.launch.planning.machines import GIGA, MICRO
from dovetail.launch.planning.machines import Machine as Described
from dovetail.protocol.calibration import (
    STATELESS,
    Calibration,
    DeviceCosts,
    ExpertCosts,
    LeastTime,
    RowsSeconds,
    StateTraffic,
)
from dovetail.protocol.experts import DENSE, Mixture
from dovetail.runtime.costs.nodes import Nodes
from dovetail.runtime.costs.passes import curves_of
from dovetail.runtime.costs.rounds import Messages, Origin
from dovetail.runtime.planner import Link, Machine, Place, Seconds, Target
from dovetail.workers.models.backends.sizes import INT4
from dovetail.workers.models.checkpoints.gguf.view import FILE

HERE = Messages(300e-6, 500e-6, 400e-6)
"""Seconds of a message over ipc, of the coordinator for a message (both right after a pass over
half a gigabyte, which evicts the caches), and of HTTP for a token. Without its pass a round of the
target alone took 0.95 ms, one with a draft 2.4 ms; HTTP used 0.4 ms of CPU
time. `dovetail calibrate` measures their sum."""
CONTEXT = 128.0
"""Context length at which passes are priced: about the middle of a question and its reply."""
LEVEL_S, PROPOSAL_S = 150e-6, 700e-6
"""Ranking of one level of a tree, and a proposal without the draft's passes; same rounds."""
FP32_SHARE = 0.5
"""Share of a GPU's 16-bit arithmetic in fp32, in which a target's layers are computed."""


CROSSING_S = 50e-6
"""States to the CPU and back for experts, a layer: two waits, 16 x 4096 numbers at 16 GB/s."""


MEASURED = Origin("measured")
ASSUMED = Origin("assumed; dovetail calibrate measures them", estimated=True)
INDEPENDENT = Origin("as if rows chose independently of each other", estimated=True)
SOME_ROWS = 8  # rows of the pass for which `plan` prints the number of experts


@dataclass(frozen=True)
class Engine:
    """The limits of a device that computes."""

    bandwidth_gb_s: float
    gflop_s: float
    layer_us: float = 0.0
    pass_us: float = 0.0
    source: str = "measured"  # the origin of these figures
    products: RowsSeconds | None = None
    """Seconds per weight over rows, if products with such weights were measured."""

    def seconds(
        self,
        weights: float,
        size: float,
        layers: float = 0.0,
        passes: float = 0.0,
        mixture: Mixture = DENSE,
        states: StateTraffic = STATELESS,
    ) -> Seconds:
        """Return the seconds of this many weights of this many bytes, and of states, over rows."""
        beside = (layers * self.layer_us + passes * self.pass_us) * MICRO
        least = LeastTime.of(
            size=size,
            operations=2 * weights,
            bandwidth_gb_s=self.bandwidth_gb_s,
            gflop_s=self.gflop_s,
            mixture=mixture,
            states=states,
        )
        products = self.products
        if products is None:
            return lambda rows: least.at(rows) + beside

        def measured(rows: int) -> float:
            share = mixture.read(rows)
            each = max(1, round(rows * mixture.active / share))
            return max(least.at(rows), weights * share * products.at(each)) + beside

        return cache(measured)

    @property
    def origin(self) -> Origin:
        """Return the provenance of seconds that come of these limits."""
        rate = f"{self.gflop_s:.4g} GFLOP/s" if self.products is None else "products"
        limits = f"{self.bandwidth_gb_s:.4g} GB/s and {rate}"
        return Origin(f"estimated from {limits} ({self.source})", estimated=True)


@dataclass(frozen=True)
class Hardware:
    """A machine: this one, or one of the descriptions."""

    title: str
    host: Engine | None
    device: Engine | None  # the GPU; None: there is only the CPU
    draft: Engine  # the device of drafts: the device, or a separate core
    link_gb_s: float = 0.0
    link: str = ""  # the origin of that
    overlaps: bool = True
    device_bytes: int | None = None
    host_bytes: int | None = None
    messages: Messages = HERE
    messages_from: Origin = ASSUMED
    level_s: float = LEVEL_S
    """Seconds of a level without the draft's pass; `proposal_s`: of a proposal."""
    proposal_s: float = PROPOSAL_S
    core: Engine | None = None
    """The core that drafts if the GPU cannot; None: `draft` stands for it."""
    nodes: Nodes | None = None
    """Nodes over which the host can spread a target (limits of one of them); None: one."""


def arithmetic(weights: str) -> str:
    """Return the weights whose arithmetic is that of the given ones: blocks are computed with
    activations in int8."""
    return "int8" if weights in (FILE, INT4) else weights


def described(machine: Described, weights: str, vram: int | None, ram: int | None) -> Hardware:
    """A described machine, for a target with these weights."""
    weights, source = arithmetic(weights), "its description"
    target, draft, memory, own = machine.target, machine.draft, machine.memory, machine.host
    peak = target.peak_gflop_s[weights]  # type: ignore[index]  # checked by who asks
    host: Engine | None
    if machine.shared:
        near = target.resident_bandwidth_gb_s or target.bandwidth_gb_s
        device = Engine(near, peak, target.layer_us, source=source)
        host = None
        if own is not None:
            peak = own.peak_gflop_s[weights]  # type: ignore[index]
            host = Engine(own.bandwidth_gb_s, peak, own.layer_us, source=source)
    else:
        share = FP32_SHARE if weights == "fp32" else 1.0
        gflop_s = share * draft.peak_gflop_s
        device = Engine(draft.bandwidth_gb_s, gflop_s, draft.block_us, source=source)
        host = Engine(target.bandwidth_gb_s, peak, target.layer_us, source=source)
    if memory is not None:
        vram = round(memory.vram_gb * GIGA) if vram is None else vram
        ram = round(memory.ram_gb * GIGA) if ram is None else ram
    return Hardware(
        title=machine.title,
        host=host,
        device=device if memory is not None else None,
        draft=Engine(
            draft.bandwidth_gb_s, draft.peak_gflop_s, draft.block_us, draft.pass_us, source
        ),
        link_gb_s=memory.link_gb_s if memory is not None else 0.0,
        link=source,
        device_bytes=vram,
        host_bytes=ram,
        messages=machine.link.messages,
        messages_from=Origin(source, estimated=True),
        level_s=0.0,
        proposal_s=0.0,
        nodes=None if machine.shared else target.spread,
    )


@dataclass
class Prices:
    """The machine as the planner takes it, and the origin of each of its numbers."""

    machine: Machine
    origins: dict[str, Origin] = field(default_factory=dict)


def price(
    hardware: Hardware,
    target: Target,
    width: float,
    calibration: Calibration | None = None,
    parts: DeviceCosts | None = None,
) -> Prices:
    """Costs of a target's parts, measured ones if available; `width`: bytes of a weight."""
    origins = {"messages of a round": hardware.messages_from}
    host: Place | None = None
    device: Place | None = None
    link: Link | None = None
    if hardware.host is not None:
        if calibration is not None:
            passes, host = _measured(calibration), _shared(calibration, target)
            if calibration.experts is not None and calibration.experts.passes:
                origins["experts of a pass"] = _experts(calibration.experts)
        elif parts is not None:
            passes, host = MEASURED, Place(cache(parts.host_layer.at), cache(parts.host_head.at))
        else:
            passes, host = hardware.host.origin, _estimated(hardware.host, target, width)
            if target.mixture.share:
                origins["experts of a pass"] = INDEPENDENT
        origins["passes of the CPU"] = passes
    if hardware.device is not None:
        rate = parts.link_gb_s if parts is not None else hardware.link_gb_s
        copy_s = target.layer / (rate * GIGA)
        link = Link(lambda rows: copy_s, hardware.overlaps)
        if parts is not None:
            origins["layers on the device"] = MEASURED
            origins["the link"] = Origin(f"{rate:.4g} GB/s (measured)")
            device = Place(cache(parts.layer.at), cache(parts.head.at))
            if not hardware.overlaps:
                streamed, layer = parts.streamed, parts.layer
                wait_s = cache(lambda rows: max(0.0, streamed.at(rows) - layer.at(rows)))
                link = Link(wait_s, overlaps=False)
        else:
            origins["layers on the device"] = hardware.device.origin
            origins["the link"] = Origin(f"{rate:.4g} GB/s ({hardware.link})", estimated=True)
            device = _estimated(hardware.device, target, width)
    limits = hardware.device_bytes, hardware.host_bytes, hardware.messages
    return Prices(Machine(host, device, link, *limits), origins)


def _measured(calibration: Calibration) -> Origin:
    return Origin(f"measured, {calibration.measured[:10]}")


def _estimated(engine: Engine, target: Target, width: float) -> Place:
    weights_of = target.layer / width
    return Place(
        engine.seconds(weights_of, target.layer, 1.0, mixture=target.mixture, states=target.states),
        engine.seconds(target.head / width, target.head),
    )


def _experts(experts: ExpertCosts) -> Origin:
    routing, rows = experts.routing, SOME_ROWS
    through = f"{experts.measured(rows):.0f} of {routing.most} over {rows} rows"
    words = f"{through}, {experts.expert_s / MICRO:.3g} us each (measured)"
    return Origin(words)


def _shared(calibration: Calibration, target: Target) -> Place:
    """Passes over the whole, shared out by bytes."""
    curves = curves_of(calibration)
    whole = target.layers * target.layer + target.head
    layer, head = target.layer / whole, target.head / whole
    return Place(
        cache(lambda rows: layer * curves.at(rows, CONTEXT)),
        cache(lambda rows: head * curves.at(rows, CONTEXT)),
    )


def over_nodes(
    prices: Prices, hardware: Hardware, target: Target, calibration: Calibration | None = None
) -> Machine | None:
    """Return the machine whose host spreads the target over its memory nodes, and note the source
    of the costs; None if it cannot. `calibration`: of the spread target."""
    host, nodes, origins = prices.machine.host, hardware.nodes, prices.origins
    if host is None or nodes is None:
        return None
    name = f"passes over {nodes.count} memory nodes"
    if calibration is not None:
        origins[name] = _measured(calibration)
        place = _shared(calibration, target)
    else:
        origins[name] = nodes.origin_of(origins["passes of the CPU"])
        place = Place(
            cache(lambda rows: nodes.spread_s(host.layer_s(rows), 1.0)),
            cache(lambda rows: nodes.spread_s(host.head_s(rows), 0.0)),
        )
    return replace(prices.machine, host=place, device=None, link=None)


def with_host_experts(prices: Prices, mixture: Mixture) -> Machine | None:
    """Return the machine if the CPU computes experts of layers on the device, in turn with it, or
    None. Times of a layer are divided by the weights that passes read."""
    host, device = prices.machine.host, prices.machine.device
    if host is None or device is None or not mixture.share:
        return None

    def layer_s(rows: int) -> float:
        plain = (1.0 - mixture.share) / mixture.read(rows)
        return plain * device.layer_s(rows) + (1.0 - plain) * host.layer_s(rows) + CROSSING_S

    return replace(prices.machine, device=Place(cache(layer_s), device.head_s), link=None)


def level(
    hardware: Hardware,
    size: DraftSize,
    measured: RowsSeconds | None,
    layer_s: Seconds | None = None,
) -> Callable[[int, int], float]:
    """t_D of a draft over rows, and the seconds of a level without its pass. `layer_s`: of a
    target's layer, for a draft that computes with its resident ones."""
    if measured is not None:
        whole, layers = cache(measured.at), size.layers * size.layer_bytes / size.pass_bytes
        each, rest = _times(whole, layers / size.layers), _times(whole, 1.0 - layers)
    else:
        each = hardware.draft.seconds(size.layer_weights, size.layer_bytes, 1.0)
        rest = hardware.draft.seconds(size.other_weights, size.other_bytes, passes=1.0)
    if layer_s is None:
        return lambda rows, resident: size.layers * each(rows) + rest(rows) + hardware.level_s
    return lambda rows, resident: (
        (size.layers - resident) * each(rows)
        + resident * layer_s(rows)
        + rest(rows)
        + hardware.level_s
    )


def _times(seconds: Seconds, share: float) -> Seconds:
    return lambda rows: share * seconds(rows)
