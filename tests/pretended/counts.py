"""Counts of what is asked of the pretended device, so that the launches, copies and waits of a
level are known without a GPU, where each of them takes 5 to 20 microseconds of the host.

An operation outside a graph is one launch, however many kernels a GPU would take for it, and a
replay is one; views and memory that is not written are none. Operations are not counted while they
are captured.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor

from pretended.pinned import is_pinned
from pretended.rules import COPIES, READS_BY_INDEX, WRITES_BY_INDEX, is_there, leaves, waits
from pretended.traffic import UNWRITTEN

aten = torch.ops.aten


@dataclass
class Counts:
    """Numbers of operations, copies and waits."""

    launches: int = 0
    """Operations outside a graph, and replays."""
    copies_in: int = 0
    copies_out: int = 0
    synchronisations: int = 0
    """Waits of the host: for numbers, and for copies unless they are `non_blocking` and the host's
    memory is pinned."""
    moved: int = field(default=0, compare=False)
    """The bytes that operations and replays read and write, copies from and to the host left
    out."""

    def all(self) -> tuple[int, ...]:
        """Return all counts but that of bytes, in the order in which they stand above."""
        return astuple(self)[:-1]

    def add(self, more: "Counts") -> None:
        """Add other counts to these."""
        for name, count in asdict(more).items():
            setattr(self, name, getattr(self, name) + count)

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(
            *(one - less for one, less in zip(astuple(self), astuple(other), strict=True))
        )


_thread = threading.local()


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what this thread asks of the device within the block, which may be within another."""
    counts, outer = Counts(), _open()
    _thread.open = (*outer, counts)
    try:
        yield counts
    finally:
        _thread.open = outer


def _open() -> tuple[Counts, ...]:
    return getattr(_thread, "open", ())


def are_open() -> bool:
    """Return whether this thread counts."""
    return bool(_open())


def add(**more_of: int) -> None:
    """Add to every count that this thread has open, by the names of `Counts`."""
    if not are_open():
        return
    more = Counts(**more_of)
    for counts in _open():
        counts.add(more)


def count(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Count an operation of torch."""
    if not _open():
        return
    packet = function.overloadpacket
    if packet is aten._local_scalar_dense:
        add(copies_out=1, synchronisations=1)
    elif leaves(packet, args, kwargs):
        add(copies_out=1, synchronisations=_blocking(args, kwargs, args[0]))
    elif packet in COPIES and not is_there(args[packet is aten.copy_]):
        source = args[packet is aten.copy_]
        add(copies_in=1, synchronisations=_blocking(args, kwargs, source))
    elif packet in READS_BY_INDEX or packet in WRITES_BY_INDEX:
        copied = sum(isinstance(part, Tensor) and not is_there(part) for part in args[1])
        add(launches=1, copies_in=copied, synchronisations=copied + waits(function, args))
    elif packet not in UNWRITTEN and not function.is_view:
        add(launches=1, synchronisations=waits(function, args))


def _blocking(args: Sequence[Any], kwargs: Mapping[str, Any], host: Tensor) -> bool:
    """Return whether the host waits for a copy from or to `host`."""
    asked = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    return not (asked and is_pinned(host))
