"""Assigns cores and memory nodes to the processes of a `Topology`. Standard library only.

On one memory node the target gets all physical cores but the last, which is for a draft on the CPU
or the host side of one on a GPU. If there are only one or two cores, it gets all, unless it is
small; the draft then shares the last core in turns, and does not draft ahead
(`dovetail.runtime.control.pairs`), since the target's threads would wait for each other at every
layer. On several nodes the target gets the best one, or as many as its weights need, and the other
processes another; with `shard` it is spread over all. A physical core runs one thread. The target's
cores do not depend on the draft, so that its output is the same without one."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, TypeVar

from dovetail.launch.machine.topology import (
    Node,
    Place,
    Topology,
    cpus_for,
    format_numbers,
    read_topology,
)
from dovetail.protocol.errors import UserError

Threads = int | Literal["auto"]
ItemT = TypeVar("ItemT")

MOST_SHARED = 2  # with this many cores, the target leaves none to its draft
SMALL_BYTES = 50e6
"""Bytes of weights below which a target pass is as short as drafting, so that each gets one of two
cores."""


@dataclass(frozen=True)
class CoreLayout:
    """The places of the processes of one machine."""

    target: Place
    draft: Place
    coordinator: Place

    @property
    def shared(self) -> tuple[int, ...]:
        """Return the cores that the draft shares with the target in turns."""
        return tuple(sorted({*self.target.cores} & {*self.draft.cores}))


def lay_out(
    topology: Topology, *, numa: str = "auto", threads: Threads = "auto", target_bytes: int = 0
) -> CoreLayout:
    """Assign cores and memory nodes. `numa`: auto, off, shard, or the target's nodes as "0" or
    "0,2-3"; `threads`: of the target, second hardware threads last; `target_bytes`: of its weights,
    0 if unknown. `UserError` for missing nodes or threads."""
    if numa == "shard":
        return lay_out_shards(topology, threads)
    own = target_nodes(topology, numa, target_bytes)
    other = _best([node for node in topology.computing if node not in own])[:1]
    most = cpus_for(topology.quota) if topology.quota is not None else len(topology.threads)
    every = [core for node in own for core in node.cores]
    cores = (every if numa != "off" else sorted(every))[:most]
    _check_threads(threads, _threads(cores))
    elsewhere = [core for node in other for core in node.cores][: most - len(cores)]
    shares = len(cores) == 1 or (len(cores) <= MOST_SHARED and not 0 < target_bytes < SMALL_BYTES)
    left_alone = cores if elsewhere or shares else cores[:-1]
    target = [core[0] for core in left_alone] if threads == "auto" else _threads(cores)[:threads]
    apart = len(topology.nodes) > 1 and numa != "off"
    memory = tuple(node.number for node in own if node.memory_bytes) if apart else ()
    if not elsewhere:
        return CoreLayout(
            Place(tuple(target), memory),
            Place(cores[-1][:1], memory),
            Place(tuple(sorted(_threads(cores)))),
        )
    there = tuple(core[0] for core in elsewhere)
    return CoreLayout(
        Place(tuple(target), memory),
        Place(there, tuple(node.number for node in other if node.memory_bytes)),
        Place(there),
    )


def lay_out_shards(topology: Topology, threads: Threads) -> CoreLayout:
    """Spread the target over all nodes with cores and memory, in proportion to their cores; the
    draft gets the last core. `UserError` without two such nodes, or without a thread for each."""
    nodes = [node for node in topology.computing if node.memory_bytes]
    if len(nodes) < 2:
        known = _nodes(node.number for node in nodes)
        text = "target.numa = 'shard' needs several memory nodes"
        raise UserError(f"{text}; this process may use {known}")
    most = cpus_for(topology.quota) if topology.quota is not None else len(topology.threads)
    cores = _in_turn([(node, core) for core in node.cores] for node in nodes)[:most]
    spare = cores[-1] if len(cores) > MOST_SHARED else None
    if threads == "auto":
        taken = [(node, core[0]) for node, core in cores if (node, core) != spare]
    else:
        given = [[core for at, core in cores if at == node] for node in nodes]
        _check_threads(threads, [thread for own in given if own for thread in _threads(own)])
        taken = _in_turn(
            [(node, thread) for thread in _threads(own)]
            for node, own in zip(nodes, given, strict=True)
            if own
        )[:threads]
    shards = [(node, tuple(core for at, core in taken if at == node)) for node in nodes]
    if not all(own for _, own in shards):
        text = f"{len(taken)} threads for {len(nodes)} memory nodes: raise target.threads"
        raise UserError(f"target.numa = 'shard': {text}")
    last, core = cores[-1]
    return CoreLayout(
        Place(
            tuple(core for _, own in shards for core in own),
            tuple(node.number for node, _ in shards),
            tuple(own for _, own in shards),
        ),
        Place(core[:1], (last.number,)),
        Place(tuple(sorted(thread for _, core in cores for thread in core))),
    )


def target_nodes(topology: Topology, numa: str, target_bytes: int) -> list[Node]:
    """The nodes of the target: the named ones; all without NUMA; else the best one, and more if its
    weights need them."""
    if numa == "off":
        return list(topology.computing)
    if numa != "auto":
        return _named(topology, numa)
    chosen: list[Node] = []
    for node in _best(topology.computing):
        if not chosen or sum(n.memory_bytes for n in chosen) < target_bytes:
            chosen.append(node)
    return sorted(chosen, key=lambda node: node.number)


def lay_out_here(
    *, numa: str | int = "auto", threads: Threads = "auto", target_bytes: int = 0
) -> CoreLayout:
    """The layout of this machine for the settings target.numa and target.threads."""
    return lay_out(read_topology(), numa=str(numa), threads=threads, target_bytes=target_bytes)


def parse_cores(text: str) -> tuple[int, ...]:
    """The numbers in "0,2-3"; `UserError` if it is not such a list or names a core that this
    process may not use."""
    cores = _parse_list(text)
    if cores is None:
        raise UserError(f"--cores {text!r} is not a list of cores, such as 0,2-3")
    known = os.sched_getaffinity(0)
    if missing := sorted(set(cores) - known):
        there = format_numbers(sorted(known))
        raise UserError(f"--cores {text}: no core {missing[0]} for this process: use {there}")
    return cores


def parse_place(cores: str, nodes: str) -> Place:
    """Return the place of --cores "0,2-3" and --memory-nodes "0", or of shards, "0-3/4-7" and
    "0,1"; `UserError` for malformed lists, missing or shared cores, or a wrong number of nodes."""
    if "/" in cores and not all(cores.split("/")):
        raise UserError(f"--cores {cores!r} is not a list of cores for each shard, such as 0-3/4-7")
    shards = tuple(map(parse_cores, cores.split("/")))
    every, numbers = tuple(core for own in shards for core in own), parse_nodes(nodes)
    if len(shards) == 1:
        return Place(every, numbers)
    if len(set(every)) < len(every):
        raise UserError(f"--cores {cores}: a core cannot be in two shards: name each once")
    if numbers and len(numbers) != len(shards):
        raise UserError(
            f"--memory-nodes {nodes}: --cores {cores} needs {len(shards)} of them, or none"
        )
    return Place(every, numbers, shards)


def parse_nodes(text: str) -> tuple[int, ...]:
    """The memory nodes in "0,2-3", none in an empty text; `UserError` for anything else. Whether
    they exist is checked elsewhere."""
    nodes = _parse_list(text) if text else ()
    if nodes is None:
        raise UserError(f"--memory-nodes {text!r} is not a list of nodes, such as 0 or 0,2-3")
    return nodes


def _nodes(numbers: Iterable[int]) -> str:
    known = sorted(numbers)
    return f"node{'' if len(known) == 1 else 's'} {format_numbers(known)}" if known else "no node"


def _named(topology: Topology, numa: str) -> list[Node]:
    known = {node.number: node for node in topology.nodes}
    numbers = _parse_list(numa)
    if numbers is None:
        raise UserError(f"target.numa = {numa!r}: write auto, off, shard, or nodes such as 0,1")
    here = f"this process may use {_nodes(known)}"
    if missing := sorted(set(numbers) - set(known)):
        raise UserError(f"target.numa = {numa}: there is no node {missing[0]}; {here}")
    nodes = [known[number] for number in sorted(set(numbers))]
    if not any(node.cores for node in nodes):
        raise UserError(f"target.numa = {numa}: no cores there; add the node of the cores ({here})")
    return nodes


def _best(nodes: Sequence[Node]) -> list[Node]:
    """Nodes with memory first, then by cores, then by memory; among equals the lowest number."""

    def rank(node: Node) -> tuple[bool, int, int, int]:
        return node.memory_bytes == 0, -len(node.cores), -node.memory_bytes, node.number

    return sorted(nodes, key=rank)


def _check_threads(wanted: Threads, here: Sequence[int]) -> None:
    if wanted != "auto" and wanted > len(here):
        known = f"of the hardware threads that it may use ({format_numbers(sorted(here))})"
        raise UserError(
            f"target.threads = {wanted} is more than the number {known}, {len(here)}: ask for "
            "less, or write auto"
        )


def _in_turn(lists: Iterable[Sequence[ItemT]]) -> list[ItemT]:
    """Return the first of each list, then the second of each that has one, ..."""
    rows = zip_longest(*lists)
    return [item for row in rows for item in row if item is not None]


def _threads(cores: Sequence[tuple[int, ...]]) -> list[int]:
    return [
        core[turn] for turn in range(max(map(len, cores))) for core in cores if turn < len(core)
    ]


def _parse_list(text: str) -> tuple[int, ...] | None:
    """The numbers in "0,2-3" in order; None for anything else."""
    listed = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
    parts = [listed.fullmatch(part.strip()) for part in text.split(",")]
    ranges = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part]
    if not all(ranges) or len(ranges) < len(parts):
        return None
    return tuple(dict.fromkeys(number for numbers in ranges for number in numbers))
