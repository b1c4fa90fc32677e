"""The planner: where to place the layers of a target, its head and a draft, and which tree to use,
given the cost of each in each place.

The draft is placed first, then the KV cache, then layers of the target: on the device, which keeps
their weights or streams them through two buffers, or on the CPU. The number of layers, the tree and
the draft, if there are several, are chosen together, since each changes the value of the others: a
layer on the CPU costs more with every row of the tree, a streamed one almost nothing. The spaces
are small enough to search exhaustively.

A round takes T_D, the draft's levels; T_V(gamma + 1), the target's pass; and messages. It yields
the tree's expected tokens, given by the caller. Pure: numbers in, numbers out, without files or
models."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil
from typing import Any

from dovetail.protocol.calibration import (
    STATELESS,
    Calibration,
    DeviceCosts,
    LeastTime,
    RowsSeconds,
    StateTraffic,
)
from dovetail.protocol.experts import DENSE, Mixture
from dovetail.protocol.settings.tree import POLICIES
from dovetail.runtime.costs.passes import curves_of
from dovetail.runtime.costs.rounds import NO_MESSAGES, Messages, Nodes, Origin, PairCosts

Seconds = Callable[[int], float]  # returns the seconds of a pass over this many rows
BUFFERS = 2  # buffers of streamed layers (`workers/models/backends/placement.py`)
LEAST_BUDGET = 128  # usual nodes of trees in offloading (SpecExec; the Dovetail paper's Table 4)
GIGA, MICRO = 1e9, 1e-6


@dataclass(frozen=True)
class Tree:
    """A tree as in the settings; gamma 0: none."""

    policy: str
    gamma: int
    depth: int
    width: int

    def passes(self) -> Iterator[tuple[int, float]]:
        """Yield the most rows of each draft pass: the root's, then those of levels, or as many as
        `budget` expands."""
        yield 1, 1.0
        more = (
            self.depth - 1
            if POLICIES[self.policy].pass_a_level
            else max(self.depth, ceil(self.gamma / self.width)) - 1
        )
        for _ in range(more):
            yield min(self.width, self.gamma), 1.0


LONGER, WIDEST = 1.3, 64
"""A pass ahead of time takes at most this multiple of one as wide as the tree, and has at most this
many rows (`workers/speculation/prices.py`, `workers/drafters/ahead.py`)."""
Bytes = Callable[[int, int], int]
"""Returns the bytes, on device or host, of this many computed and resident layers."""


@dataclass(frozen=True)
class Target:
    """A target's parts, in bytes."""

    layers: int
    layer: int
    head: int
    device_bytes: Bytes
    """Weights, buffers, keys and values, a pass; not called for an unused device."""
    host_bytes: Bytes
    mixture: Mixture = DENSE  # experts, and their share of a layer
    states: StateTraffic = STATELESS  # the traffic of a layer's states


HERE = Messages(300e-6, 500e-6, 400e-6)
"""Seconds of a message over ipc, of the coordinator for a message (both right after a pass over
half a gigabyte, which evicts the caches), and of HTTP for a token. Apart from the pass, a round of
the target alone took 0.95 ms and one with a draft 2.4 ms; HTTP used 0.4 ms of CPU time. `dovetail
calibrate` measures their sum."""
CONTEXT = 128.0
"""Context length for which passes are priced: about the middle of a question and its reply."""
LEVEL_S, PROPOSAL_S = 150e-6, 700e-6
"""Seconds for ranking a level of a tree, and for a proposal without passes; same rounds."""
CROSSING_S = 50e-6
"""Seconds per layer to move states to experts and back: two waits, 64 Ki numbers at 16 GB/s."""
MEASURED = Origin("measured")
ASSUMED = Origin("assumed; dovetail calibrate measures them", estimated=True)
INDEPENDENT = Origin("as if rows chose independently of each other", estimated=True)
SOME_ROWS = 8  # rows of the pass for which `plan` prints the number of experts


@dataclass(frozen=True)
class Engine:
    """The limits of a device."""

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
        """Return the seconds of this many weights of this many bytes, and of states, over rows: the
        larger of reading the bytes and computing the products, and a constant."""
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
        """Return the origin of seconds estimated from these limits."""
        rate = f"{self.gflop_s:.4g} GFLOP/s" if self.products is None else "products"
        limits = f"{self.bandwidth_gb_s:.4g} GB/s and {rate}"
        return Origin(f"estimated from {limits} ({self.source})", estimated=True)


@dataclass(frozen=True)
class Hardware:
    """The limits of a machine: this one, or one of the descriptions."""

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
    """The core that drafts if the GPU cannot; None: `draft`."""
    nodes: Nodes | None = None
    """Nodes over which the host can spread a target (limits of one of them); None: one."""


@dataclass(frozen=True)
class PartCosts:
    """Costs of the target's parts on the host, or on a device with its own memory."""

    layer_s: Seconds
    head_s: Seconds

    @classmethod
    def estimated(cls, engine: Engine, target: Target, width: float) -> "PartCosts":
        """Costs from the limits of an engine; `width`: bytes of a weight."""
        return cls(
            engine.seconds(
                target.layer / width, target.layer, 1.0, 0.0, target.mixture, target.states
            ),
            engine.seconds(target.head / width, target.head),
        )

    @classmethod
    def shared_out(cls, calibration: Calibration, target: Target) -> "PartCosts":
        """Measured passes over the whole target, divided among its parts by bytes."""
        curves = curves_of(calibration)
        whole = target.layers * target.layer + target.head
        layer, head = target.layer / whole, target.head / whole
        return cls(
            cache(lambda rows: layer * curves.at(rows, CONTEXT)),
            cache(lambda rows: head * curves.at(rows, CONTEXT)),
        )


@dataclass(frozen=True)
class Link:
    """The link over which layers are streamed."""

    layer_s: Seconds  # seconds of copying one layer during a pass over this many rows
    overlaps: (
        bool  # True if copies do not slow down computing; False if the CPU takes the place of a GPU
    )


@dataclass(frozen=True)
class Machine:
    """The costs of a target on a machine: on its device, its host, and the link between them."""

    host: PartCosts | None
    device: PartCosts | None
    link: Link | None
    device_bytes: int | None = None
    """The most bytes of the device for target and draft; None: no limit."""
    host_bytes: int | None = None
    messages: Messages | PairCosts = NO_MESSAGES  # estimated, or measured in a pair's rounds
    origins: dict[str, Origin] = field(default_factory=dict)  # of each of these numbers

    @classmethod
    def of(
        cls,
        hardware: Hardware,
        target: Target,
        width: float,
        calibration: Calibration | None = None,
        parts: DeviceCosts | None = None,
    ) -> "Machine":
        """Costs of a target's parts, measured ones if available; `width`: bytes of a weight."""
        origins = {"messages of a round": hardware.messages_from}
        host: PartCosts | None = None
        device: PartCosts | None = None
        link: Link | None = None
        if hardware.host is not None:
            if calibration is not None:
                passes, host = _measured(calibration), PartCosts.shared_out(calibration, target)
                if (experts := calibration.experts) is not None and experts.passes:
                    used = f"{experts.measured(SOME_ROWS):.0f} of {experts.routing.most}"
                    each = f"{experts.expert_s / MICRO:.3g} us each (measured)"
                    words = f"{used} over {SOME_ROWS} rows, {each}"
                    origins["experts of a pass"] = Origin(words)
            elif parts is not None:
                passes = MEASURED
                host = PartCosts(cache(parts.host_layer.at), cache(parts.host_head.at))
            else:
                passes, host = (
                    hardware.host.origin,
                    PartCosts.estimated(hardware.host, target, width),
                )
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
                device = PartCosts(cache(parts.layer.at), cache(parts.head.at))
                if not hardware.overlaps:
                    streamed, layer = parts.streamed, parts.layer
                    wait_s = cache(lambda rows: max(0.0, streamed.at(rows) - layer.at(rows)))
                    link = Link(wait_s, overlaps=False)
            else:
                origins["layers on the device"] = hardware.device.origin
                origins["the link"] = Origin(f"{rate:.4g} GB/s ({hardware.link})", estimated=True)
                device = PartCosts.estimated(hardware.device, target, width)
        limits = hardware.device_bytes, hardware.host_bytes, hardware.messages
        return cls(host, device, link, *limits, origins)

    def over_nodes(
        self, nodes: Nodes | None, target: Target, calibration: Calibration | None
    ) -> "Machine | None":
        """Return the machine whose host spreads the target over its memory nodes, and record the
        source of the costs; None if impossible. `calibration`: of the spread target."""
        host = self.host
        if host is None or nodes is None:
            return None
        name = f"passes over {nodes.count} memory nodes"
        if calibration is not None:
            self.origins[name] = _measured(calibration)
            place = PartCosts.shared_out(calibration, target)
        else:
            self.origins[name] = nodes.origin_of(self.origins["passes of the CPU"])
            place = PartCosts(
                cache(lambda rows: nodes.spread_s(host.layer_s(rows), 1.0)),
                cache(lambda rows: nodes.spread_s(host.head_s(rows), 0.0)),
            )
        return replace(self, host=place, device=None, link=None)

    def with_host_experts(self, mixture: Mixture) -> "Machine | None":
        """Return the machine if the CPU computes experts of layers on the device, in turn with it,
        or None. Times of a layer are divided by the weights that passes read."""
        host, device = self.host, self.device
        if host is None or device is None or not mixture.share:
            return None

        def layer_s(rows: int) -> float:
            plain = (1.0 - mixture.share) / mixture.read(rows)
            return plain * device.layer_s(rows) + (1.0 - plain) * host.layer_s(rows) + CROSSING_S

        return replace(self, device=PartCosts(cache(layer_s), device.head_s), link=None)


def _measured(calibration: Calibration) -> Origin:
    return Origin(f"measured, {calibration.measured[:10]}")


@dataclass(frozen=True)
class Draft:
    """A candidate draft."""

    name: str
    level_s: Callable[[int, int], float]
    """Return the seconds of a pass over rows with this many resident layers."""
    device_bytes: Callable[[int], int]
    """Return its bytes on the device with this many resident layers; `host_bytes`: on the host."""
    host_bytes: int
    tokens: Callable[[Tree], float]
    """Returns the mean tokens of a round with a tree, including the target's own."""
    trees: Sequence[Tree]
    passes: Callable[[Tree, float], Iterable[tuple[int, float]]] = lambda tree, _: tree.passes()
    """Returns (rows, mean number per round) of the passes for which a proposal waits, if the draft
    could expand this many nodes ahead, during the previous verification."""
    proposal_s: float = 0.0  # seconds of a proposal without its passes
    shares: bool = False
    """True if it uses the target's resident layers, which may increase its cost."""
    spread: bool = False
    """True if it is for a target spread over memory nodes: it gets the remaining cores."""
    candidate: Any = None  # whose it is (`launch/planning/candidates.py`)

    def drafting_s(self, tree: Tree, resident: int, ahead_s: float = 0.0) -> float:
        """Return how long a round waits for its proposal. `ahead_s`: time to draft ahead before."""
        ahead, longest_s = 0.0, LONGER * self.level_s(tree.width, resident)
        if ahead_s and longest_s:  # an n-gram draft's pass takes no time
            passes_s = ((rows, self.level_s(rows, resident)) for rows in range(1, WIDEST + 1))
            ahead = ahead_s * max(rows / taken for rows, taken in passes_s if taken <= longest_s)
        passes = self.passes(tree, ahead)
        return self.proposal_s + sum(n * self.level_s(rows, resident) for rows, n in passes)


@dataclass(frozen=True)
class Option:
    """One way to run, with its expected figures."""

    draft: Draft | None
    tree: Tree | None
    computed: int  # layers of the target on the device; `resident` keep their weights there
    resident: int
    layers: int
    host_experts: bool  # True if the CPU computes the experts of the layers on the device
    nodes: int  # memory nodes that the target is spread over
    tau: float
    draft_s: float  # T_D: drafting for which a round waits
    verify_s: float  # T_V
    beside_s: float
    device_bytes: int
    host_bytes: int
    copy_s: float  # seconds for which the link is busy in a round
    name: str = ""  # of this kind of placement
    least_per_s: float = 0.0  # tokens/s that it never falls below

    @property
    def candidate(self) -> Any:
        return None if self.draft is None else self.draft.candidate

    @property
    def round_s(self) -> float:
        return self.draft_s + self.verify_s + self.beside_s

    @property
    def tokens_per_s(self) -> float:
        return max(self.tau / self.round_s, self.least_per_s)

    @property
    def streamed(self) -> int:
        return self.computed - self.resident

    @property
    def on_cpu(self) -> int:
        return self.layers - self.computed

    @property
    def bound(self) -> str:
        """The largest part of a round: draft, link, device or cpu."""
        if self.draft_s > self.verify_s:
            return "draft"
        if self.copy_s > 0.5 * self.verify_s:
            return "link"
        return "cpu" if self.on_cpu or self.host_experts else "device"


Places = Sequence[tuple[int, int]]  # (computed, resident) of every candidate placement


@dataclass(frozen=True)
class Planner:
    """Plans the placement of one target on one machine."""

    target: Target
    machine: Machine
    host_experts: bool = False  # True if the CPU computes the experts of layers on the device
    nodes: int = 1  # memory nodes that the target is spread over

    def on_cpu(self) -> Places:
        """Return the placement with the whole target on the CPU."""
        return [(0, 0)] if self.machine.host is not None else []

    def split(self) -> Places:
        """Return placements with the last layers and the head resident on the device."""
        able = self.machine.host is not None and self.machine.device is not None
        return [(n, n) for n in range(1, self.target.layers)] if able else []

    def streamed(self) -> Places:
        """Return placements with all layers on the device, some streamed; one or two would save
        nothing."""
        if self.machine.device is None or self.machine.link is None:
            return []
        return [(self.target.layers, n) for n in range(max(0, self.target.layers - BUFFERS))]

    def mixed(self) -> Places:
        """Return placements with some layers on the CPU, some streamed, some resident."""
        if None in (self.machine.host, self.machine.device, self.machine.link):
            return []
        return [(n, r) for n in range(1, self.target.layers) for r in range(max(0, n - BUFFERS))]

    def whole(self) -> Places:
        """Return the placement with everything on the device."""
        return [] if self.machine.device is None else [(self.target.layers, self.target.layers)]

    def best(self, places: Places, drafts: Iterable[Draft | None]) -> Option | None:
        """Return the fastest option within the limits; None if there is none. Of equally fast ones,
        the one that uses less device memory."""
        found = (option for draft in drafts for option in self._options(places, draft))
        return max(found, key=lambda one: (one.tokens_per_s, -one.device_bytes), default=None)

    def _options(self, places: Places, draft: Draft | None) -> Iterator[Option]:
        trees: Sequence[tuple[Tree | None, float]] = [(None, 1.0)]
        if draft is not None:
            trees = [(tree, draft.tokens(tree)) for tree in draft.trees]
        for computed, resident in self._worthwhile(places, draft):
            for tree, tokens in trees:
                yield self.option(computed, resident, draft, tree, tokens)

    def _worthwhile(self, places: Places, draft: Draft | None) -> Iterator[tuple[int, int]]:
        """Yield the placements within the limits, for each split the one with the most resident
        layers."""
        fitting = [place for place in places if self._fits(*place, draft)]
        yield from fitting if draft is not None and draft.shares else dict(sorted(fitting)).items()

    def _fits(self, computed: int, resident: int, draft: Draft | None) -> bool:
        device, host = self.machine.device_bytes, self.machine.host_bytes
        return (device is None or self._device_bytes(computed, resident, draft) <= device) and (
            host is None or self._host_bytes(computed, resident, draft) <= host
        )

    def _device_bytes(self, computed: int, resident: int, draft: Draft | None) -> int:
        own = self.target.device_bytes(computed, resident) if computed else 0
        return own + (draft.device_bytes(resident) if draft is not None else 0)

    def _host_bytes(self, computed: int, resident: int, draft: Draft | None) -> int:
        own = self.target.host_bytes(computed, resident)
        return own + (draft.host_bytes if draft is not None else 0)

    def option(
        self,
        computed: int,
        resident: int,
        draft: Draft | None,
        tree: Tree | None,
        tokens: float,
        *,
        ahead: bool = False,
    ) -> Option:
        """Return a round's seconds and tokens. `ahead`: drafting continues while verifying."""
        draft_s = 0.0 if draft is None or tree is None else draft.drafting_s(tree, resident)
        rows = 1 + (tree.gamma if tree is not None else 0)
        verify_s = self.pass_s(rows, computed, resident, draft_s)
        if ahead and draft is not None and tree is not None:
            draft_s = draft.drafting_s(tree, resident, verify_s)
        copy_s = self._copy_s(rows, computed - resident)
        return Option(
            draft=draft,
            tree=tree,
            computed=computed,
            resident=resident,
            layers=self.target.layers,
            host_experts=self.host_experts,
            nodes=self.nodes,
            tau=tokens,
            draft_s=draft_s,
            verify_s=verify_s,
            beside_s=self.machine.messages.beside_s(drafted=tree is not None),
            device_bytes=self._device_bytes(computed, resident, draft),
            host_bytes=self._host_bytes(computed, resident, draft),
            copy_s=copy_s,
        )

    def pass_s(self, rows: int, computed: int, resident: int, gap_s: float = 0.0) -> float:
        """Return T_V over rows. `gap_s`: time between passes, in which buffers are refilled."""
        machine = self.machine
        head = machine.device if computed else machine.host
        assert head is not None
        cpu_s = computing_s = 0.0
        if computed < self.target.layers and machine.host is not None:
            cpu_s = (self.target.layers - computed) * machine.host.layer_s(rows)
        if computed and machine.device is not None:
            computing_s = computed * machine.device.layer_s(rows)
        head_s, copy_s = head.head_s(rows), self._copy_s(rows, computed - resident)
        if not copy_s or machine.link is None:
            return cpu_s + computing_s + head_s
        if not machine.link.overlaps:
            return cpu_s + computing_s + copy_s + head_s
        filled_s = min(gap_s + cpu_s + head_s, BUFFERS * copy_s / (computed - resident))
        return cpu_s + max(computing_s, copy_s - filled_s) + head_s

    def _copy_s(self, rows: int, streamed: int) -> float:
        """Return the link's seconds in a pass; buffered layers stay in their buffers."""
        link = self.machine.link
        return 0.0 if link is None or streamed <= BUFFERS else streamed * link.layer_s(rows)


def by_budget(draft: Draft) -> Draft:
    """Return the draft with only large trees, of at least LEAST_BUDGET nodes."""
    return replace(draft, trees=[tree for tree in draft.trees if tree.gamma >= LEAST_BUDGET])
