"""The cost of prefill: on the CPU, and with the weights of a model on the CPU streamed through a
device. Measured for the profile file, which later decides who prefills a prompt."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch

from dovetail.protocol.calibration import ReadingCosts, RowsSeconds
from dovetail.protocol.settings import TargetSettings
from dovetail.workers.devices.opening import open_device
from dovetail.workers.models.backends.placement import Place
from dovetail.workers.models.backends.sizes import Matrices, sizes_of
from dovetail.workers.models.backends.staged import Staging
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import PROMPT_ROWS, Segment

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

    model = load_language_model(
        settings.model,
        weights=settings.weights,
        device="cpu",
        backend=settings.backend,
        stage=stage,
        cache=settings.cache,
        context=settings.longest,
    )
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
    taken = []
    for _ in range(TIMES):
        start = time.perf_counter()
        read(model, tokens)
        taken.append(time.perf_counter() - start)
    return median(taken)


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
