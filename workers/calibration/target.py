"""Measures the cost of a target's pass over M rows on this machine, with the same passes as it
makes when it verifies, and compares it with the hardware's limit.

T_V(M) is one forward pass over the root and M - 1 nodes of a tree of four children a node, with the
logits of all rows, over a cache of a given length; the median of several passes, taken in turn over
all M so that other load on the machine affects all of them alike. The limit is the larger of two
times: reading the packed weights once at the machine's bandwidth, and 2 M operations a weight at
the peak of the instructions in use. Works on a checkpoint, or on a config.json alone with random
weights, and on fewer layers if memory does not hold all of them: times are then scaled by
weights."""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dovetail.protocol.calibration import (
    WEIGHT_BYTES,
    Calibration,
    ContextCurve,
    ExpertCosts,
    ReadingCosts,
    RowsSeconds,
    weighted_median,
)
from dovetail.protocol.errors import UserError
from dovetail.protocol.experts import Routing
from dovetail.protocol.profile import load_profile
from dovetail.protocol.settings import TargetSettings
from dovetail.workers import kernels
from dovetail.workers.calibration.limits import (
    PROBE_S,
    Subject,
    best_of,
    limit_curve,
    measure_limits,
)
from dovetail.workers.calibration.passes import (
    CHUNK,
    CONTEXT,
    EVERY_ROW,
    MOST_ROWS,
    SHORT_LADDER,
    Passes,
)
from dovetail.workers.devices.opening import open_device
from dovetail.workers.kernels.probe import seconds_of
from dovetail.workers.models.backends.linear import profile_key
from dovetail.workers.models.backends.placement import Place
from dovetail.workers.models.backends.sizes import Matrices, sizes_of
from dovetail.workers.models.backends.staged import Staging
from dovetail.workers.models.checkpoints.gguf.view import FILE, weight_paths
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model, random_language_model
from dovetail.workers.models.segment import PROMPT_ROWS, Segment
from dovetail.workers.models.wanted import Stager
from dovetail.workers.progress import LoadingTold, hearing_loads
from dovetail.workers.serving.design import Design, calibration_key, read_design
from dovetail.workers.serving.sharded import settle_target

SHARE_OF_MEMORY = 0.8  # the share of the free memory that a measured model may take

EXPERTS_SHARE = 0.1  # the share of the seconds for the cost of experts, if there are any

Say = Callable[[str, float], None]
"""Called with the present step, and the share of all work that is done."""
LOADED = 0.15  # the share that is done when the model is loaded


def calibrate(
    settings: TargetSettings,
    *,
    threads: int,
    memory_bytes: int,
    profile: Path | None,
    seconds: float,
    contexts: Sequence[int],
    say: Say,
) -> dict[str, Any]:
    """Measure a target with about `seconds` of passes. Return the fields of `dovetail calibrate
    --json` except t_d, and `key` and `calibration` for the profile.

    `memory_bytes`: how much a model may take here; `contexts`: lengths of the cache, none: some
    that the model allows. `say` is called with the present step."""
    open_device("cpu", threads)
    if kernels.available():
        kernels.set_threads(threads)
        kernels.use_isa(kernels.isa_of(settings.isa), "target.isa")
    design = read_design(settings)
    base, lengths = _lengths(design.context, contexts)
    say("measuring the machine", 0.0)
    before = measure_limits(min(PROBE_S, seconds / 10))
    say("loading the model", LOADED / 3)
    with hearing_loads(_told_by(say)):
        subject = open_subject(settings, design, memory_bytes=memory_bytes, profile=profile)
    settle_target(subject.model)
    curves, skipped, experts = _measure(subject, base, lengths, seconds, say)
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
        experts=experts,
        layers=subject.whole.layers,
        layers_measured=subject.measured.layers,
        limits=limits,
    )
    return {
        **told(subject, calibration),
        "backends": back_ends(subject, profile),
        "skipped_contexts": skipped,
        "key": calibration_key(subject.model, subject.whole).model_dump(),
        "calibration": calibration.model_dump(),
        "reading": None if reading is None else reading.model_dump(),
    }


def told(subject: Subject, calibration: Calibration) -> dict[str, Any]:
    """Return the result as in `--json`."""
    limits, t_v = calibration.limits, calibration.t_v
    every = [m for m in EVERY_ROW if m <= t_v.rows[-1]]
    return {
        "model": subject.model.checkpoint.source,
        "weights": subject.model.weights,
        "cache": subject.model.cache,
        "random_weights": subject.random,
        "layers": subject.whole.layers,
        "layers_measured": subject.measured.layers,
        "parameters": subject.whole.weights,
        "active_parameters": subject.whole.active,
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
        "experts": experts_told(calibration),
        "bandwidth_gb_s": limits.bandwidth_gb_s,
        "peak_gflop_s": limits.peak_of(
            subject.model.weights, library=subject.model.backend == "library"
        ),
        "peaks_gflop_s": dict(limits.peak_gflop_s),
        "probe": limits.probe,
    }


def experts_told(calibration: Calibration) -> dict[str, Any] | None:
    """Return how many experts the passes used, and the seconds of each further one; None if they
    were not counted."""
    if (experts := calibration.experts) is None:
        return None
    return {
        **experts.routing.model_dump(),
        "expert_s": experts.expert_s,
        "passes": {str(rows): found for rows, found in experts.passes},
    }


def _measure_reading(
    settings: TargetSettings, subject: Subject, threads: int, seconds: float, say: Say
) -> ReadingCosts | None:
    """Return the cost of prefill, if its device is set (target.prefill)."""
    if settings.prefill in ("auto", "local"):
        return None
    if subject.random or subject.scale != 1.0:
        raise UserError(
            f"target.prefill = {settings.prefill!r} needs a model whose weights are here and fit "
            "into memory: leave it out"
        )
    say(f"reading prompts by {settings.prefill}", 0.95)
    return measure_reading(settings, threads=threads, seconds=seconds)


def open_subject(
    settings: TargetSettings, design: Design, *, memory_bytes: int, profile: Path | None
) -> Subject:
    """Open the settings' model: the checkpoint if there are weights and memory for them, else
    random weights, of as many layers as fit."""
    room = SHARE_OF_MEMORY * memory_bytes / WEIGHT_BYTES.get(settings.weights, 2)
    blocks, fits = settings.weights == FILE, design.weights <= room
    if blocks and design.blocks_bytes > SHARE_OF_MEMORY * memory_bytes:
        raise UserError(
            f"the {design.blocks_bytes / 2**30:.1f} GiB of blocks of {settings.model} do not fit "
            f"into the {memory_bytes / 2**30:.1f} GiB of free memory"
        )
    if blocks or (fits and weight_paths(design.folder)):
        return Subject(_load(settings, profile=profile), design, design, random=False)
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
        cache=settings.cache,
        context=settings.longest,
    )
    return Subject(model, part, design, random=True)


def _load(
    settings: TargetSettings, *, profile: Path | None = None, stage: Stager | None = None
) -> LanguageModel:
    return load_language_model(
        settings.model,
        weights=settings.weights,
        device="cpu",
        backend=settings.backend,
        profile=profile,
        stage=stage,
        cache=settings.cache,
        activations=settings.activations,
        context=settings.longest,
    )


def back_ends(subject: Subject, profile: Path | None) -> dict[str, Any]:
    """Return what computes the model, why, and for the library the time of each candidate for each
    shape."""
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


def _lengths(context: int, wanted: Sequence[int]) -> tuple[int, list[int]]:
    """Return the length for which T_V is reported, and all lengths, ascending: by default 512 or
    what the model allows, a quarter of that, and four times it."""
    room = context - MOST_ROWS
    if room < 1:
        raise UserError(
            f"a context of {context} tokens has no room for {MOST_ROWS} rows behind a cache: "
            "nothing can be measured"
        )
    if too_long := [length for length in wanted if length > room]:
        raise UserError(
            f"--context {too_long[0]}: the model has a context of {context} tokens, which "
            f"leaves {room} in addition to the {MOST_ROWS} rows of a pass"
        )
    if wanted:
        return min(wanted, key=lambda length: abs(length - CONTEXT)), sorted(set(wanted))
    base = min(CONTEXT, room // CHUNK * CHUNK or room)
    return base, sorted({max(1, base // 4), base, min(4 * base, max(base, room // CHUNK * CHUNK))})


def _measure(
    subject: Subject, base: int, lengths: Sequence[int], seconds: float, say: Say
) -> tuple[dict[int, RowsSeconds], list[int], ExpertCosts | None]:
    """Return the curve at each length of the cache, the lengths that would take too long to
    prefill, and the cost of experts at the length `base`."""
    passes = Passes(subject.model, lengths[-1] + MOST_ROWS)
    curves: dict[int, RowsSeconds] = {}
    experts: ExpertCosts | None = None
    for index, length in enumerate(lengths):
        begun, share = LOADED + 0.8 * index / len(lengths), 0.8 / len(lengths)
        if length > base and passes.seconds_to(length) > seconds:
            return curves, [other for other in lengths if other not in curves], experts
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
        if length == base:
            experts = measure_experts(subject, passes, EXPERTS_SHARE * seconds)
    return curves, [], experts


def _told_by(say: Say) -> LoadingTold:
    """Return a function that reports the progress of loading to `say`: a third of the share is for
    checking the model, the rest for loading; a second loading only reports progress beyond the
    first."""
    most = LOADED / 3

    def hear(doing: str, done: int, total: int) -> None:
        nonlocal most
        begun = 1 if doing == "checking" else 2
        most = max(most, LOADED * (begun + done / max(1, total)) / 3)
        say(f"{doing} the model", most)

    return hear


def _say_share(say: Say, doing: str, begun: float, share: float, done: float) -> None:
    say(doing, begun + share * done)


ROWS = (4, 8, 16)
LEAST_PAIRS, MOST_PAIRS = 8, 64


def measure_experts(subject: Subject, passes: Passes, seconds: float) -> ExpertCosts | None:
    """Return how many experts the passes of the last curve used, and the cost of each further one,
    measured in about `seconds` seconds; None if the model counts no experts."""
    if (routing := subject.model.routing) is None:
        return None
    layers = subject.whole.layers / subject.measured.layers
    return ExpertCosts(
        routing=Routing(row=round(layers * routing.row), most=round(layers * routing.most)),
        expert_s=expert_seconds(passes, seconds),
        passes=tuple((rows, round(layers * found)) for rows, found in passes.experts.items()),
    )


def expert_seconds(passes: Passes, seconds: float) -> float:
    """Return the seconds of each further expert: the weighted median of the slopes of pairs of
    passes, one whose rows are the same token, and one whose rows differ and use more experts; 0 if
    both use as many."""
    pairs: list[tuple[float, int]] = []
    ends = time.perf_counter() + seconds
    while len(pairs) < MOST_PAIRS and (time.perf_counter() < ends or len(pairs) < LEAST_PAIRS):
        rows = ROWS[len(pairs) % len(ROWS)]
        (differing_s, more), (alike_s, fewer) = passes.counted(rows), passes.counted(rows, 1)
        pairs.append((differing_s - alike_s, more - fewer))
    slopes = [(more_s / apart, float(apart)) for more_s, apart in pairs if apart > 0]
    return max(0.0, weighted_median(slopes)) if slopes else 0.0


LADDER = (16, 64, 256, 1024, 4096)
"""Rows of the measured prompts, as far as the model has positions and time permits."""
TIMES = 3
SHARE_OF_TIME = 0.2
"""The largest share of all seconds for one prompt: if it is expected to take longer, it and longer
ones are not measured."""


def measure_reading(settings: TargetSettings, *, threads: int, seconds: float) -> ReadingCosts:
    """Measure a target's `ReadingCosts` with the device of `target.prefill` in about `seconds` of
    passes. The median of three, after a warm-up."""
    device = open_device(settings.prefill, threads)

    def stage(config: Mapping[str, Any], weights: str, _: Matrices) -> Staging:
        return Staging((Place.CPU,) * sizes_of(config, weights).layers, reader=device.transfer())

    model = _load(settings, stage=stage)
    local: dict[int, float] = {}
    streamed: dict[int, float] = {}
    for rows in (rows for rows in LADDER if rows <= model.context):
        for times, read in ((streamed, _read_apart), (local, _read_locally)):
            times[rows] = _seconds(model, rows, read)
        if 4 * TIMES * (streamed[rows] + local[rows]) > SHARE_OF_TIME * seconds:
            break
    return ReadingCosts(device=device.name, local=_curve(local), streamed=_curve(streamed))


def _curve(seconds: dict[int, float]) -> RowsSeconds:
    return RowsSeconds(rows=tuple(seconds), seconds=tuple(seconds.values()))


def _seconds(
    model: LanguageModel, rows: int, read: Callable[[LanguageModel, torch.Tensor], None]
) -> float:
    tokens = torch.arange(rows) % model.vocabulary_size
    read(model, tokens)
    return median(seconds_of(partial(read, model, tokens)) for _ in range(TIMES))


def _read_apart(model: LanguageModel, tokens: torch.Tensor) -> None:
    rows = len(tokens)
    model.read_apart(
        tokens, Segment(model.new_cache(rows), 0, rows), wanted=(), rows=torch.tensor([rows - 1])
    )


def _read_locally(model: LanguageModel, tokens: torch.Tensor) -> None:
    """Prefill a prompt as a target without a separate prefill device does."""
    cache = model.new_cache(len(tokens))
    for start in range(0, len(tokens), PROMPT_ROWS):
        part = tokens[start : start + PROMPT_ROWS]
        positions = torch.arange(start, start + len(part))
        model.forward(
            part, positions, [Segment(cache, start, len(part))], rows=torch.tensor([len(part) - 1])
        )
        cache.keep(range(start, start + len(part)), len(part))
