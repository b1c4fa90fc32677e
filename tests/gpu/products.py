"""Our products on the device: whether they are right there, and what they take beside torch's and
beside the memory's own rate."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dovetail.workers.devices.base import Device, Program
from dovetail.workers.models.backends.device import attention, choice, own_blocks, parts
from dovetail.workers.models.backends.device.choice import Contest, Products
from dovetail.workers.models.backends.device.own_blocks import OwnBlocks
from dovetail.workers.models.backends.device.products import Product
from dovetail.workers.models.backends.device.trial import CONTESTS, here
from dovetail.workers.models.substitutes import coded
from gpu import chip
from gpu.report import Report
from support.emulated import emulated

ROWS = (1, 4, 16, 64, 289, 1024)
DECODED = (1, 4, 16)
"""Rows of which torch's product must not be faster."""
SAME_ROWS = (1, 4, 5, 16, 17, 33)
QUICK_ROWS, QUICK_SHAPE, QUICK_SLOTS = (1, 4), (64, 1024), 100
LEAST_SHARE = 60.0
"""Percent of the memory's rate at one row."""
CALLS = 200


def run(report: Report, device: Device, progress: Callable[[str], None]) -> None:
    """Every type of weights: the proof, the same bytes for any number of rows, times."""
    place, rows = device.torch_device, QUICK_ROWS if report.quick else ROWS
    if report.quick:
        for room in (choice, coded, attention, parts, own_blocks):
            vars(room)["TIMED_SHAPE"] = QUICK_SHAPE
        attention.TIMED_SLOTS = QUICK_SLOTS
        choice.TIMED_BYTES = coded.TIMED_MATRICES = own_blocks.TIMED_MATRICES = 1
    size = chip.QUICK_BYTES if report.quick else chip.COPY_BYTES
    memory = chip.memory_gb_s(place, size)
    report.note("memory", f"{memory:.0f} GB/s")
    on_cpu = device.name in ("cpu", "pretended:0")
    functions = emulated if on_cpu else partial(device.kind.program, place)
    products = Products(place, functions, here)
    for contest in CONTESTS:
        progress(contest.name)
        program = products.functions(contest.source)
        if isinstance(program, str):
            report.check(contest.name, False, program, "compiled and loaded")
            continue
        wrong = contest.against(program, place)
        report.check(
            f"{contest.name}: proof", not wrong, wrong or "right", "right, in bytes where it can be"
        )
        if not wrong:
            _time(report, program, device, contest, rows, memory)
            products.owner(contest)
            report.note(f"{contest.name}: chosen", products.said[contest.kind])


def _time(
    report: Report,
    program: Program,
    device: Device,
    contest: Contest,
    rows: Sequence[int],
    memory: float,
) -> None:
    """Hold our product against torch's, and rows alone against rows beside others."""
    place = device.torch_device
    pairs = list(contest.pairs(program, place))
    ours, why_not = [own for own, _ in pairs], ""
    theirs: Sequence[Product] = ()
    try:
        theirs = [make() for _, make in pairs]
        theirs[0](torch.ones(1, choice.TIMED_SHAPE[1], device=place))
    except RuntimeError as error:
        theirs, why_not = (), str(error).splitlines()[0]
        report.note(f"{contest.name}: torch's", why_not)
    _check_rows(report, contest, ours[0], place)
    ratios = []
    for count in rows:
        x = torch.randn(count, choice.TIMED_SHAPE[1], device=place)
        own = _seconds_of(device, ours, x)
        said, took = f"{contest.name}: {count} rows", f"{1e3 * own:.3g} ms"
        if contest.kind is not choice.Function.PARTS:  # which read nothing but the rows
            rate = _bytes_of(ours[0]) / own / 1e9
            took = f"{took}, {rate:.0f} GB/s"
            if count == 1:
                share = 100.0 * rate / memory
                report.figure(f"{said}: share of the memory's rate", share, " %", least=LEAST_SHARE)
        if not theirs:
            report.note(said, took)
            continue
        torchs = _seconds_of(device, theirs, x)
        report.note(said, f"{took}; torch's {1e3 * torchs:.3g} ms")
        if count in DECODED:
            ratios.append(torchs / own)
    if ratios:
        report.figure(
            f"{contest.name}: torch's time over ours, 1 to 16 rows",
            statistics.geometric_mean(ratios),
            least=1.0,
        )
    x = torch.ones(1, choice.TIMED_SHAPE[1], device=place)
    calls = 1 if report.quick else CALLS
    host = chip.seconds_of(place, lambda: [ours[0](x) for _ in range(calls)]) / calls
    report.note(f"{contest.name}: a call", f"at most {1e6 * host:.0f} us of the host's time")


def _seconds_of(device: Device, products: Sequence[Product], x: torch.Tensor) -> float:
    """Return what the device takes for one of some products of x, launched together as a graph."""
    run = choice.launched_at_once(products, x, device.capture)
    return chip.seconds_of(device.torch_device, run) / len(products)


def _bytes_of(own: Any) -> int:
    """Return how much of weights, or of keys and values, one of ours reads."""
    if isinstance(own, OwnBlocks):
        return sum(part.packed.nbytes for part in own.parts)
    read = own.args[0] if isinstance(own, partial) else own.packed
    return int(read.nbytes)


def _check_rows(report: Report, contest: Contest, own: Product, place: torch.device) -> None:
    """Check that a row has the same bytes alone and beside others."""
    x = torch.randn(max(SAME_ROWS), choice.TIMED_SHAPE[1], device=place)
    whole = own(x)
    differ = [count for count in SAME_ROWS if not torch.equal(own(x[:count]), whole[:count])]
    report.check(
        f"{contest.name}: a row's bytes",
        not differ,
        f"differ with {differ} rows" if differ else "do not depend on the rows beside it",
        "the same",
    )
