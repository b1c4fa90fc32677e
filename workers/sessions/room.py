"""Checks whether the KV cache of another session fits into the host's memory: the kernel
overcommits, and would later kill the process that uses it."""

from dovetail.protocol.errors import RequestError
from dovetail.protocol.memory import read_room
from dovetail.workers.models.backends.staged import Staged
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Cache

CHECKED_BYTES = 64 << 20
"""Smaller caches are not checked: a query of the kernel takes a fraction of a millisecond."""


def host_row_bytes(model: LanguageModel) -> int:
    """Return the bytes of a row of keys and values in the host's memory; 0 if a device holds any
    part of them, which reports out of memory itself."""
    if model.device.type != "cpu" or isinstance(model.back_end, Staged):
        return 0
    return model.new_cache(0).row_bytes


def base_rows(cache: Cache) -> int:
    """Return the memory of a session with such a cache outside its rows, such as recurrent states,
    in rows of keys and values."""
    return -(-cache.base_bytes // max(1, cache.row_bytes))


def check_rows(rows: int, promised: int, row_bytes: int) -> None:
    """Raise `RequestError` of code "memory" if `rows` of this many bytes, in addition to those that
    open sessions may still fill, do not fit into the host's memory."""
    if rows * row_bytes < CHECKED_BYTES or (room := read_room()) is None:
        return
    if (rows + promised) * row_bytes > room.size + room.swap:
        more = (
            f", open sessions may take {promised * row_bytes / 1e9:.3g} GB more" if promised else ""
        )
        raise RequestError(
            "memory",
            f"keys and values of {rows} tokens take {rows * row_bytes / 1e9:.3g} GB{more}, "
            f"but there are {room.size / 1e9:.3g} GB {room.bound}: "
            "ask for fewer tokens, or wait until others have ended",
        )
