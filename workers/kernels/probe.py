"""Measures the machine's limits by loops of the kernels' own instructions on the threads in use:
bandwidth of reading memory in order, and arithmetic of independent sums in registers."""

import time
from collections.abc import Callable
from ctypes import CDLL, c_double, c_int, c_int64, c_void_p
from enum import IntEnum
from functools import cache, partial

from dovetail.workers.kernels import declare, fresh_memory, library, shards, threads

READ_BYTES = 256 << 20  # read in one go: beyond the caches of nearly all CPUs
PAGE = 4096


class Arithmetic(IntEnum):
    """The kind of arithmetic; a multiply and an add are two operations."""

    FP32 = 0
    INT8 = 1
    BF16 = 2


@cache
def _declared(loaded: CDLL) -> CDLL:
    declare(
        loaded,
        {
            "dt_probe_arithmetic": (c_double, (c_int, c_int64)),
            "dt_probe_read": (None, (c_void_p, c_int64)),
        },
    )
    return loaded


def peak_gflop_s(arithmetic: Arithmetic, *, budget_s: float) -> float | None:
    """Return 10^9 operations a second of all threads together, the best of several tries; None if
    the instruction set in use lacks this arithmetic."""
    probe = _declared(library()).dt_probe_arithmetic
    if not probe(arithmetic, 1):
        return None
    rounds = 1 << 10
    while (once := least_seconds(partial(probe, arithmetic, rounds), 1)) < budget_s / 20:
        rounds *= 2
    operations: float = probe(arithmetic, rounds)
    tries = max(3, int(budget_s / once))
    return operations / least_seconds(partial(probe, arithmetic, rounds), tries) / 1e9


def bandwidth_gb_s(*, budget_s: float, read_bytes: int = READ_BYTES) -> float:
    """Return the 10^9 bytes a second that all threads together read from memory, the best of
    several tries."""
    memory, start = fresh_memory(read_bytes)
    shards.spread_evenly(start, read_bytes, threads())
    for page in range(0, read_bytes, PAGE):
        memory[page] = b"\1"
    read = _declared(library()).dt_probe_read
    once = least_seconds(partial(read, start, read_bytes), 1)
    tries = max(3, int(budget_s / once))
    return read_bytes / least_seconds(partial(read, start, read_bytes), tries) / 1e9


def least_seconds(call: Callable[[], object], tries: int) -> float:
    """Return the seconds of the fastest of several calls."""
    return min(seconds_of(call) for _ in range(tries))


def seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
