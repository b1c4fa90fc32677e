"""Spreads a model over the memory nodes of a machine: threads on the cores of each, and beside them
the weights that they read.

Every sum is computed by one thread, so that a shard has some outputs of every matrix and some heads
of every layer, and no byte depends on how many there are; see `native/shards.h`. Knows addresses
and cores, not models.
"""

import mmap
import os
from collections.abc import Sequence
from ctypes import Structure, byref, c_int32, c_int64, c_void_p, cast
from dataclasses import dataclass

from dovetail.protocol.errors import UserError
from dovetail.workers.kernels import available, library, page_of

MOST = 16
"""Shards that there can be: MOST_SHARDS of native/shards.h."""


@dataclass(frozen=True)
class Shard:
    """The cores of a memory node, and what of a model they have."""

    cores: tuple[int, ...]
    node: int | None = None
    """None: memory lies where the kernel puts what these cores write to first."""


@dataclass(frozen=True)
class Placed:
    """The pages of weights that were looked for, and those of them on the node of their shard."""

    looked: int
    home: int
    refused: str
    """Why no policy of memory was permitted; empty: it was."""


class _CoresStruct(Structure):
    """`ShardCores` of native/shards.h."""

    _fields_ = (("cores", c_void_p), ("count", c_int32), ("node", c_int32))


class _SpreadStruct(Structure):
    """`Spread` of native/shards.h."""

    _fields_ = (
        ("start", c_void_p),
        *((name, c_int64) for name in ("items", "stride", "all", "first")),
        *((name, c_int64) for name in ("count", "bytes", "used", "end")),
    )


class _PlacedStruct(Structure):
    """`Placed` of native/shards.h."""

    _fields_ = (("looked", c_int64), ("home", c_int64), ("refused", c_int32), ("_", c_int32))


def set_shards(shards: Sequence[Shard]) -> None:
    """Divide the threads, in proportion to cores, and what is packed from now on among these
    shards; none: undivided. `UserError` for cores that this process may not use."""
    if len(shards) > MOST or not all(shard.cores for shard in shards):
        raise UserError(f"{len(shards)} shards are not possible: up to {MOST}, each with cores")
    lists = [(c_int32 * len(shard.cores))(*shard.cores) for shard in shards]
    structs = (_CoresStruct * len(shards))(
        *(
            _CoresStruct(
                cast(cores, c_void_p), len(cores), -1 if shard.node is None else shard.node
            )
            for shard, cores in zip(shards, lists, strict=True)
        )
    )
    if error := library().dt_set_shards(structs, len(shards)):
        raise UserError(f"the cores of {list(shards)} cannot be used: {os.strerror(error)}")


def count() -> int:
    """Return how many shards there are; 1: all is undivided."""
    return int(library().dt_shards()) if available() else 1


def settle() -> None:
    """Keep the calling thread on the cores of the first shard, whose part of every call it does.
    Threads that it starts afterwards are there too."""
    if error := library().dt_settle():
        raise UserError(f"the cores of the first shard cannot be used: {os.strerror(error)}")


def spread_evenly(start: int, size: int, parts: int) -> None:
    """Give fresh memory that is read by parts, each of one thread, to the shards of these."""
    share = size // parts
    struct = _SpreadStruct(start, 1, 0, parts, 0, parts, share, share, 0)
    library().dt_spread(byref(struct), page_of(size))


def spread_heads(start: int, shape: tuple[int, int], size: int, used: int) -> None:
    """Give fresh memory in small pages for [layers, heads] of `size` bytes each to the shards of
    the heads, as far as the first `used` bytes of each go."""
    layers, heads = shape
    struct = _SpreadStruct(start, layers, heads * size, heads, 0, heads, size, used, 0)
    library().dt_spread(byref(struct), mmap.PAGESIZE)


def placed() -> Placed:
    """Return where pages lie that were given to shards since these were set."""
    struct = _PlacedStruct()
    library().dt_placed(byref(struct))
    refused = os.strerror(struct.refused) if struct.refused else ""
    return Placed(struct.looked, struct.home, refused)
