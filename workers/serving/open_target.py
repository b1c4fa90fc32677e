"""Opens a target worker from settings: its model is loaded on its device, or spread over
several."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from dovetail.protocol.calibration import Calibration, ExpertCosts
from dovetail.protocol.errors import SettingsError
from dovetail.protocol.messages import MAX_CURVES, Fingerprint
from dovetail.protocol.profile import load_profile
from dovetail.protocol.settings import CacheSettings, MemorySettings, TargetSettings
from dovetail.workers.devices import cpu
from dovetail.workers.devices.base import Device
from dovetail.workers.devices.memory import limit_memory
from dovetail.workers.devices.opening import open_device
from dovetail.workers.kernels.shards import Shard
from dovetail.workers.models.backends.device.choice import tell_products
from dovetail.workers.models.backends.stages.stage import StagedCache
from dovetail.workers.models.checkpoints.choices import suppressed_in
from dovetail.workers.models.checkpoints.gguf.view import notes_of
from dovetail.workers.models.checkpoints.quantised.searched import SEARCH
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.remembered import tell_proof
from dovetail.workers.serving.sharded import begin_shards, tell_shards
from dovetail.workers.serving.spread import Spread, known_readings, spread_of
from dovetail.workers.sessions.opening import open_blocks
from dovetail.workers.sessions.prefix_cache import affordable_tokens, room_tokens
from dovetail.workers.target import Identity, TargetWorker

MOST_WORDS = 200
"""Summaries have at most this many characters of the reason why torch computes a model; the log has
the full text."""
UNLIMITED = MemorySettings()
NO_PROMPTS = CacheSettings(memory="0")


def open_target_worker(
    settings: TargetSettings,
    *,
    name: str,
    threads: int,
    profile: Path | None = None,
    memory: MemorySettings = UNLIMITED,
    bits: int = 0,
    shards: Sequence[Shard] = (),
    prompts: CacheSettings = NO_PROMPTS,
) -> TargetWorker:
    """Open a target worker with its model loaded on its device, or spread over several; raise
    `UserError` for wrong settings. `profile`: the file of measurements on this machine. `bits`:
    bits per code of a substitute on the same GPU, 0 for none. `shards`: the memory nodes over
    which it is spread on the CPU; empty if it is not spread. `prompts`: the memory and disk space
    for cached prompts."""
    device = open_device(settings.device, threads)
    spread = spread_of(
        settings,
        memory,
        device,
        threads,
        () if profile is None else known_readings(settings, profile),
        bits=bits,
    )
    if settings.weights == "int8-per-tensor":
        print(
            f"{name}: int8-per-tensor is not lossless: one scale for all rows of a pass makes "
            "a token depend on the other rows",
            file=sys.stderr,
        )
    for gpu in () if spread is None else spread.gpus:
        limit_memory(gpu, memory.vram_bytes)
    if shards:
        if spread is not None or not device.is_cpu:
            raise SettingsError(
                "target.numa = 'shard' is for a target that the CPU computes alone, but a device "
                "computes a part of this one: leave out either it or target.device, target.split "
                "and target.prefill"
            )
        begin_shards(shards)
    model = load_language_model(
        settings.model,
        weights=settings.weights,
        device=str(device.torch_device),
        backend=settings.backend,
        profile=profile,
        stage=None if spread is None else spread.stage,
        cache=settings.cache,
        proof=settings.proof,
        activations=settings.activations,
        context=settings.longest,
    )
    model.suppressed = suppressed_in(model.checkpoint.folder, model.end)
    for note in notes_of(model.checkpoint.folder):
        print(f"{name}: {note}", file=sys.stderr)
    tell_proof(model.proved, name)
    tell_shards(model, name)
    if spread is not None:
        for place in {place.torch_device for place in spread.gpus}:
            tell_products(place, name)
    identity = _identity(settings, name, threads, device, spread, model, profile)
    if identity.same_bytes:
        identity = _storing(identity, settings.model, model, prompts)
    return TargetWorker(model, identity)


def _storing(
    identity: Identity, called: str, model: LanguageModel, prompts: CacheSettings
) -> Identity:
    """Return the registration of a target with its store of cached prompts, if it has one."""
    seed = (identity.fingerprint.model_dump_json(), model.cache)
    named = (identity.name, called, model.new_cache, model.device, *seed)
    blocks = open_blocks(prompts, *named, snapshots=True)
    if blocks is None or identity.room_tokens is None:
        return replace(identity, blocks=blocks)
    taken = (prompts.memory_bytes or 0) // max(1, model.new_cache(0).row_bytes)
    return replace(identity, blocks=blocks, room_tokens=max(0, identity.room_tokens - taken))


def _identity(
    settings: TargetSettings,
    name: str,
    threads: int,
    device: Device,
    spread: Spread | None,
    model: LanguageModel,
    profile: Path | None,
) -> Identity:
    """Return the registration of a loaded model."""
    # a row has the same bytes whether reused or computed, and in chunks of any size
    same_bytes = model.backend == "kernels" and (spread is None or spread.same_bytes)
    whole = spread is None or spread.demand is None
    known = None
    if profile is not None and device.is_cpu and whole:
        known = _calibration(settings, model, profile)
    free_bytes, row_bytes = device.free_bytes(), model.new_cache(0).row_bytes
    identity = Identity(
        name,
        settings.model,
        device.name,
        threads,
        _fingerprint(settings, model, device, spread),
        curves=() if known is None else known.t_v_by_context[:MAX_CURVES],
        experts=_experts(model, known),
        kept_tokens=affordable_tokens(free_bytes, row_bytes) if same_bytes else 0,
        room_tokens=_room_tokens(spread, device, model),
        same_bytes=same_bytes,
        placement=_told_library(settings, name, device, model),
    )
    if spread is None:
        return identity
    reader = "" if spread.reader is None else spread.reader.name
    return replace(identity, placement=str(spread), reader=reader, reads_from=spread.reads_from)


def _room_tokens(spread: Spread | None, device: Device, model: LanguageModel) -> int | None:
    """Return how many tokens of all sessions fit into memory; None: unknown."""
    cache = model.new_cache(0)
    if spread is None or not spread.gpus:
        return room_tokens(device.free_bytes(), cache.row_bytes)
    placement = spread.placement
    assert placement is not None
    assert isinstance(cache, StagedCache)
    on_host = room_tokens(cpu.free_bytes(), cache.parts[0].row_bytes) if placement.first else None
    found = [tokens for tokens in (on_host, placement.tokens) if tokens is not None]
    return min(found, default=None)


def _told_library(settings: TargetSettings, name: str, device: Device, model: LanguageModel) -> str:
    """Report on stderr why torch instead of the kernels computes a model, and return the reason for
    summaries; empty if the kernels do, or if the settings require torch."""
    if not device.is_cpu or (settings.backend, model.backend) != ("auto", "library"):
        return ""
    why = f"because {model.choice}"
    print(f"{name}: torch's own operations compute this model, {why}", file=sys.stderr)
    return f"by torch's own operations, {why}"[:MOST_WORDS]


def _fingerprint(
    settings: TargetSettings, model: LanguageModel, device: Device, spread: Spread | None
) -> Fingerprint:
    """Return the fingerprint, which is equal for workers that compute the same bytes. With the
    kernels, bytes do not depend on instruction set and number of threads; with torch they do."""
    family = model.kernels if model.backend == "kernels" else f"{device.library}-{model.kernels}"
    others = {} if spread is None else {"split": spread.split, "prefill": spread.prefill}
    if settings.weights == "int4":
        family = f"{family}+{SEARCH}"
    if model.suppressed:
        family = f"{family}+mask{sha256(repr(model.suppressed).encode()).hexdigest()[:8]}"
    return Fingerprint(
        checkpoint=model.checkpoint_digest,
        weights=model.weights if settings.weights in ("file", "int4") else settings.weights,
        kernels=family,
        cache=model.cache,
        **others,
    )


def _experts(model: LanguageModel, known: Calibration | None) -> ExpertCosts | None:
    """Return how many experts a model has, and their cost if known; None if it has none or does not
    count them."""
    if (routing := model.routing) is None:
        return None
    return known.experts if known is not None and known.experts else ExpertCosts(routing=routing)


def _calibration(
    settings: TargetSettings, model: LanguageModel, profile: Path
) -> Calibration | None:
    """Return the measurements of `dovetail calibrate` for this model and configuration, if any."""
    known = load_profile(profile)
    if not any(entry.calibrations for entry in known.entries):
        return None
    from dovetail.workers.serving.design import calibration_key, read_design

    entry = known.find(calibration_key(model, read_design(settings)))
    found = (one for one in entry.calibrations if one.backend == model.backend)
    return next(found, None)
