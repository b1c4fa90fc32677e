"""Opens a worker's store of cached prompts from settings."""

import sys
from collections.abc import Callable

import torch

from dovetail.protocol.files import prompts_folder, refusal
from dovetail.protocol.memory import read_room
from dovetail.protocol.prefixes import digest_of
from dovetail.protocol.settings import CacheSettings, byte_count
from dovetail.workers.models.segment import Cache
from dovetail.workers.sessions.block_files import BlockFiles
from dovetail.workers.sessions.blocks import BlockStore, can_store

LAYOUT = "1"  # raised when rows are stored differently
MEMORY_SHARE = 16
"""Blocks get this fraction of the memory that is free at the start, half as much as ended
sessions."""


def open_blocks(
    settings: CacheSettings,
    name: str,
    model: str,
    new_cache: Callable[[int], Cache],
    device: torch.device,
    *seed: str,
    known: int = 0,
    snapshots: bool = False,
) -> BlockStore | None:
    """Return a worker's store, or None if the settings, the device or the kind of cache exclude it,
    which is reported if `disk` is set. `model`: for `dovetail cache`; `seed`: what its rows depend
    on besides tokens; `known`: how many tokens after a row it depends on; `snapshots`: also of a
    model with states."""
    room = read_room()
    most = settings.memory_bytes
    if most is None:
        most = 0 if room is None else room.size // MEMORY_SHARE
    cache = new_cache(0)
    storable = device.type == "cpu" and can_store(cache) and (snapshots or not cache.base_bytes)
    if not most or not storable:
        if byte_count(settings.disk):
            why = "memory for them is 0" if storable else "the rows of this model cannot be stored"
            print(f"{name}: no prompts are cached on disk: {why}", file=sys.stderr)
        return None
    digest = digest_of(LAYOUT, type(cache).__name__, *seed)
    return BlockStore(digest, new_cache, most, _files(settings, name, model, digest), known)


def _files(settings: CacheSettings, name: str, model: str, seed: bytes) -> BlockFiles | None:
    """Return the files of a store, or None without a setting or a folder, which is reported."""
    if not (most := byte_count(settings.disk)):
        return None
    folder = prompts_folder() / seed.hex()[:32]
    try:
        return BlockFiles(folder, most, name, model)
    except OSError as error:
        print(f"{name}: no prompts are cached in {folder}: {refusal(error)}", file=sys.stderr)
        return None
