"""The memory of this process: what the allocator keeps of freed tensors goes back to the system."""

import ctypes

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.memory import read_room


def release_memory() -> None:
    """Give back what has been freed. glibc keeps freed blocks of up to 32 MiB, and the layers of a
    model leave many behind as they are packed."""
    trim = getattr(
        ctypes.CDLL(None), "malloc_trim", None
    )  # glibc's own; other C libraries keep less
    if trim is not None:
        trim(0)


def refuse_beyond(source: str, size: int, what: str) -> None:
    """`CheckpointError` where `size` more bytes, for `what` a model is there as, do not fit into
    the memory that is there now."""
    room = read_room()
    if room is not None and size > room.size + room.swap:
        found = f"there are {room.size / 1e9:.3g} GB {room.bound}"
        raise CheckpointError(
            f"{source}: {what} takes {size / 1e9:.3g} GB of memory while it is loaded, and "
            f"{found}: take a smaller model, or free memory"
        )
