"""The placement of a target by its settings: on its device alone, or with split, resident or
streamed layers, and a device for prefill. Opens the additional devices;
`models/backends/placement.py` places layers by their sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dovetail.protocol.calibration import ReadingCosts
from dovetail.protocol.errors import SettingsError
from dovetail.protocol.experts import count_experts
from dovetail.protocol.memory import read_room
from dovetail.protocol.profile import ProfileKey, load_profile, machine_key, shapes_key
from dovetail.protocol.settings import MemorySettings, TargetSettings
from dovetail.workers import kernels
from dovetail.workers.devices.base import Device
from dovetail.workers.devices.opening import open_device
from dovetail.workers.models.backends.device.choice import products_on
from dovetail.workers.models.backends.fused import VERSION
from dovetail.workers.models.backends.placement import (
    Demand,
    Placement,
    all_on_cpu,
    code_bytes,
    coded_bytes,
    needed_bytes,
    place_layers,
    reader_bytes,
)
from dovetail.workers.models.backends.sizes import (
    INT4,
    WEIGHT_BYTES,
    Matrices,
    Sizes,
    has_sizes,
    mixed,
    sizes_of,
)
from dovetail.workers.models.backends.staged import Staging
from dovetail.workers.models.checkpoints.architecture import KERNELS_ALONE
from dovetail.workers.models.checkpoints.configured import full_config
from dovetail.workers.models.checkpoints.context import LONGEST
from dovetail.workers.models.checkpoints.footprint import IN_BLOCKS, sizes_by_tensors
from dovetail.workers.models.checkpoints.gguf.view import FILE
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.models.wanted import BLOCK_WEIGHTS, FILE_KINDS
from dovetail.workers.serving.design import read_design

NO_MATRICES = Matrices(())
FREE_SHARE = 0.9
"""The share of a GPU's free memory that is used; the rest is left to libraries and activations."""


@dataclass
class Spread:
    """A target that is spread over devices. Its placement is known once its sizes are."""

    demand: Demand | None  # the layers for a device; None: every layer is on the CPU
    device: Device | None  # the device of the layers that are not on the CPU
    reader: Device | None
    reads_from: int  # minimum number of prompt rows that the reader prefills
    room: int | None  # bytes of a device that the target may take in all; None: all free memory
    host_room: int | None = None
    """Bytes of the host's memory that it may take; None: no limit was set."""
    placement: Placement | None = None
    cache: str = "fp32"  # the type of keys and values
    bits: int = 0
    """Bits per code of a substitute on the same device, for the layers that the device does not
    keep; 0 without a substitute."""

    def stage(
        self, config: Mapping[str, Any], weights: str, matrices: Matrices = NO_MATRICES
    ) -> Staging:
        """Place the layers of a model by its configuration and matrices, and return its staging.
        Raises `SettingsError` if they do not fit. A `Stager`."""
        if not has_sizes(config):
            kind = config.get("model_type")
            raise SettingsError(
                f"the config.json of a {kind} model lacks the sizes for placing layers: "
                "leave target.split and target.resident out"
            )
        sizes = _sizes(config, weights, matrices, self.cache)
        self.placement = placement = self._place(sizes, config)
        self._check_host(placement)
        self._check_reader(sizes, placement)
        return Staging(
            placement.places,
            None if self.device is None else self.device.transfer(),
            None if self.reader is None else self.reader.transfer(),
            placement.host_experts,
            None if self.device is None else self.device.capture,
        )

    def _place(self, sizes: Sizes, config: Mapping[str, Any]) -> Placement:
        """Return the placement of each layer, leaving room for the codes of a substitute."""
        demand = self.demand
        if demand is None:
            return all_on_cpu(sizes, self.host_room)
        if self.bits and demand.device_bytes is not None:
            whole = sizes_of(config, "half", self.cache)  # which give the number of weights
            trees = coded_bytes(whole, "half", self.bits, resident=whole.layers)
            demand = replace(
                demand,
                device_bytes=demand.device_bytes - trees,
                codes=code_bytes(whole, "half", self.bits),
            )
        return place_layers(sizes, demand)

    def _check_host(self, placement: Placement) -> None:
        """Raise `SettingsError` if a placement takes more than the host's memory."""
        room = read_room() if self.host_room is None else None
        if room is not None and placement.host_bytes > room.size + room.swap:
            raise SettingsError(
                f"{placement} takes {placement.host_bytes / 1e9:.3g} GB of the host's memory, but "
                f"there are {room.size / 1e9:.3g} GB {room.bound}: keep more layers on a device "
                "(target.resident), use smaller weights (target.weights), or set memory.ram if "
                "that is wrong"
            )

    def _check_reader(self, sizes: Sizes, placement: Placement) -> None:
        """Raise `SettingsError` if the prefill device has no layers to serve, or no room."""
        if self.reader is None:
            return
        if not placement.first:
            raise SettingsError(
                f"target.prefill = {self.reader.name!r} reads prompts for layers on the CPU, "
                "but there are none: leave it out"
            )
        left = None if self.room is None else self.room - placement.device_bytes
        if left is not None and (needed := reader_bytes(sizes, self.reader.name)) > left:
            raise SettingsError(
                f"{self.reader.name} would need {needed / 1e9:.3g} GB to read prompts, and "
                f"memory.vram leaves {left / 1e9:.3g} GB: "
                "set target.prefill to 'local', or raise memory.vram"
            )

    @property
    def gpus(self) -> Sequence[Device]:
        """The devices that compute layers or prefill, except the CPU."""
        named = (self.device, self.reader)
        return [device for device in named if device is not None and not device.is_cpu]

    @property
    def same_bytes(self) -> bool:
        """Whether every row has the same bytes as on the CPU: if only the CPU computes, even in
        place of a device."""
        return not self.gpus

    @property
    def split(self) -> str:
        """The fingerprint's part for the device of the last layers, if their bytes differ. Resident
        or streamed makes no difference."""
        if self.placement is None or self.device is None or not _is_gpu(self.device):
            return ""
        split = f"{len(self.placement.places) - self.placement.first}@{_arithmetic(self.device)}"
        return f"{split}, experts on the cpu" if self.placement.host_experts else split

    @property
    def prefill(self) -> str:
        """The fingerprint's part for the prefill device."""
        return (
            "local"
            if self.reader is None or not _is_gpu(self.reader)
            else f"{_arithmetic(self.reader)}>={self.reads_from}"
        )

    def __str__(self) -> str:
        if self.reader is None:
            return str(self.placement)
        which = (
            "prompts" if self.reads_from <= 1 else f"prompts of at least {self.reads_from} tokens"
        )
        return f"{self.placement}; {which} read by {self.reader.name}"


def _sizes(config: Mapping[str, Any], weights: str, matrices: Matrices, cache: str) -> Sizes:
    """Return the sizes of a model; `weights`: a name as returned by `weight_types.type_of`."""
    if weights in FILE_KINDS:
        return sizes_by_tensors(sizes_of(config, "int8", cache), matrices.tensors, FILE)
    weights = INT4 if weights in BLOCK_WEIGHTS else weights
    return mixed(sizes_of(config, weights, cache), weights, matrices)


def spread_of(
    settings: TargetSettings,
    memory: MemorySettings,
    device: Device,
    threads: int,
    readings: Sequence[ReadingCosts] = (),
    *,
    bits: int = 0,
) -> Spread | None:
    """Return how a target on this device is spread; None if one device computes all of it.
    `readings`: measured prompts in the profile file. `bits`: bits per code of a substitute
    that shares the device's layers, which are then kept one by one; 0 for none. Raises
    `SettingsError` for contradictory settings or a missing device."""
    split = settings.split
    if split.layers != "auto" and not split.device:
        raise SettingsError(
            f"target.split.layers = {split.layers} needs a device: name it with "
            "target.split.device, or leave both out"
        )
    if split.host_experts and not split.device:
        raise SettingsError(
            "target.split.experts_on_cpu needs a device for the rest of the layers: name it with "
            "target.split.device, or leave both out"
        )
    if split.device and not device.is_cpu:
        raise SettingsError(
            f"target.split.device = {split.device!r} goes with target.device = 'cpu', not "
            f"{device.name!r}: leave one of the two out"
        )
    own = (
        open_device(split.device, threads)
        if split.device
        else device
        if (bits and _is_gpu(device)) or _has_layers(settings, memory, device)
        else None
    )
    reader, reads_from = _reader(settings, threads, device, readings)
    gpus = [place.name for place in (device, own, reader) if place and not place.is_cpu]
    if gpus and settings.cache == "q8":
        raise SettingsError(
            f"target.cache = 'q8' is for layers on the CPU, but {gpus[0]} computes layers of the "
            "target or reads its prompts: use half"
        )
    if own is None and reader is None:
        _refuse_unused(memory)
        return None
    room = _room(memory, reader) if reader is not None and _is_gpu(reader) else memory.vram_bytes
    return Spread(
        None if own is None else _demand(settings, memory, own),
        own,
        reader,
        reads_from,
        room,
        host_room=memory.ram_bytes,
        cache=settings.cached,
        bits=bits,
    )


def known_readings(settings: TargetSettings, profile: Path) -> Sequence[ReadingCosts]:
    """Return what `dovetail calibrate` has measured of prefill with this model on the CPU."""
    known = load_profile(profile)
    if not any(entry.readings for entry in known.entries) or not kernels.available():
        return ()
    shapes, software = (
        shapes_key(list(read_design(settings).shapes)),
        f"{VERSION}-{kernels.isa().name.lower()}",
    )
    for weights in ("fp16", "bf16") if settings.weights == "half" else (settings.weights,):
        key = ProfileKey(
            machine=machine_key(),
            software=software,
            weights=weights,
            threads=torch.get_num_threads(),
            shapes=shapes,
            cache=settings.cached,
        )
        if found := known.find(key).readings:
            return found
    return ()


def _has_layers(settings: TargetSettings, memory: MemorySettings, device: Device) -> bool:
    """Return whether the target's device streams layers, may be unable to keep all of them, or
    computes layers that the library does not. On the CPU only if set, for tests."""
    if settings.resident != "auto" or (_is_gpu(device) and memory.vram != "auto"):
        return True
    if not _is_gpu(device):
        return False
    if settings.weights in IN_BLOCKS:
        return True
    config = full_config(find_folder(settings.model) / "config.json")
    if not has_sizes(config) or settings.weights not in WEIGHT_BYTES:
        return False
    if config.get("model_type") in KERNELS_ALONE:
        return True
    sizes = sizes_of({**config, LONGEST: settings.longest}, settings.weights, settings.cached)
    if count_experts(config)[0] > 1:
        sizes = mixed(sizes, settings.weights, read_design(settings).matrices)
    return needed_bytes(sizes, sizes.layers, sizes.layers, device.name) > _room(memory, device)


def _demand(settings: TargetSettings, memory: MemorySettings, device: Device) -> Demand:
    split = settings.split
    return Demand(
        device=device.name,
        computed=split.layers if isinstance(split.layers, int) else None,
        resident=settings.resident if isinstance(settings.resident, int) else None,
        streams=not split.device,
        device_bytes=_room(memory, device) if _is_gpu(device) else memory.vram_bytes,
        host_bytes=memory.ram_bytes,
        host_experts=split.host_experts,
    )


def _room(memory: MemorySettings, device: Device) -> int:
    free = int(FREE_SHARE * device.free_bytes())
    return free if memory.vram_bytes is None else min(free, memory.vram_bytes)


def _reader(
    settings: TargetSettings, threads: int, device: Device, readings: Sequence[ReadingCosts]
) -> tuple[Device | None, int]:
    """Return the device that prefills for layers on the CPU, and its minimum number of prompt rows;
    None if the CPU prefills."""
    possible = device.is_cpu and settings.cache != "q8"
    if settings.prefill == "local" or (settings.prefill == "auto" and not possible):
        return None, 0
    if settings.prefill != "auto":
        return open_device(settings.prefill, threads), 1
    better = [
        (rows, reading.device) for reading in readings if (rows := reading.better_from) is not None
    ]
    if not better:
        return None, 0
    rows, name = min(better)
    return open_device(name, threads), rows


def _refuse_unused(memory: MemorySettings) -> None:
    if memory.vram != "auto":
        raise SettingsError(
            f"memory.vram = {memory.vram!r} needs a GPU that computes layers of the target or "
            "reads prompts (target.device, target.split, target.prefill), but none does: "
            "leave it out"
        )


def _arithmetic(device: Device) -> str:
    """Return the software that computes on a GPU, for a fingerprint: torch's library and our
    products."""
    return f"{device.library}{products_on(device.torch_device).mark}"


def _is_gpu(device: Device | None) -> bool:
    return device is not None and not device.is_cpu
