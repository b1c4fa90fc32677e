"""The instruction sets of the C++ kernels, one after the other, and shards that stand for memory
nodes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dovetail.workers import kernels
from dovetail.workers.kernels import Isa, shards
from dovetail.workers.kernels.shards import Shard

needs_kernels = pytest.mark.skipif(not kernels.available(), reason=str(kernels.why_not()))
every_isa = pytest.mark.parametrize("isa", Isa, ids=lambda isa: isa.name)


def use(isa: Isa) -> None:
    """Compute with these instructions from here on; the test is skipped where the machine has
    none."""
    if isa not in kernels.isas():
        pytest.skip(f"this machine has no {isa.name}")
    kernels.use_isa(isa)


@contextmanager
def spread_over(count: int, threads: int = 0, node: int | None = None) -> Iterator[None]:
    """Have `count` shards, on the cores that there are in turn, with a thread each or `threads` in
    all."""
    cores, before = sorted(os.sched_getaffinity(0)), kernels.threads()
    wanted = [Shard((cores[index % len(cores)],), node) for index in range(count)]
    kernels.set_threads(threads or count)
    shards.set_shards(wanted if count > 1 else ())
    try:
        yield
    finally:
        shards.set_shards(())
        kernels.set_threads(before)
