"""The most memory that a process of a deployment may take: its footprint, and the keys and values
of several long conversations. Decides nothing."""

from dovetail.launch.machine.fit import needs_of
from dovetail.protocol.settings import Settings
from dovetail.workers.models.checkpoints.footprint import PROCESS_BYTES

CONVERSATIONS = 8
"""Long conversations for whose keys and values there is to be room."""
SESSIONS_SHARE = 4 / 3
"""A target offers three quarters of what is free to sessions (`ROOM_SHARE` of its prefix cache)."""
MARGIN = 1.1
LEAST_BYTES = {"coordinator": 500_000_000, "http": 1_000_000_000, "draft": 500_000_000}
"""The least limit of processes that grow with their users. With 100 of them all processes of a
small pair took 1.0 GB together."""


def memory_limit(settings: Settings, role: str) -> int | None:
    """Return the bytes beyond which a process of this role (coordinator, http, target, draft,
    unified) is at fault; None where its weights are not here or lie in a GPU's memory."""
    if role in ("target", "unified") and settings.memory.ram_bytes is not None:
        return round(MARGIN * (settings.memory.ram_bytes + PROCESS_BYTES))
    if not (needs := [need.footprint for need in needs_of(settings, (role,))]):
        return None
    size = sum(MARGIN * one.size + SESSIONS_SHARE * CONVERSATIONS * one.caches for one in needs)
    return max(LEAST_BYTES.get(role, 0), round(size))
