"""Devices of a run: how busy each was, with what, and who else used them."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.profiling import timeline
from dovetail.launch.profiling.evidence import Evidence
from dovetail.launch.profiling.samplers import busy_cores, busy_process, energy_j
from dovetail.launch.profiling.timeline import NS, Actor, Use
from dovetail.protocol.messages import SeenWorker, WorkerState

LEAST_S = 0.3
"""The shortest run for which the kernel's count of busy time, in hundredths of a second, says who
took the cores."""
STRETCHES = 60
"""The number of stretches of the run for which a device's busy share is drawn."""


# -- devices ---------------------------------------------------------------------------------------


def device_told(actor: Actor, use: Use, evidence: Evidence) -> dict[str, Any]:
    """A process and what it runs on: shares of the run."""
    worker = next((worker for worker in evidence.workers if worker.name == actor.name), None)
    state = next((state for state in evidence.states if state.name == actor.name), None)
    whole = use.whole_s or 1.0
    return {
        "roles": list(actor.roles),
        "device": worker.device if worker else "cpu",
        "cores": format_numbers(worker.cores) if worker else "",
        "node": worker.node if worker else "",
        "busy": use.busy_s / whole,
        "ahead": use.ahead_s / whole,
        "idle": 1.0 - use.busy_s / whole,
        "waiting": {
            name: seconds / whole
            for name, seconds in sorted(use.waiting_s.items(), key=lambda item: -item[1])
        },
        "by_span": {
            name: seconds / whole
            for name, seconds in sorted(use.by_name_s.items(), key=lambda item: -item[1])
        },
        "sampled": _cross_check(worker, state, evidence),
        "clock_bound_us": worker.clock_bound_ns / 1e3
        if worker and worker.clock_bound_ns is not None
        else None,
        "rss_mb": state.rss_mb if state else None,
    }


def _cross_check(
    worker: SeenWorker | None, state: WorkerState | None, evidence: Evidence
) -> dict[str, float | None]:
    """Return what the samplers say of a worker: how busy its cores were, with whatever; and how
    much of the time its process ran. A GPU's: its driver's word."""
    if len(evidence.samples) < 2:
        return {"cores": None, "process": None, "gpu": None}
    first, last = evidence.samples[0], evidence.samples[-1]
    if worker is None or state is None or worker.host != evidence.here:
        ours = worker is None and evidence.coordinator is not None
        return {
            "cores": None,
            "process": busy_process(first, last, evidence.coordinator or 0, 1) if ours else None,
            "gpu": None,
        }
    cards = [
        sample.gpus[name]
        for sample in evidence.samples
        for name in worker.device.split()[:1]
        if name in sample.gpus
    ]
    return {
        "cores": busy_cores(first, last, worker.cores),
        "process": busy_process(first, last, state.pid, state.threads),
        "gpu": _mean([card.busy for card in cards]),
    }


def nodes_told(evidence: Evidence) -> Iterator[tuple[str, dict[str, Any]]]:
    """Memory nodes of this machine: how busy their cores were, each CPU counted once, and what
    memory was in use."""
    if len(evidence.samples) < 2:
        return
    first, last = evidence.samples[0], evidence.samples[-1]
    for node in evidence.topology.nodes:
        cores = [thread for core in node.cores for thread in core]
        used = [
            sample.node_used_bytes[node.number]
            for sample in evidence.samples
            if node.number in sample.node_used_bytes
        ]
        workers = [
            worker.name
            for worker in evidence.workers
            if worker.host == evidence.here and set(worker.cores) & set(cores)
        ]
        yield (
            str(node.number),
            {
                "cores": format_numbers(sorted(cores)),
                "busy": busy_cores(first, last, cores),
                "by_core": {str(core): busy_cores(first, last, [core]) for core in sorted(cores)},
                "workers": workers,
                "most_used_bytes": max(used, default=None),
                "memory_bytes": node.memory_bytes,
            },
        )


def others_of(evidence: Evidence) -> dict[str, Any] | None:
    """Return what other programs took of the cores of the workers on this machine: shares of their
    time. None where the kernel did not tell, or a worker came or went, of which it tells too
    little."""
    if evidence.changes:
        return None
    cores = sorted(
        {
            core
            for worker in evidence.workers
            if worker.host == evidence.here
            for core in worker.cores
        }
    )
    if len(evidence.samples) < 2 or not cores:
        return None
    first, last = evidence.samples[0], evidence.samples[-1]
    busy, wall_s = busy_cores(first, last, cores), (last.at_ns - first.at_ns) / NS
    if busy is None or wall_s < LEAST_S:
        return None
    ours = sum(
        last.processes[pid].cpu_s - first.processes[pid].cpu_s
        for pid in last.processes
        if pid in first.processes
    ) / (wall_s * len(cores))
    return {
        "cores": format_numbers(cores),
        "busy": busy,
        "ours": min(ours, busy),
        "share": max(0.0, busy - ours),
    }


def _mean(shares: Sequence[float | None]) -> float | None:
    """Return the mean of what is known; None where nothing is."""
    known = [share for share in shares if share is not None]
    return fmean(known) if known else None


def gpus_told(evidence: Evidence) -> dict[str, Any]:
    names = dict.fromkeys(name for sample in evidence.samples for name in sample.gpus)
    found = {}
    for name in names:
        cards = [sample.gpus[name] for sample in evidence.samples if name in sample.gpus]
        used = [card.used_bytes for card in cards if card.used_bytes is not None]
        found[name] = {
            "name": cards[0].name,
            "busy": _mean([card.busy for card in cards]),
            "most_used_bytes": max(used, default=None),
            "link_gb_s": cards[0].link_gb_s,
        }
    return found


def energy_of(evidence: Evidence, tokens: int) -> dict[str, Any]:
    """Joules by domain and a token; None, with the reasons in `absent`, where nothing counts
    them."""
    joules = (
        energy_j(evidence.samples[0], evidence.samples[-1]) if len(evidence.samples) > 1 else {}
    )
    return {
        "joules": dict(joules),
        "joules_per_token": sum(joules.values()) / tokens if joules and tokens else None,
    }


def busy_in(evidence: Evidence, actors: Sequence[Actor]) -> dict[str, list[float]]:
    return {
        actor.name: timeline.shares_over_time(
            evidence.slices, actor.name, evidence.start_ns, evidence.end_ns, STRETCHES
        )
        for actor in actors
    }


def sampled_of(evidence: Evidence) -> dict[str, list[tuple[float, float]]]:
    """Each process of this machine between two samples."""
    found = {}
    for worker in evidence.workers:
        state = next((state for state in evidence.states if state.name == worker.name), None)
        if state is None or worker.host != evidence.here:
            continue
        shares = [
            (two, busy_process(one, two, state.pid, state.threads))
            for one, two in pairwise(evidence.samples)
        ]
        found[worker.name] = [
            ((sample.at_ns - evidence.samples[0].at_ns) / NS, share)
            for sample, share in shares
            if share is not None
        ]
    return found
