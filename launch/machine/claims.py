"""Claims cores of this machine for processes that do not know each other: each core is claimed by
at most one of them.

A claim is a lock on a file in the user's runtime directory, which the kernel releases when its
holder ends, however it ends. Physical cores come before second hardware threads. Processes that do
not claim their cores are not seen."""

import fcntl
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from dovetail.launch.files.directory import runtime_directory
from dovetail.launch.machine.binding import Place
from dovetail.launch.machine.topology import Topology, format_numbers, read_topology
from dovetail.protocol.errors import UserError


def candidates(topology: Topology, *, last: bool = False) -> list[list[tuple[int, int]]]:
    """Return the hardware threads in the order in which they are claimed, each as memory node and
    number, by memory node: first one of each physical core. `last`: from the last core on."""
    lists = []
    for node in topology.computing:
        cores = node.cores[::-1] if last else node.cores
        turns = range(max(map(len, cores)))
        lists.append(
            [(node.number, core[turn]) for turn in turns for core in cores if turn < len(core)]
        )
    return lists[::-1] if last else lists


class Claim:
    """Cores that are this process's own until it closes the claim or ends."""

    def __init__(self, place: Place, locks: Sequence[int]) -> None:
        self.place, self._locks = place, locks

    def close(self) -> None:
        """Let go of the cores."""
        for lock in self._locks:
            os.close(lock)


def claim(count: int, *, last: bool = False, topology: Topology | None = None) -> Claim:
    """Claim this many cores, of one memory node if possible, with that node's memory on a machine
    of several. `UserError` if fewer are left."""
    lists = candidates(topology or read_topology(), last=last)
    folder = runtime_directory()
    apart = len(lists) > 1
    free = 0
    for choice in [*lists, *([[core for own in lists for core in own]] if apart else [])]:
        taken = _take(folder, choice, count)
        if len(taken) == count:
            nodes = {node for node, _ in taken} if apart else set[int]()
            cores = tuple(sorted(number for _, number in taken))
            return Claim(Place(cores, tuple(sorted(nodes))), [*taken.values()])
        free = len(taken)
        Claim(Place(()), [*taken.values()]).close()
    known = format_numbers(sorted(core for own in lists for _, core in own))
    raise UserError(
        f"{count} cores were asked for, and {free} of the cores {known} are free: ask for fewer"
    )


def _take(
    folder: Path, choice: Iterable[tuple[int, int]], count: int
) -> dict[tuple[int, int], int]:
    """Lock the files of this many free cores among these, or of all free ones if they are fewer;
    return the descriptors by core."""
    taken: dict[tuple[int, int], int] = {}
    for core in choice:
        if len(taken) == count:
            break
        path = folder / f"core-{core[1]}.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        taken[core] = lock
    return taken
