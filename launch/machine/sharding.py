"""Decides whether a target is spread over memory nodes, and why: by the settings, or by a
measurement of `dovetail calibrate`."""

from dataclasses import dataclass

from dovetail.launch.files.directory import profile_path
from dovetail.launch.machine.cores import CoreLayout, lay_out
from dovetail.launch.machine.topology import Topology, format_numbers, read_topology
from dovetail.launch.processes.preflight import estimated_bytes, why_not_sharded
from dovetail.protocol.calibration import Calibration
from dovetail.protocol.profile import NodeTimes, Profile, load_profile, machine_key
from dovetail.protocol.settings import TargetSettings
from dovetail.runtime.costs.rounds import Nodes, measured_meeting_s

ROWS = 16  # rows of the pass that decides, about those of a usual tree


@dataclass(frozen=True)
class NodeChoice:
    """The value of target.numa that takes effect, and a line that explains it; empty if there was
    nothing to choose."""

    numa: str
    words: str = ""


def may_be_sharded(target: TargetSettings, topology: Topology) -> bool:
    """Return whether the target can be spread and the settings leave that open."""
    nodes = sum(bool(node.memory_bytes) for node in topology.computing)
    threads = nodes if target.threads == "auto" else target.threads
    return 1 < nodes <= threads and target.numa == "auto" and not why_not_sharded(target)


def known_times(target: TargetSettings, topology: Topology, profile: Profile) -> NodeTimes | None:
    """Return the measured times of this target on this machine, if any."""
    wanted = key_of(target, topology)
    return next((times for times in profile.nodes if times.key == wanted), None)


def key_of(target: TargetSettings, topology: Topology) -> tuple[str, ...]:
    """Return the key under which times of this target on this machine are saved."""
    nodes = format_numbers(node.number for node in topology.computing if node.memory_bytes)
    what = (target.model, target.weights, target.activations, target.cache)
    return (machine_key(), nodes, *what, str(target.threads))


def other_layout(target: TargetSettings, topology: Topology, now: CoreLayout) -> CoreLayout:
    """Return the other of the two compared layouts: spread if the target is on one node now, else
    on one node."""
    numa, size = "auto" if now.target.shards else "shard", estimated_bytes(target)
    return lay_out(topology, numa=numa, threads=target.threads, target_bytes=size)


def node_times(
    target: TargetSettings, topology: Topology, alone: Calibration, sharded: Calibration
) -> NodeTimes:
    """Return the times of both layouts, for the profile file."""
    alone_s, sharded_s = (known.t_v.at(ROWS) for known in (alone, sharded))
    return NodeTimes(key=key_of(target, topology), rows=ROWS, alone_s=alone_s, sharded_s=sharded_s)


def choose_numa(
    target: TargetSettings, topology: Topology, profile: Profile, *, shares: bool = False
) -> NodeChoice:
    """Return the placement of a target. `shares`: target and draft are one process."""
    numa = str(target.numa)
    nodes = format_numbers(node.number for node in topology.computing if node.memory_bytes)
    if numa == "shard":
        return NodeChoice(numa, f"the target is spread over memory nodes {nodes} (target.numa)")
    reads = target.prefill == "auto" and any(entry.readings for entry in profile.entries)
    if not may_be_sharded(target, topology) or shares or reads:
        return NodeChoice(numa)
    if (times := known_times(target, topology, profile)) is None:
        why = "`dovetail calibrate` measures whether that is faster"
        return NodeChoice(numa, f"the target is not spread over memory nodes {nodes}: {why}")
    here, there = "on one memory node", f"spread over memory nodes {nodes}"
    if times.sharded_s < times.alone_s:
        return NodeChoice("shard", _measured(times, there, here))
    return NodeChoice(numa, _measured(times, here, there))


def _measured(times: NodeTimes, chosen: str, other: str) -> str:
    best, worst = (1000 * s for s in sorted((times.alone_s, times.sharded_s)))
    return (
        f"the target is {chosen}: a pass of {times.rows} rows takes {best:.3g} ms there, and "
        f"{worst:.3g} ms {other} (dovetail calibrate)"
    )


def choice_of(target: TargetSettings, *, shares: bool = False) -> NodeChoice:
    """Return the placement of a target on this machine; the profile file is read only if it
    matters."""
    topology = read_topology()
    known = load_profile(profile_path()) if may_be_sharded(target, topology) else Profile()
    return choose_numa(target, topology, known, shares=shares)


def layout_for(target: TargetSettings, *, shares: bool = False) -> CoreLayout:
    """Return the places of a target with these settings, its draft and its coordinator on this
    machine. `shares`: target and draft are one process."""
    topology, size = read_topology(), estimated_bytes(target)
    numa = choice_of(target, shares=shares).numa
    return lay_out(topology, numa=numa, threads=target.threads, target_bytes=size)


def layouts_for(target: TargetSettings) -> tuple[CoreLayout, CoreLayout | None]:
    """Return the places of a target with these settings, its draft and its coordinator on this
    machine if the target is not spread, and if it is; None: it cannot be."""
    topology, size = read_topology(), estimated_bytes(target)
    asked = target.numa == "shard"
    if not asked and not may_be_sharded(target, topology):
        return layout_for(target), None
    threads = "auto" if asked else target.threads
    alone = lay_out(topology, numa="auto", threads=threads, target_bytes=size)
    return alone, lay_out(topology, numa="shard", threads=target.threads, target_bytes=size)


def nodes_of_layouts(alone: CoreLayout, spread: CoreLayout, profile: Profile) -> Nodes:
    """Return the figures of the nodes over which a target is spread: the additional time of a
    layer, as measured for any target with as many threads, or assumed."""
    before, after = len(alone.target.cores), len(spread.target.cores)
    nodes = Nodes(len(spread.target.shards), after / before)
    there = {"shards": nodes.count, "threads": after}
    for entry in reversed(profile.entries):
        key = entry.key
        if key.machine != machine_key() or (key.shards, key.threads) != (1, before):
            continue
        for over in profile.find(key.model_copy(update=there)).calibrations:
            for one in entry.calibrations:
                if one.backend == over.backend:
                    meeting_s = measured_meeting_s(
                        one.t_v, over.t_v, rows=ROWS, times=nodes.times, layers=one.layers
                    )
                    words = f"{meeting_s * 1e6:.3g} us a layer (measured with another model)"
                    return Nodes(nodes.count, nodes.times, meeting_s, words)
    return nodes
