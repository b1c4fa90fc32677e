"""What a target's pass over M rows costs on this machine, and what it could cost: the target is
measured with passes as it makes them when it verifies.

T_V(M) is one forward pass over the root and M - 1 nodes of a tree of four children a node, with the
logits of all rows, over a cache of a given length; the median of several passes, taken in turn over
all M so that whatever else happens on the machine happens to all of them. The limit is the larger
of two times: that of reading the packed weights once at the machine's bandwidth, and that of 2 M
operations a weight at the peak of the instructions that are used. Works on a checkpoint, or on a
config.json alone with random weights, and on fewer layers where memory does not hold all of them:
times are then scaled by weights. Knows settings and seconds; nothing of files but what the loader
reads.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from dovetail.protocol.errors import UserError
from dovetail.protocol.profile import (
    Calibration,
    ContextCurve,
    Limits,
    ProfileKey,
    Reading,
    RowsSeconds,
    load_profile,
    machine_key,
    shapes_key,
)
from dovetail.protocol.settings import TargetSettings, byte_count
from dovetail.workers import kernels
from dovetail.workers.calibration.reading import measure_reading
from dovetail.workers.devices import open_device
from dovetail.workers.kernels.probe import Arithmetic, bandwidth_gb_s, peak_gflop_s
from dovetail.workers.models.backends.selection import profile_key
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.models.checkpoints.inflate import (
    grow_skeleton,
    plan_inflation,
    planned_shapes,
)
from dovetail.workers.models.checkpoints.loader import decoder_layers, random_skeleton
from dovetail.workers.models.language_model import (
    LanguageModel,
    context_of,
    load_language_model,
    random_language_model,
)
from dovetail.workers.models.segment import Cache, Paths, Segment

MOST_ROWS = 64
EVERY_ROW = tuple(range(1, MOST_ROWS + 1))
LADDER = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
"""Measured where all 64 would take too long; T_V is nearly a polyline with its bends at the
kernels' tile heights."""
SHORT_LADDER = (1, 2, 4, 8, 16, 32, 64)
CHILDREN = 4
CONTEXT = 512
CHUNK = 128
"""Rows of a prefill pass."""
LEAST_PASSES, MOST_PASSES = 3, 25
PROBE_S = 0.6
"""For the bandwidth, and half as long for each kind of arithmetic."""
SHARE_OF_MEMORY = 0.8
"""Of the memory that is free, for a model that is measured without being needed."""
BYTES_A_WEIGHT = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "int8-per-tensor": 1}
TORCH_SIDE, TORCH_BYTES = 1024, 128 << 20

Shapes = Sequence[tuple[int, int]]
Say = Callable[[str, float], None]
"""Hears what is being done, and what share of all of it has been done."""
LOADED = 0.15
"""The share that is done when the model is loaded."""


@dataclass(frozen=True)
class Design:
    """What a config.json says of a model, and what the settings make of it."""

    folder: Path
    shapes: Shapes
    """[out, in] of all linears, head included."""
    layers: int
    context: int

    @property
    def weights(self) -> int:
        """How many weights the linears have."""
        return sum(n * k for n, k in self.shapes)


@dataclass(frozen=True)
class Subject:
    """A model to be measured, its own design, and that of the whole model that it stands for: of
    fewer layers where memory does not hold all of them."""

    model: LanguageModel
    measured: Design
    whole: Design
    random: bool

    @property
    def scale(self) -> float:
        """Seconds of the whole model for one second of the one that is measured."""
        return self.whole.weights / self.measured.weights


def calibrate(
    settings: TargetSettings,
    *,
    threads: int,
    memory_bytes: int,
    profile: Path | None,
    seconds: float,
    contexts: Sequence[int],
    isa: str,
    say: Say,
) -> dict[str, Any]:
    """Measure a target with about `seconds` of passes: the fields of `dovetail calibrate --json`
    but for t_d, and `key` and `calibration` for the profile.

    `memory_bytes`: how much a model may take here; `contexts`: lengths of the cache, none: some
    that the model allows; `isa`: a cap on the instructions of the kernels, or empty. `say` hears
    what is being done.
    """
    open_device("cpu", threads)
    if kernels.available():
        kernels.set_threads(threads)
        if isa:
            kernels.use_isa(kernels.Isa[isa.upper()])
    design = read_design(settings)
    base, lengths = _lengths(design.context, contexts)
    say("measuring the machine", 0.0)
    before = measure_limits(min(PROBE_S, seconds / 10))
    say("loading the model", LOADED / 3)
    subject = open_subject(settings, design, memory_bytes=memory_bytes, profile=profile)
    curves, skipped = _measure(subject, base, lengths, seconds, say)
    reading = _measure_reading(settings, subject, threads, seconds, say)
    say("measuring the machine again", 0.98)
    limits = best_of(before, measure_limits(min(PROBE_S, seconds / 10)))
    limit = limit_curve(subject, limits)
    calibration = Calibration(
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        backend=subject.model.backend,
        context=base,
        t_v=curves[base],
        t_v_limit=limit,
        t_v_by_context=tuple(
            ContextCurve(context=length, t_v=curve) for length, curve in curves.items()
        ),
        layers=subject.whole.layers,
        layers_measured=subject.measured.layers,
        limits=limits,
    )
    return {
        **told(subject, calibration),
        "backends": back_ends(subject, profile),
        "skipped_contexts": skipped,
        "key": calibration_key(subject).model_dump(),
        "calibration": calibration.model_dump(),
        "reading": None if reading is None else reading.model_dump(),
    }


def told(subject: Subject, calibration: Calibration) -> dict[str, Any]:
    """The result as `--json` has it."""
    limits, t_v = calibration.limits, calibration.t_v
    every = [m for m in EVERY_ROW if m <= t_v.rows[-1]]
    return {
        "model": subject.model.checkpoint.source,
        "weights": subject.model.weights,
        "random_weights": subject.random,
        "layers": subject.whole.layers,
        "layers_measured": subject.measured.layers,
        "parameters": subject.whole.weights,
        "threads": torch.get_num_threads(),
        "context": calibration.context,
        "t_v": {str(m): t_v.at(m) for m in every},
        "t_v_measured": list(t_v.rows),
        "t_v_limit": {str(m): calibration.t_v_limit.at(m) for m in every},
        "achieved": {str(m): calibration.t_v_limit.at(m) / t_v.at(m) for m in every},
        "t_v_by_context": {
            str(curve.context): {
                str(m): s for m, s in zip(curve.t_v.rows, curve.t_v.seconds, strict=True)
            }
            for curve in calibration.t_v_by_context
        },
        "bandwidth_gb_s": limits.bandwidth_gb_s,
        "peak_gflop_s": limits.peak_gflop_s[_arithmetic(subject.model, limits)],
        "peaks_gflop_s": dict(limits.peak_gflop_s),
        "probe": limits.probe,
    }


# -- the machine -----------------------------------------------------------------------------------


def measure_limits(budget_s: float) -> Limits:
    """Bandwidth and peaks on the threads in use: by the kernels' own loops; without kernels by
    torch, whose best is somewhat below the peak."""
    if not kernels.available():
        return Limits(
            bandwidth_gb_s=_torch_bandwidth(),
            peak_gflop_s={
                "fp32": _torch_gflop_s(torch.float32),
                "bf16": _torch_gflop_s(torch.bfloat16),
            },
            probe="torch",
        )
    peaks = {
        arithmetic.name.lower(): peak
        for arithmetic in Arithmetic
        if (peak := peak_gflop_s(arithmetic, budget_s=budget_s / 2)) is not None
    }
    return Limits(
        bandwidth_gb_s=bandwidth_gb_s(budget_s=budget_s),
        peak_gflop_s=peaks,
        probe=f"kernels {kernels.isa().name.lower()}",
    )


def best_of(one: Limits, other: Limits) -> Limits:
    """The larger of each: whatever else ran on the machine made the smaller one small."""
    peaks = {name: max(peak, other.peak_gflop_s[name]) for name, peak in one.peak_gflop_s.items()}
    return Limits(
        bandwidth_gb_s=max(one.bandwidth_gb_s, other.bandwidth_gb_s),
        peak_gflop_s=peaks,
        probe=one.probe,
    )


def _torch_gflop_s(dtype: torch.dtype) -> float:
    a = torch.ones(TORCH_SIDE, TORCH_SIDE, dtype=dtype)
    return 2 * TORCH_SIDE**3 / _least_seconds(lambda: a @ a) / 1e9


def _torch_bandwidth() -> float:
    memory = torch.ones(TORCH_BYTES // 4)
    return TORCH_BYTES / _least_seconds(memory.sum) / 1e9


def _least_seconds(call: Callable[[], object]) -> float:
    with torch.inference_mode():
        return min(_seconds(call) for _ in range(8))


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _arithmetic(model: LanguageModel, limits: Limits) -> str:
    """Which peak bounds a model's products: 16-bit weights are multiplied in fp32, but by the
    library's bf16, where there are instructions for it."""
    wanted = {
        "int8": "int8",
        "int8-per-tensor": "int8",
        "bf16": "bf16" if model.backend == "library" else "fp32",
    }.get(model.weights, "fp32")
    return wanted if wanted in limits.peak_gflop_s else "fp32"


def limit_curve(subject: Subject, limits: Limits) -> RowsSeconds:
    """max(packed bytes / bandwidth, 2 rows weights / peak), in seconds."""
    weights = subject.whole.weights
    reading = weights * BYTES_A_WEIGHT[subject.model.weights] / (limits.bandwidth_gb_s * 1e9)
    row = 2 * weights / (limits.peak_gflop_s[_arithmetic(subject.model, limits)] * 1e9)
    return RowsSeconds(rows=EVERY_ROW, seconds=tuple(max(reading, m * row) for m in EVERY_ROW))


# -- the model -------------------------------------------------------------------------------------


def read_design(settings: TargetSettings, layers: int | None = None) -> Design:
    """The design of the settings' model, from its config.json alone; `layers`: with so many in
    place of the configured number."""
    folder = find_folder(settings.model)
    model = random_skeleton(folder, layers=layers, stored=torch.float16).model
    plan = plan_inflation(model, byte_count(settings.inflate)) if settings.inflate else None
    if plan is not None:
        grow_skeleton(model, plan)
    return Design(
        folder, planned_shapes(model, plan), len(decoder_layers(model)[1]), context_of(model.config)
    )


def _measure_reading(
    settings: TargetSettings, subject: Subject, threads: int, seconds: float, say: Say
) -> Reading | None:
    """What prompts take where their reader is named (target.prefill)."""
    if settings.prefill in ("auto", "local"):
        return None
    if subject.random or subject.scale != 1.0:
        raise UserError(
            f"target.prefill = {settings.prefill!r} is measured with a model that is here and "
            "fits into memory: leave it out"
        )
    say(f"reading prompts by {settings.prefill}", 0.95)
    return measure_reading(settings, threads=threads, seconds=seconds)


def open_subject(
    settings: TargetSettings, design: Design, *, memory_bytes: int, profile: Path | None
) -> Subject:
    """The model of the settings: the checkpoint where there are weights and memory for them, else
    random weights, of as many layers as memory holds."""
    room = SHARE_OF_MEMORY * memory_bytes / BYTES_A_WEIGHT.get(settings.weights, 2)
    inflate_bytes = byte_count(settings.inflate) if settings.inflate else 0
    if any(design.folder.glob("*.safetensors")) and design.weights <= room:
        model = load_language_model(
            settings.model,
            weights=settings.weights,
            device="cpu",
            backend=settings.backend,
            inflate_bytes=inflate_bytes,
            profile=profile,
        )
        return Subject(model, design, design, random=False)
    if inflate_bytes:
        raise UserError(
            f"target.inflate = {settings.inflate!r} needs the weights of {settings.model} and "
            "memory for them: leave it out"
        )
    one, two = (read_design(settings, count).weights for count in (1, 2))
    fitting = int((room - one) // (two - one)) + 1
    if fitting < 1:
        raise UserError(
            f"not one layer of {settings.model} fits into the {memory_bytes / 2**30:.1f} GiB "
            "of memory that are free here"
        )
    part = design if fitting >= design.layers else read_design(settings, fitting)
    model = random_language_model(
        design.folder,
        weights=settings.weights,
        backend=settings.backend,
        layers=part.layers,
        profile=profile,
    )
    return Subject(model, part, design, random=True)


def calibration_key(subject: Subject) -> ProfileKey:
    """Where a calibration holds: that of the library's measurements, or, with the kernels, their
    version and instruction set in place of torch's."""
    model = subject.model
    if model.backend == "library":
        return profile_key(subject.whole.shapes, weights=model.weights)
    software = f"{model.kernels}-{kernels.isa().name.lower()}"
    shapes = shapes_key(list(subject.whole.shapes))
    return ProfileKey(
        machine=machine_key(),
        software=software,
        weights=model.weights,
        threads=torch.get_num_threads(),
        shapes=shapes,
    )


def back_ends(subject: Subject, profile: Path | None) -> dict[str, Any]:
    """What computes the model, why, and for the library what each candidate took for each shape."""
    model = subject.model
    found: dict[str, Any] = {
        "backend": model.backend,
        "kernels": model.kernels,
        "why": model.choice,
    }
    if model.backend == "library" and profile is not None:
        key = profile_key(subject.measured.shapes, weights=model.weights)
        found["linears"] = [
            choice.model_dump() for choice in load_profile(profile).find(key).linears
        ]
    if model.backend == "kernels":
        found["isa"] = kernels.isa().name.lower()
    return found


# -- the passes ------------------------------------------------------------------------------------


def _lengths(context: int, wanted: Sequence[int]) -> tuple[int, list[int]]:
    """The length that T_V is told for, and all lengths, ascending: unless told 512 or what the
    model allows, a quarter of that, and four times it."""
    room = context - MOST_ROWS
    if room < 1:
        raise UserError(
            f"a context of {context} tokens has no room for {MOST_ROWS} rows behind a cache: "
            "nothing can be measured"
        )
    if too_long := [length for length in wanted if length > room]:
        raise UserError(
            f"--context {too_long[0]}: the model has a context of {context} tokens, which "
            f"leaves {room} beside the {MOST_ROWS} rows of a pass"
        )
    if wanted:
        return min(wanted, key=lambda length: abs(length - CONTEXT)), sorted(set(wanted))
    base = min(CONTEXT, room // CHUNK * CHUNK or room)
    return base, sorted({max(1, base // 4), base, min(4 * base, max(base, room // CHUNK * CHUNK))})


def _measure(
    subject: Subject, base: int, lengths: Sequence[int], seconds: float, say: Say
) -> tuple[dict[int, RowsSeconds], list[int]]:
    """The curve at each length of the cache, and the lengths that a prefill would take too long to
    reach."""
    passes = Passes(subject.model, lengths[-1] + MOST_ROWS)
    curves: dict[int, RowsSeconds] = {}
    for index, length in enumerate(lengths):
        begun, share = LOADED + 0.8 * index / len(lengths), 0.8 / len(lengths)
        if length > base and passes.seconds_to(length) > seconds:
            return curves, [other for other in lengths if other not in curves]
        say(f"filling a cache of {length} rows", begun)
        passes.fill(length)
        passes.done = partial(
            _say_share, say, f"passes over a cache of {length} rows", begun, share
        )
        rows, budget_s = (
            (EVERY_ROW, 0.6 * seconds)
            if length == base
            else (SHORT_LADDER, 0.4 * seconds / (len(lengths) - 1))
        )
        curves[length] = passes.curve(rows, budget_s, scale=subject.scale)
    return curves, []


def _say_share(say: Say, doing: str, begun: float, share: float, done: float) -> None:
    say(doing, begun + share * done)


class Computes(Protocol):
    """What passes are made of: `LanguageModel`, or what passes for one."""

    @property
    def vocabulary_size(self) -> int: ...

    def new_cache(self, capacity: int) -> Cache:
        """For one session."""

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        segments: Sequence[Segment],
        *,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [R, V] of `rows`, None: of all."""


class Passes:
    """Passes of a model over one cache; `done` hears what share of a curve's time has gone."""

    def __init__(self, model: Computes, capacity: int) -> None:
        self._model = model
        self._cache: Cache = model.new_cache(capacity)
        self._generator = torch.Generator().manual_seed(1)
        self._prefill_s = 0.0
        self.done: Callable[[float], None] = lambda _: None

    def fill(self, length: int) -> None:
        """Prefill random tokens until the cache holds `length` rows."""
        while (start := self._cache.length) < length:
            count = min(CHUNK, length - start)
            positions = torch.arange(start, start + count)
            segment, last = Segment(self._cache, start, count), torch.tensor([count - 1])
            took = _seconds(partial(self._forward, positions, segment, last))
            self._cache.keep(range(start, start + count), count)
            self._prefill_s = took / count

    def seconds_to(self, length: int) -> float:
        """About how long it takes to fill the cache up to this length."""
        return self._prefill_s * max(0, length - self._cache.length)

    def curve(self, rows: Sequence[int], budget_s: float, *, scale: float = 1.0) -> RowsSeconds:
        """The median seconds of passes over so many rows, times `scale`; fewer row counts (LADDER)
        where not all can be measured within `budget_s`."""
        self.once(max(rows))  # memory is taken, threads are awake
        slowest, fastest = self.once(max(rows)), self.once(min(rows))
        if LEAST_PASSES * len(rows) * (slowest + fastest) / 2 > budget_s:
            rows = [count for count in rows if count in LADDER]
        began = time.perf_counter()
        taken: dict[int, list[float]] = {count: [] for count in rows}
        for turn in range(MOST_PASSES):
            gone = (time.perf_counter() - began) / max(budget_s, 1e-9)
            if turn >= LEAST_PASSES and gone > 1:
                break
            self.done(min(1.0, max(gone, turn / MOST_PASSES)))
            for count in rows if turn % 2 == 0 else reversed(rows):
                taken[count].append(self.once(count))
        return RowsSeconds(
            rows=tuple(rows),
            seconds=tuple(statistics.median(taken[count]) * scale for count in rows),
        )

    def once(self, rows: int) -> float:
        """Seconds of one pass over a tree of so many rows; nothing is committed."""
        root = self._cache.length
        paths = tree_paths(rows)
        segment = Segment(
            self._cache,
            root,
            rows,
            Paths.of(root, [[root + node for node in path] for path in paths]),
        )
        positions = torch.tensor([root + len(path) - 1 for path in paths])
        return _seconds(lambda: self._forward(positions, segment, None))

    def _forward(
        self, positions: torch.Tensor, segment: Segment, rows: torch.Tensor | None
    ) -> float:
        tokens = torch.randint(
            self._model.vocabulary_size, (segment.count,), generator=self._generator
        )
        return self._model.forward(tokens, positions, [segment], rows=rows)[
            0, 0
        ].item()  # asked for, so that a GPU has done it


def tree_paths(rows: int) -> list[list[int]]:
    """For each row of a tree of CHILDREN children a node, filled level by level: its ancestors, the
    root first, and itself."""
    paths: list[list[int]] = [[0]]
    for node in range(1, rows):
        paths.append([*paths[(node - 1) // CHILDREN], node])
    return paths
