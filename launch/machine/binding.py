"""Binds this process to cores and the memory of their nodes ("full"), to cores where the memory
policy is refused ("cores"), or to nothing ("none"). Must run before torch is imported. Standard
library only; tests replace `System`."""

import ctypes
import errno
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from dovetail.launch.machine.topology import format_numbers

MPOL_DEFAULT, MPOL_BIND, MPOL_INTERLEAVE = 0, 2, 3
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Machine -> number of set_mempolicy(2): asm/unistd_64.h; asm-generic/unistd.h for aarch64."""
LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True)
class Place:
    """The place of a process: cores, and the nodes that its memory comes from (none: wherever the
    kernel likes)."""

    cores: tuple[int, ...]
    nodes: tuple[int, ...] = ()
    shards: tuple[tuple[int, ...], ...] = ()
    """The cores of each shard of a target, whose memory comes from the node at the same position in
    `nodes`, if there are any. Empty: the target is not spread."""

    @property
    def shards_at_nodes(self) -> tuple[tuple[tuple[int, ...], int | None], ...]:
        """Return the cores of each shard, and its node if known."""
        nodes = self.nodes or (None,) * len(self.shards)
        return tuple(zip(self.shards, nodes, strict=True)) if self.shards else ()

    @property
    def cores_text(self) -> str:
        """Return the cores as --cores takes them: "0-3", or "0-3/4-7" for two shards."""
        return "/".join(map(format_numbers, self.shards or (self.cores,)))


@dataclass(frozen=True)
class Binding:
    """The part of a placement that is in force, and why no more is."""

    level: Literal["full", "cores", "none"]
    place: Place
    reason: str = ""

    def __str__(self) -> str:
        """Format it for `status`: "full: cores 0-7, memory of node 1", "full: cores 0-3/4-7 in 2
        shards, memory of node 0-1", "cores 0-7, memory not bound (why)", "none (why)"."""
        because = f" ({self.reason})" if self.reason else ""
        if self.level == "none":
            return f"none{because}"
        shards = len(self.place.shards)
        cores = self.place.cores_text + (f" in {shards} shards" if shards else "")
        if self.level == "full":
            return f"full: cores {cores}, memory of node {format_numbers(self.place.nodes)}"
        return f"cores {cores}, memory not bound{because}"


class System(Protocol):
    """The calls to the kernel."""

    def set_affinity(self, cores: Sequence[int]) -> None:
        """Confine the calling thread, and what it starts, to these cores; `OSError` if it is
        refused."""

    def set_memory_policy(self, mode: int, nodes: Sequence[int]) -> None:
        """Take memory for the calling thread, and for the threads that it starts, from these nodes;
        `OSError` if it is refused."""


class Linux:
    """The kernel that we run on."""

    def set_affinity(self, cores: Sequence[int]) -> None:
        os.sched_setaffinity(0, cores)

    def set_memory_policy(self, mode: int, nodes: Sequence[int]) -> None:
        """Set this thread's policy; `OSError` if the kernel refuses it. Each of several nodes is
        tried alone first, since Linux ignores nodes of a list that do not exist."""
        try:
            for node in nodes if len(nodes) > 1 else ():
                self._call(MPOL_BIND, (node,))
        except OSError:
            self._call(MPOL_DEFAULT, ())
            raise
        self._call(mode, nodes)

    def _call(self, mode: int, nodes: Sequence[int]) -> None:
        number = SET_MEMPOLICY.get(platform.machine())
        if number is None or LONG_BITS != 64:
            raise OSError(
                errno.ENOSYS, f"the system call's number on {platform.machine()} is not known"
            )
        mask, bits = _mask(nodes)
        if ctypes.CDLL(None, use_errno=True).syscall(number, mode, mask, bits) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def bind(place: Place, system: System | None = None) -> Binding:
    """Bind this process to a place as far as permitted. Memory of several nodes is interleaved;
    memory of shards is bound to their nodes, and lies where it is first written."""
    system = system or Linux()
    try:
        system.set_affinity(place.cores)
    except OSError as error:
        return Binding("none", place, f"sched_setaffinity refused: {error.strerror}")
    if not place.nodes:
        return Binding("cores", place)
    one_each = len(place.nodes) == 1 or place.shards
    try:
        system.set_memory_policy(MPOL_BIND if one_each else MPOL_INTERLEAVE, place.nodes)
    except OSError as error:
        return Binding(
            "cores",
            place,
            f"set_mempolicy refused node {format_numbers(place.nodes)}: {error.strerror}",
        )
    return Binding("full", place)


def memory_refusal(nodes: Sequence[int], system: System | None = None) -> str:
    """Why this process may not bind its memory to these nodes; empty if it may. Tries it, and goes
    back to the kernel's default."""
    system = system or Linux()
    try:
        system.set_memory_policy(MPOL_BIND, nodes)
        system.set_memory_policy(MPOL_DEFAULT, ())
    except OSError as error:
        return error.strerror or "refused"
    return ""


def _mask(nodes: Sequence[int]) -> tuple[ctypes.Array[ctypes.c_ulong], int]:
    """The node mask that the kernel reads, and its length in bits: one more than it uses, since it
    subtracts one (set_mempolicy(2), Notes)."""
    words = max(nodes, default=0) // LONG_BITS + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // LONG_BITS] |= 1 << node % LONG_BITS
    return mask, words * LONG_BITS + 1
