"""The threads that share the kernels' work: one that the system does not let run is not waited
for."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dovetail.workers import kernels
from dovetail.workers.kernels import Kind, PackedMatrix
from support.kernels import needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("kernels_as_before")]

CALLS = 200
SLICE_S = 0.003
"""A thread that has lost its core to another process does not get it back sooner."""


def threads_of_this_process() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


@contextmanager
def starved(thread: int) -> Iterator[None]:
    """A thread that runs when nobody else wants its core, and somebody always wants it."""
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(thread, {core})
    os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    program = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    endless = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert endless.stdout is not None
        endless.stdout.readline()
        yield
    finally:
        endless.kill()
        endless.communicate()


def test_a_thread_that_does_not_get_its_core_keeps_nobody_waiting() -> None:
    weight, x = torch.randn(96, 64), torch.randn(4, 64)
    matrix = PackedMatrix(Kind.FP32, *weight.shape)
    matrix.pack(weight)
    kernels.set_threads(1)
    expected = matrix.linear(x)
    before = threads_of_this_process()
    kernels.set_threads(2)
    (thread,) = threads_of_this_process() - before
    with starved(thread):
        began_s, waited = time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        for _ in range(CALLS):
            assert torch.equal(matrix.linear(x), expected)
        assert time.thread_time() - began_s < CALLS * SLICE_S / 4, "it spins for the other"
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - waited < CALLS / 4, (
            "it sleeps for the other"
        )
