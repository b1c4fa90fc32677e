"""Levels of drafts of real sizes on a device: milliseconds, the host's part of them, what the host
asks for, and the share of the memory's rate at which weights are read.

A head has random weights for a target of the shape of a 7B model, whose layers are not read; the
small model has 22 layers of width 2048, the substitute nine of the 7B shape. The time of a level is
that of a proposal of nine levels less that of one, divided by eight: rows, graph, ranking and
growth of the tree with all that Python does, of one session or of eight that share a pass. Times
are medians.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from dovetail.protocol.errors import DovetailError
from dovetail.protocol.settings import DraftSettings
from dovetail.workers.devices.base import Device
from dovetail.workers.drafters.head import HeadDrafter
from dovetail.workers.drafters.model import Drafter
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from gpu import chip
from gpu.grown import Shape, grow
from gpu.report import Report
from support.drafts import DEEP, SHALLOW, Timed, of_a_level, wide
from support.heads import write_head

TIMES, QUICK_TIMES, WARM = 11, 3, 3
MEASURED = ((1, 1), (8, 1), (8, 8))
"""Rows of a level of each session, and sessions."""
HOST_MS = {"eagle": 0.25, "small": 0.4}
"""The most milliseconds of a level that the host may take."""
LEAST_SHARE = 60.0
"""Percent of the memory's rate, of a level of one row."""
BITS = {"fp16": 16.0, "int8": 8.5, "int4": 4.5}
"""Bits of a weight with its share of scales."""
TARGET, SMALL_MODEL = Shape(4096, 11008, 9, 128), Shape(2048, 5632, 22, 64)
QUICK_TARGET, QUICK_MODEL = (Shape(512, 1024, 9, 64),) * 2
KINDS = {"eagle": ("fp16", "int8", "int4"), "small": ("fp16",), "substitute": ("int4",)}
MOST = 6
"""Functions of which is said what they take."""
ASKED = {
    "launches": ("LaunchKernel",),
    "graphs": ("GraphLaunch",),
    "copies": ("cudaMemcpy",),
    "waits": ("Synchronize",),
}
"""A kind of call -> words in the names of the CUDA runtime's functions that make it."""


@dataclass(frozen=True)
class Case:
    """A draft, and what its levels read."""

    settings: DraftSettings
    target: Path
    size: float
    """The bytes of weights of a level."""

    @property
    def name(self) -> str:
        return f"{self.settings.kind}, {self.settings.weights}"


@dataclass(frozen=True)
class Looked:
    """The calls that a level makes on a device, and how long the device computes."""

    asked: str
    device_ms: float
    """The milliseconds in which the device computes."""
    most: str
    """The functions that take most of them, and how much."""


def run(report: Report, device: Device, work: Path, progress: Callable[[str], None]) -> None:
    """Measure every kind and type of weights. torch's profiler is used after all times are taken:
    it slows whatever is launched from then on."""
    size = chip.QUICK_BYTES if report.quick else chip.COPY_BYTES
    memory = chip.memory_gb_s(device.torch_device, size)
    timed: list[tuple[Case, Timed, float]] = []
    for case in _cases(device, work, quick=report.quick):
        progress(case.name)
        try:
            engine = open_draft_worker(
                case.settings, name="draft", threads=1, target=str(case.target)
            ).engine
        except DovetailError as error:
            report.check(case.name, False, str(error).splitlines()[0])
            continue
        assert isinstance(engine, HeadDrafter | Drafter)
        for width, sessions in MEASURED:
            if report.quick and sessions > 1 and case.settings.kind != "eagle":
                continue
            drafts = Timed(engine, width, 0.0, sessions)
            level = of_a_level(partial(_median_ms, drafts, quick=report.quick))
            least = 1e3 * case.size / (1e9 * memory)
            said = f"{level:.3f} ms; the memory takes {least:.3f} for the weights"
            report.note(_said(case, drafts), said)
            timed.append((case, drafts, level))
    if torch.cuda.is_available():
        for case, drafts, level in timed:
            _look_into(report, case, drafts, level, memory)


def _said(case: Case, drafts: Timed) -> str:
    rows = f"{case.name}: a level of {drafts.width} row{'s' if drafts.width > 1 else ''}"
    return rows if drafts.together == 1 else f"{rows} for each of {drafts.together} sessions"


def _cases(device: Device, work: Path, *, quick: bool) -> Iterator[Case]:
    """Yield all drafts, whose models are written to a folder."""
    shape, model = (QUICK_TARGET, QUICK_MODEL) if quick else (TARGET, SMALL_MODEL)
    made_on = torch.device("cpu") if device.name == "pretended:0" else device.torch_device
    target, small = work / "target", work / "small"
    grow(shape, target, made_on)
    grow(model, small, made_on)
    vocabulary = open_checkpoint(str(target)).vocabulary.size
    head = write_head(work / "head", wide("eagle", shape.hidden, shape.units, vocabulary))
    output = vocabulary * shape.hidden
    # of a head: fusion, queries and a quarter as many keys and values, MLP, output
    of_head = 4.5 * shape.hidden**2 + 3 * shape.hidden * shape.units + output
    drafts: list[tuple[str, dict[str, Any], float, int]] = [
        ("eagle", {"model": str(head)}, of_head, 0),
        ("small", {"model": str(small)}, model.bytes / 2 + vocabulary * model.hidden, 0),
        ("substitute", {}, shape.bytes / 2, output),
    ]
    for kind, source, count, halves in drafts:
        for weights in KINDS[kind]:
            settings = DraftSettings(
                kind=kind, device=device.name, weights=weights, ahead=False, **source
            )
            yield Case(settings, target, count * BITS[weights] / 8 + 2 * halves)


def _look_into(report: Report, case: Case, drafts: Timed, level: float, memory: float) -> None:
    """Say what of the milliseconds of a level is the host's, and what it asks for. `memory`: the GB
    a second of the device's memory."""
    looked, said = _looked(drafts), _said(case, drafts)
    report.note(f"{said}: the device", f"{looked.device_ms:.3f} ms; {looked.asked}")
    report.note(f"{said}: most of it", looked.most)
    most = HOST_MS.get(case.settings.kind) if drafts.together == 1 else None
    report.figure(f"{said}: the host", level - looked.device_ms, " ms", most=most)
    if (drafts.width, drafts.together) == (1, 1):
        share = 1e2 * 1e3 * case.size / (1e9 * memory) / looked.device_ms
        report.figure(f"{said}: share of the memory's rate", share, " %", least=LEAST_SHARE)


def _median_ms(drafts: Timed, depth: int, *, quick: bool) -> float:
    found = [drafts.seconds(depth) for _ in range(WARM + (QUICK_TIMES if quick else TIMES))]
    return 1e3 * statistics.median(found[WARM:])


def _looked(drafts: Timed) -> Looked:
    """Return what a level asks of a CUDA device, and what that computes."""
    counted, computed = [], []
    for depth in (DEEP, SHALLOW):
        drafts.begin(depth)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            drafts.draft()
        averages = seen.key_averages()
        counted.append(
            [
                sum(e.count for e in averages if any(word in e.key for word in words))
                for words in ASKED.values()
            ]
        )
        computed.append(_functions_us(seen))
    levels, (deep, shallow) = DEEP - SHALLOW, computed
    counts = [(many - few) / levels for many, few in zip(*counted, strict=True)]
    asked = ", ".join(f"{count:g} {what}" for what, count in zip(ASKED, counts, strict=True))
    deep.subtract(shallow)
    most = ", ".join(f"{name} {us / 1e3 / levels:.3f} ms" for name, us in deep.most_common(MOST))
    return Looked(asked, deep.total() / 1e3 / levels, most)


def _functions_us(seen: profile) -> Counter[str]:
    """Return the microseconds that each function adds to those in which the device does anything:
    a function may begin while the one in front of it still runs, and wait for that."""
    spans = sorted(
        (e.time_range.start, e.time_range.end, e.name.partition("(")[0])
        for e in seen.events()
        if e.device_type == DeviceType.CUDA
    )
    found, until = Counter[str](), 0.0
    for start, end, name in spans:
        found[name] += max(0.0, end - max(start, until))
        until = max(until, end)
    return found
