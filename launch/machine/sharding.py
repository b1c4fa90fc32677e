"""Decides whether a target is spread over the memory nodes of this machine, and says why: by the
settings, or by what `dovetail calibrate` found to be faster.

Decides from settings, a topology and a profile; `layout_for` looks them up.
"""

from dataclasses import dataclass

from dovetail.launch.files.directory import profile_path
from dovetail.launch.machine.cores import CoreLayout, lay_out
from dovetail.launch.machine.topology import Topology, format_numbers, read_topology
from dovetail.launch.processes.preflight import estimated_bytes, why_not_sharded
from dovetail.protocol.calibration import Calibration
from dovetail.protocol.profile import NodeTimes, Profile, load_profile, machine_key
from dovetail.protocol.settings import TargetSettings

ROWS = 16
"""Rows of the pass that decides: those of a usual tree."""


@dataclass(frozen=True)
class NodeChoice:
    """The value of target.numa that counts, and a line about it; empty where there is nothing to
    say."""

    numa: str
    words: str = ""


def may_be_sharded(target: TargetSettings, topology: Topology) -> bool:
    """Return whether it is left to us where the target lies, and it can be spread."""
    nodes = sum(bool(node.memory_bytes) for node in topology.computing)
    threads = nodes if target.threads == "auto" else target.threads
    return 1 < nodes <= threads and target.numa == "auto" and not why_not_sharded(target)


def known_times(target: TargetSettings, topology: Topology, profile: Profile) -> NodeTimes | None:
    """Return what was measured of this target on this machine."""
    wanted = key_of(target, topology)
    return next((times for times in profile.nodes if times.key == wanted), None)


def key_of(target: TargetSettings, topology: Topology) -> tuple[str, ...]:
    """Return the circumstances of a measurement of this target here."""
    nodes = format_numbers(node.number for node in topology.computing if node.memory_bytes)
    what = (target.model, target.inflate, target.weights, target.activations, target.cache)
    return (machine_key(), nodes, *what, str(target.threads))


def other_layout(target: TargetSettings, topology: Topology, now: CoreLayout) -> CoreLayout:
    """Return the layout that a target on one node would have spread, and a spread one on one."""
    numa, size = "auto" if now.target.shards else "shard", estimated_bytes(target)
    return lay_out(topology, numa=numa, threads=target.threads, target_bytes=size)


def node_times(
    target: TargetSettings, topology: Topology, alone: Calibration, sharded: Calibration
) -> NodeTimes:
    """Return what both ways take, for the profile file."""
    alone_s, sharded_s = (known.t_v.at(ROWS) for known in (alone, sharded))
    return NodeTimes(key=key_of(target, topology), rows=ROWS, alone_s=alone_s, sharded_s=sharded_s)


def choose_numa(
    target: TargetSettings, topology: Topology, profile: Profile, *, shares: bool = False
) -> NodeChoice:
    """Return where a target goes. `shares`: its process drafts, too."""
    numa = str(target.numa)
    nodes = format_numbers(node.number for node in topology.computing if node.memory_bytes)
    if numa == "shard":
        return NodeChoice(numa, f"the target is spread over memory nodes {nodes} (target.numa)")
    reads = target.prefill == "auto" and any(entry.readings for entry in profile.entries)
    if not may_be_sharded(target, topology) or shares or reads:
        return NodeChoice(numa)
    if (times := known_times(target, topology, profile)) is None:
        return NodeChoice(
            numa,
            f"the target is not spread over memory nodes {nodes}: whether that is faster, "
            "`dovetail calibrate` measures",
        )
    here, there = "on one memory node", f"spread over memory nodes {nodes}"
    if times.sharded_s < times.alone_s:
        return NodeChoice("shard", _measured(times, there, here))
    return NodeChoice(numa, _measured(times, here, there))


def _measured(times: NodeTimes, chosen: str, other: str) -> str:
    """Return what was measured, in words."""
    best, worst = (1000 * s for s in sorted((times.alone_s, times.sharded_s)))
    return (
        f"the target is {chosen}: a pass of {times.rows} rows takes {best:.3g} ms there, and "
        f"{worst:.3g} ms {other} (dovetail calibrate)"
    )


def choice_of(target: TargetSettings, *, shares: bool = False) -> NodeChoice:
    """Return where a target goes on this machine; its profile file is read only where it counts."""
    topology = read_topology()
    known = load_profile(profile_path()) if may_be_sharded(target, topology) else Profile()
    return choose_numa(target, topology, known, shares=shares)


def layout_for(target: TargetSettings, *, shares: bool = False) -> CoreLayout:
    """Return the places of a target with these settings, its draft and its coordinator on this
    machine. `shares`: target and draft are one process."""
    return lay_out(
        read_topology(),
        numa=choice_of(target, shares=shares).numa,
        threads=target.threads,
        target_bytes=estimated_bytes(target),
    )
