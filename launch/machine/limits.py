"""The most memory that a process of a deployment may take: for its weights as they are loaded, and
for the keys and values of several long conversations.

Estimated from the files, as `fit.py` does before anything is loaded; decides nothing.
"""

from dovetail.launch.machine.fit import needs_of
from dovetail.launch.processes.preflight import sizes_here
from dovetail.launch.settings.embedded import with_draft, with_target
from dovetail.protocol.settings import Settings
from dovetail.workers.models.backends.placement import cache_bytes
from dovetail.workers.models.checkpoints.footprint import PROCESS_BYTES

CONVERSATIONS = 8
"""Long conversations for whose keys and values there is to be room."""
SESSIONS_SHARE = 4 / 3
"""A target offers three quarters of what is free to sessions (`ROOM_SHARE` of its prefix cache)."""
MARGIN = 1.1
"""Beside the estimate of the weights, which is above the peak that was measured."""
SMALL_BYTES = {"coordinator": 500_000_000, "http": 1_000_000_000}
"""Processes without a model. With 100 users all processes of a small pair took 1.0 GB together."""
LOOKUP_BYTES = 500_000_000
"""A draft that looks up, in a process of its own: 135 MB were measured, most of them libraries."""


def memory_limit(settings: Settings, role: str) -> int | None:
    """Return the bytes beyond which a process of this role (coordinator, http, target, draft,
    unified) is at fault; None where its weights are not here or lie in a GPU's memory."""
    if role in SMALL_BYTES:
        return SMALL_BYTES[role]
    if role == "draft" and settings.draft.kind == "ngram":
        return LOOKUP_BYTES
    if role != "draft" and settings.memory.ram_bytes is not None:
        return round(MARGIN * (settings.memory.ram_bytes + PROCESS_BYTES))
    needs = [*needs_of(settings, (role,))]
    if not needs:
        return None
    weights = sum(need.size for need in needs)
    return round(MARGIN * weights + SESSIONS_SHARE * CONVERSATIONS * _conversation(settings, role))


def _conversation(settings: Settings, role: str) -> int:
    """Return the bytes of the keys and values of one long conversation and its trees; 0 where the
    sizes are not told."""
    cached = settings.target.cached
    if role == "draft":
        sizes = sizes_here(with_draft(settings.draft).model, "half", "fp32")
    else:
        sizes = sizes_here(with_target(settings.target).model, "half", cached)
    return 0 if sizes is None else sizes.layers * cache_bytes(sizes)
