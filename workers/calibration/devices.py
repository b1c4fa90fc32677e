"""The costs of a target's layer and head on a device, resident or streamed, and on the CPU next to
it: measured for the profile file, from which the planner computes the cost of placements.

A few layers of random weights in the target's own shapes are enough. A layer's cost is the
difference between models of more and of fewer layers; the rest of a pass is attributed to the head.
The CPU may stand in for the device."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import isqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dovetail.protocol.calibration import Calibration, DeviceCosts, RowsSeconds
from dovetail.protocol.errors import UserError
from dovetail.protocol.profile import ProfileKey, load_profile, machine_key
from dovetail.protocol.settings import TargetSettings
from dovetail.workers import kernels
from dovetail.workers.calibration.passes import CONTEXT, Passes
from dovetail.workers.devices.base import Device, Transfer
from dovetail.workers.devices.opening import open_device
from dovetail.workers.kernels.probe import least_seconds
from dovetail.workers.models.backends.fused import VERSION
from dovetail.workers.models.backends.linear import CANDIDATES, profile_key
from dovetail.workers.models.backends.placement import Place
from dovetail.workers.models.backends.sizes import INT4, has_sizes, mixed, sizes_of
from dovetail.workers.models.backends.staged import Staging
from dovetail.workers.models.checkpoints.configured import full_config
from dovetail.workers.models.checkpoints.gguf.view import FILE
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.models.loading import random_language_model
from dovetail.workers.serving.design import design_key, read_design

FEW, MORE = 2, 6
"""Layers of the two models; more than there are buffers, so that streamed layers do stream."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 288)
"""Rows that are measured, as far as the model has positions; the last is that of large trees."""
LINK_TIMES = 5
LEAST_S = 1e-7
PROBE_SIDE, PROBE_BYTES = 4096, 256 << 20
PROBE_PARTS, MULTIPLE = 32, 4096
"""A probe takes at most the free memory over `PROBE_PARTS`, in multiples of this many bytes."""


def planned_config(settings: TargetSettings) -> Mapping[str, Any]:
    """Return the whole configuration of the settings' target."""
    return full_config(find_folder(settings.model) / "config.json")


@dataclass(frozen=True)
class Known:
    """The entries of a target in the profile file: its passes on the CPU, and its parts on a
    device; None: not measured."""

    calibration: Calibration | None
    parts: DeviceCosts | None


def known_costs(
    settings: TargetSettings,
    profile: Path,
    *,
    device: str,
    shards: int = 1,
    threads: int | None = None,
) -> Known:
    """Return what was measured of the settings' target, spread over this many `shards`. `threads`:
    by default those in use. Raises `ProfileError` if the file is damaged."""
    known = load_profile(profile)
    for key in keys_of(settings, shards, threads):
        entry = known.find(key)
        if entry.calibrations or entry.devices:
            calibration = next(
                (c for c in entry.calibrations if settings.backend in ("auto", c.backend)), None
            )
            return Known(calibration, next((d for d in entry.devices if d.device == device), None))
    return Known(None, None)


def keys_of(
    settings: TargetSettings, shards: int = 1, threads: int | None = None
) -> Iterator[ProfileKey]:
    """Yield the keys under which its calibration may be stored: with the kernels, then with the
    library."""
    design = read_design(settings)
    types = {
        "half": ("fp16", "bf16"),
        **{name: (f"{name}-{settings.activations}",) for name in (FILE, INT4)},
    }
    for weights in types.get(settings.weights, (settings.weights,)):
        if kernels.available():
            software = f"{VERSION}-{kernels.isa_of(settings.isa).name.lower()}"
            yield ProfileKey(
                machine=machine_key(),
                software=software,
                weights=weights,
                threads=threads or torch.get_num_threads(),
                shapes=design_key(design, weights),
                cache=settings.cached,
                shards=shards,
            )
        if weights in CANDIDATES and shards == 1:
            yield profile_key(list(design.shapes), weights=weights)


def measure_device(
    settings: TargetSettings, *, device: str, threads: int, seconds: float
) -> DeviceCosts:
    """Measure a target's `DeviceCosts` on a device with about `seconds` of passes. Raises
    `UserError` if its layers cannot be placed, or memory holds too few of them."""
    opened = open_device(device, threads)
    config = planned_config(settings)
    if not has_sizes(config):
        raise UserError(
            f"the config.json of a {config.get('model_type')} model lacks the sizes for placing "
            "layers: leave the device out"
        )
    with TemporaryDirectory(prefix="dovetail-design-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
        bench = _Bench(settings, Path(folder), opened, seconds / 5)
        host, resident = (
            _parted(bench.curve(place, FEW), bench.curve(place, MORE))
            for place in (Place.CPU, Place.RESIDENT)
        )
        streaming = bench.curve(Place.STREAMED, MORE)
    matrices = read_design(settings).matrices
    layer = mixed(sizes_of(config, settings.weights), settings.weights, matrices).layer
    link = link_gb_s(opened, layer)
    return DeviceCosts(
        device=opened.name,
        link_gb_s=link,
        layer=resident[0],
        streamed=_each(
            streaming,
            lambda rows, taken: max(
                (taken - resident[1].at(rows)) / MORE, resident[0].at(rows), layer / link / 1e9
            ),
        ),
        head=resident[1],
        host_layer=host[0],
        host_head=host[1],
    )


def link_gb_s(device: Device, size: int) -> float:
    """Return the 10^9 bytes a second of copies of that size from pinned memory; the best of a
    few."""
    transfer: Transfer = device.transfer()
    source = torch.empty(size, dtype=torch.uint8).fill_(1)
    transfer.pin(source)
    buffer = transfer.buffer(size)
    best = 0.0
    for _ in range(LINK_TIMES):
        start = time.perf_counter()
        transfer.wait(transfer.copy(source, buffer, transfer.computed()))
        _ = buffer[-1].item()  # waits for the GPU
        best = max(best, size / (time.perf_counter() - start) / 1e9)
    return best


@dataclass(frozen=True)
class _Bench:
    """Measures models of a few layers, all on one device."""

    settings: TargetSettings
    folder: Path
    device: Device
    seconds: float

    def curve(self, place: Place, layers: int) -> RowsSeconds:
        there, device = place is not Place.CPU, self.device
        staging = Staging(
            (place,) * layers,
            device.transfer() if there else None,
            capture=device.capture if there else None,
        )
        model = random_language_model(
            self.folder,
            weights=self.settings.weights,
            backend=self.settings.backend,
            layers=layers,
            stage=lambda *_: staging,
            cache=self.settings.cache,
        )
        rows = [count for count in ROWS if 2 * count <= model.context] or [1]
        length = max(1, min(CONTEXT, model.context - rows[-1]) // 2)
        passes = Passes(model, length + rows[-1])
        passes.fill(length)
        return passes.curve(rows, self.seconds)


def _parted(few: RowsSeconds, more: RowsSeconds) -> tuple[RowsSeconds, RowsSeconds]:
    """Return the cost of a layer, and of the rest of a pass."""
    layer = _each(more, lambda rows, taken: (taken - few.at(rows)) / (MORE - FEW))
    return layer, _each(few, lambda rows, taken: taken - FEW * layer.at(rows))


def _each(curve: RowsSeconds, change: Callable[[int, float], float]) -> RowsSeconds:
    """Change a curve pointwise, but never let it fall with more rows: that would be noise from
    other programs."""
    points = zip(curve.rows, curve.seconds, strict=True)
    changed = (max(LEAST_S, change(rows, taken)) for rows, taken in points)
    return RowsSeconds.rising(curve.rows, changed)


@dataclass(frozen=True)
class Probed:
    """The rough limits of a device, for estimates if no target was measured on it."""

    read_gb_s: float
    gflop_s: float  # peak of fp32 arithmetic; `half_gflop_s`: of fp16
    half_gflop_s: float
    link_gb_s: float


def probe_device(device: Device, *, side: int = PROBE_SIDE, size: int = PROBE_BYTES) -> Probed:
    """Measure bandwidth, arithmetic and link of a device, the best of a few short tries: over this
    many bytes, and with square matrices of that side, or less if little memory is free."""
    place, room = device.torch_device, max(MULTIPLE, device.free_bytes() // PROBE_PARTS)
    size = min(size, room) // MULTIPLE * MULTIPLE
    side = min(side, isqrt(room // 4))
    memory = torch.ones(size // 4, device=place)
    read = size / least_seconds(lambda: memory.sum().item(), LINK_TIMES) / 1e9
    peaks = []
    for dtype in (torch.float32, torch.float16):
        square = torch.ones(side, side, dtype=dtype, device=place)
        multiply = partial(_multiplied, square)
        peaks.append(2 * side**3 / least_seconds(multiply, LINK_TIMES) / 1e9)
    return Probed(read, peaks[0], peaks[1], link_gb_s(device, size))


def _multiplied(square: torch.Tensor) -> float:
    return (square @ square)[0, 0].item()
