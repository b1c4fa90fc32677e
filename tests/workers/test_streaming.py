"""Blobs through reused buffers: each is there whole when it is due, and none is overwritten while
it is computed with, however slow that is."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

from dovetail.workers.devices.cpu import HostTransfer
from dovetail.workers.models.backends.stages.stage import Ring
from support.patience import PATIENCE_S


def blobs(count: int, size: int = 1000) -> list[Tensor]:
    return [torch.full((size + number,), number + 1, dtype=torch.uint8) for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_every_blob_is_whole_when_it_is_due_pass_after_pass(count: int, buffers: int) -> None:
    given = blobs(count)
    ring = Ring(HostTransfer(), given, min(buffers, count))
    for _ in range(3):
        for number, blob in enumerate(given):
            with ring.next(number) as (_, memory):
                assert torch.equal(memory, blob)


def test_the_next_pass_finds_its_first_blobs_fetched() -> None:
    """Beyond the first, a pass begins with what was asked for while the one before it ended:
    nothing is copied twice, nothing is left out."""
    given = blobs(5)
    ring = Ring(HostTransfer(), given, 2)
    pass_bytes = sum(blob.numel() for blob in given)
    for turn in range(1, 4):
        for number in range(5):
            with ring.next(number):
                pass
        assert ring.copied_bytes == turn * pass_bytes + given[0].numel() + given[1].numel()


def test_blobs_that_all_have_a_buffer_are_copied_once() -> None:
    given = blobs(2)
    ring = Ring(HostTransfer(), given, 2)
    for number in (0, 1, 0, 1):
        with ring.next(number) as (_, memory):
            assert torch.equal(memory, given[number])
    assert ring.copied_bytes == sum(blob.numel() for blob in given)


@pytest.mark.parametrize("reached", range(5))
def test_a_pass_that_failed_half_way_leaves_the_next_one_right(reached: int) -> None:
    given = blobs(5)
    ring = Ring(HostTransfer(), given, 2)

    def fail_at(place: int) -> None:
        for number in range(5):
            with ring.next(number):
                if number == place:
                    raise RuntimeError("a layer fails")

    with pytest.raises(RuntimeError, match="a layer fails"):
        fail_at(reached)
    for number, blob in enumerate(given):
        with ring.next(number) as (_, memory):
            assert torch.equal(memory, blob)


@pytest.mark.parametrize("buffers", [0, 4])
def test_there_are_at_least_one_buffer_and_at_most_as_many_as_blobs(buffers: int) -> None:
    with pytest.raises(ValueError, match=f"{buffers} buffers for 3 blobs"):
        Ring(HostTransfer(), blobs(3), buffers)


class Queued(HostTransfer):
    """A host that computes as a GPU does: what is asked for ahead of time is done later, in order,
    by a thread."""

    def __init__(self) -> None:
        super().__init__()
        self._computing = ThreadPoolExecutor(1, "computing")

    def compute(
        self, memory: Tensor, held: threading.Event, read: list[int], begun: threading.Event
    ) -> None:
        """Ask for a layer that reads its weights once it is let go."""

        def layer() -> None:
            begun.set()
            assert held.wait(PATIENCE_S)
            read.append(int(memory.sum()))

        self._computing.submit(layer)

    def computed(self) -> "Future[None]":
        return self._computing.submit(lambda: None)

    def wait(self, mark: "Future[None]") -> None:
        self._computing.submit(mark.result)

    def drain(self) -> None:
        wait([self.computed()], PATIENCE_S)

    def close(self) -> None:
        self._computing.shutdown()
        self._copies.shutdown()


class Hasty(Queued):
    """The race of the papers' code: copies do not wait for what is computed."""

    def copy(self, source: Tensor, target: Tensor, after: "Future[None]") -> "Future[None]":
        done: Future[None] = Future()
        done.set_result(None)
        return super().copy(source, target, done)


def sums_of_a_slow_layer(transfer: Queued, given: Sequence[Tensor], slow: int) -> list[int]:
    """Return what the layers of two passes read of their weights, where one of them is held back
    until all else has been asked for, and copied if nothing stops it."""
    ring = Ring(transfer, given, 2)
    read: list[int] = []
    held, let_go, begun = threading.Event(), threading.Event(), threading.Event()
    let_go.set()
    with ExitStack() as stack:
        stack.callback(transfer.close)
        stack.callback(held.set)
        for turn in range(2):
            for number in range(len(given)):
                with ring.next(number) as (_, memory):
                    late = (turn, number) == (0, slow)
                    transfer.compute(
                        memory, held if late else let_go, read, begun if late else threading.Event()
                    )
        assert begun.wait(PATIENCE_S)
        if isinstance(transfer, Hasty):
            transfer._copies.submit(lambda: None).result(PATIENCE_S)  # all copies are done
        held.set()
        transfer.drain()
    return read


@pytest.mark.parametrize("slow", range(5))
def test_a_buffer_is_not_filled_anew_before_a_slow_layer_has_read_it(slow: int) -> None:
    given = blobs(5)
    assert sums_of_a_slow_layer(Queued(), given, slow) == 2 * [int(blob.sum()) for blob in given]


def test_that_would_be_seen() -> None:
    """Without the wait the slow layer reads the weights of another one."""
    given = blobs(5)
    assert sums_of_a_slow_layer(Hasty(), given, 1) != 2 * [int(blob.sum()) for blob in given]
