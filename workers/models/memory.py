"""Whether a model fits into the memory that is there now."""

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.memory import read_room


def refuse_beyond(source: str, size: int, what: str) -> None:
    """`CheckpointError` if `size` more bytes, as `what` takes, exceed the free memory."""
    room = read_room()
    if room is not None and size > room.size + room.swap:
        found = f"there are {room.size / 1e9:.3g} GB {room.bound}"
        raise CheckpointError(
            f"{source}: {what} takes {size / 1e9:.3g} GB of memory while it is loaded, and "
            f"{found}: take a smaller model, or free memory"
        )
