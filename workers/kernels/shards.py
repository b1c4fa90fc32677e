"""Spreads a model over the memory nodes of a machine: each node's cores run threads that read
weights in that node's memory.

A shard has some outputs of every matrix and some heads of every layer, while every sum is computed
by one thread, so no byte depends on the number of shards; see `native/shards.h`."""

import mmap
import os
from collections.abc import Sequence
from ctypes import Structure, byref, c_int32, c_int64, c_void_p, cast
from dataclasses import dataclass

from dovetail.protocol.errors import UserError
from dovetail.workers.kernels import available, library, page_of

MOST = 16  # the most shards, MOST_SHARDS of native/shards.h


@dataclass(frozen=True)
class Shard:
    """The cores and the memory node of a part of a model."""

    cores: tuple[int, ...]
    node: int | None = None  # None: memory is where the system puts what these cores write to first


@dataclass(frozen=True)
class SampledPages:
    """How many pages of weights were sampled, and how many of them are on their shard's node."""

    looked: int
    home: int
    refused: str  # why the system refused a memory policy; empty if it did not


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
    """`SampledPages` of native/shards.h."""

    _fields_ = (("looked", c_int64), ("home", c_int64), ("refused", c_int32), ("_", c_int32))


def set_shards(shards: Sequence[Shard]) -> None:
    """Divide the threads among these shards in proportion to their cores, as well as everything
    packed from now on; without shards nothing is divided. Raises `UserError` for cores that this
    process may not use."""
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
        cores = "/".join(",".join(map(str, shard.cores)) for shard in shards)
        raise UserError(
            f"the cores {cores} cannot be used: {os.strerror(error)}: name cores that this process "
            "may run on"
        )


def count() -> int:
    """Return the number of shards; 1: nothing is divided."""
    return int(library().dt_shards()) if available() else 1


def settle() -> None:
    """Pin the calling thread, which does a part of the first shard's work in every call, to the
    cores of that shard. Threads that it starts later inherit this."""
    if error := library().dt_settle():
        raise UserError(f"the cores of the first shard cannot be used: {os.strerror(error)}")


def spread_evenly(start: int, size: int, parts: int) -> None:
    """Place `size` bytes of fresh memory, an equal part of which is read by each of `parts`
    threads, on the nodes of these threads' shards."""
    share = size // parts
    struct = _SpreadStruct(start, 1, 0, parts, 0, parts, share, share, 0)
    library().dt_spread(byref(struct), page_of(size))


def spread_heads(start: int, shape: tuple[int, int], size: int, used: int) -> None:
    """Place fresh memory in small pages for [layers, heads] of `size` bytes each, the first `used`
    bytes of each, on the nodes of the heads' shards."""
    layers, heads = shape
    struct = _SpreadStruct(start, layers, heads * size, heads, 0, heads, size, used, 0)
    library().dt_spread(byref(struct), mmap.PAGESIZE)


def placed() -> SampledPages:
    """Return the nodes of the pages placed since the shards were set."""
    struct = _PlacedStruct()
    library().dt_placed(byref(struct))
    refused = os.strerror(struct.refused) if struct.refused else ""
    return SampledPages(struct.looked, struct.home, refused)
