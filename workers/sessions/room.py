"""A check whether keys and values of one session more fit into the host's memory: the kernel
promises what it does not have, and kills later whoever asks for it."""

from typing import Protocol

from dovetail.protocol.errors import RequestError
from dovetail.protocol.memory import read_room
from dovetail.workers.models.backends.staged import Staged
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Cache

CHECKED_BYTES = 64 << 20
"""Caches from this size on are looked at: to ask the kernel takes a fraction of a millisecond."""


def host_row_bytes(model: LanguageModel) -> int:
    """Return the bytes of a row of keys and values in the host's memory; 0 if a device has all or a
    part of them, and reports itself what it cannot hold."""
    if model.device.type != "cpu" or isinstance(model.back_end, Staged):
        return 0
    return model.new_cache(0).row_bytes


class Cached(Protocol):
    """A model whose sessions have caches."""

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for `capacity` rows."""


def base_rows(model: Cached) -> int:
    """Return the memory of a session outside of its rows, such as the states of recurrent layers,
    in rows of keys and values."""
    cache = model.new_cache(0)
    return -(-cache.base_bytes // max(1, cache.row_bytes))


def check_rows(rows: int, promised: int, row_bytes: int) -> None:
    """`RequestError` of code "memory" if `rows` of this many bytes, in addition to those that open
    sessions may still fill, do not fit into the host's memory."""
    if rows * row_bytes < CHECKED_BYTES or (room := read_room()) is None:
        return
    if (rows + promised) * row_bytes > room.size + room.swap:
        beside = (
            f", open sessions may take {promised * row_bytes / 1e9:.3g} GB more" if promised else ""
        )
        raise RequestError(
            "memory",
            f"keys and values of {rows} tokens take {rows * row_bytes / 1e9:.3g} GB{beside}, "
            f"and there are {room.size / 1e9:.3g} GB {room.bound}: "
            "ask for fewer tokens, or wait until others have ended",
        )
