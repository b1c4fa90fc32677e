"""Checks, before anything is loaded, that models started together fit into memory: footprints, from
the headers of weight files, against the memory left on the machine, in its control groups, on a
memory node and for each process. Errors name settings that would fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dovetail.launch.machine.topology import Place
from dovetail.launch.processes import forked
from dovetail.launch.settings.models import with_draft, with_target
from dovetail.protocol.errors import CheckpointError, SettingsError
from dovetail.protocol.memory import Room, node_room, process_room, read_room
from dovetail.protocol.settings import Settings
from dovetail.workers.devices.registry import Memory, memory_of
from dovetail.workers.models.backends.sizes import INT4
from dovetail.workers.models.checkpoints.footprint import (
    PROCESS_BYTES,
    PROCESS_SPACE,
    SEARCH_BYTES,
    Footprint,
    Tensor,
    head_footprint,
    host_footprint,
    in_pieces,
    mtp_footprint,
    read_tensors,
    rearranged,
    sizes_in,
    substitute_footprint,
    types_below,
)

HUBS = {
    "serve": ("service", 55_000_000, 2.0),
    "coordinator": ("coordinator", 45_000_000, 5.0),
    "http": ("HTTP server", 60_000_000, 9.0),
}
"""Process without a model -> name, bytes, and bytes for each byte of the target's
tokenizer.json."""
LOOKUP_BYTES = 30_000_000  # the size of a look-up draft
BITS = {"auto": 4, "int8": 8, "int4": 4, "int3": 3, "int2": 2}
DRAFT_TYPES = {"fp16": "half", "bf16": "half", "int4": "int8"}
"""Types of a draft's weights -> the target's types of the same size."""


@dataclass(frozen=True)
class Need:
    """The memory that one process takes."""

    what: str
    footprint: Footprint
    nodes: tuple[int, ...] = ()
    """The memory nodes to which it is bound, each with an equal share; empty: any."""

    @property
    def size(self) -> int:
        return self.footprint.size

    def without_process(self) -> "Need":
        """Return the memory in addition to interpreter and libraries."""
        return replace(self, footprint=replace(self.footprint, process=0))


def check_memory(
    settings: Settings,
    roles: Sequence[str],
    *,
    nodes: tuple[int, ...] = (),
    room: Room | None = None,
) -> None:
    """`SettingsError` unless processes of these roles (target, draft, unified, coordinator, http)
    fit together. `nodes`: the target's memory nodes; `room`: instead of what is found. memory.ram
    takes precedence; models not downloaded yet, and GPUs, are not counted."""
    room, remedy = room or _room(), "set memory.ram if that is wrong"
    limit = settings.memory.ram_bytes
    if limit is not None:
        roles = [role for role in roles if role in ("target", "unified")]
        room, remedy = Room(limit, "for it besides its process (memory.ram)"), "raise memory.ram"

    def needs_in(settings: Settings) -> list[Need]:
        needs = [*needs_of(settings, roles, nodes)]
        return needs if limit is None else [need.without_process() for need in needs]

    needs = needs_in(settings)
    if (why := _refusal(needs, room)) is None:
        return
    for name, value, other in _smaller(settings, roles):
        if _refusal(smaller := needs_in(other), room) is None:
            size, they = sum(need.size for need in smaller), "it needs"
            they = they if len(needs) == 1 else "they need"
            text = f"{they} {_gb(size)}, which fits"
            raise SettingsError(f"{why}: with --{name} {value} {text}")
    gpu = "put a part of the target on a GPU (target.split.device)"
    raise SettingsError(f"{why}: use a smaller model, {gpu}, or {remedy}")


def needed_bytes(settings: Settings, role: str) -> int:
    """Return the host memory in bytes that a process of this role takes; 0 if its files are
    unknown."""
    return sum(need.size for need in needs_of(settings, [role], ()))


def _room() -> Room | None:
    """Return the room for processes that are not started yet, including the memory of the process
    from which they are forked."""
    room = read_room()
    return None if room is None else replace(room, size=room.size + forked.taken_bytes())


def nodes_of(place: Place | None) -> tuple[int, ...]:
    """Return the memory nodes of a process bound to one or to shards; empty if its memory may come
    from any node, as when it is interleaved."""
    if place is None or (len(place.nodes) != 1 and not place.shards):
        return ()
    return place.nodes


def _refusal(needs: Sequence[Need], room: Room | None) -> str | None:
    together = sum(need.size for need in needs)
    if room is not None and together > room.size + room.swap:
        return f"{_listed(needs)}, and there are {_gb(room.size)} {room.bound}" + (
            f" and {_gb(room.swap)} of swap" if room.swap else ""
        )
    for need in needs:
        if why := _refusal_of_nodes(need):
            return f"{_listed([need])}{why} (target.numa = 'off' lifts that)"
        own, size = process_room(), need.without_process().size + PROCESS_SPACE
        if own is not None and need.footprint.weights and size > own.size:
            more = f"plus {_gb(PROCESS_SPACE)} of libraries"
            return f"{_listed([need])}, {more}, and there are {_gb(own.size)} {own.bound}"
    return None


def _refusal_of_nodes(need: Need) -> str:
    shares = len(need.nodes)
    share = f", {_gb(need.size // shares)} of it on each of {shares} nodes" if shares > 1 else ""
    for node in need.nodes:
        room = node_room(node)
        if room is not None and need.size // shares > room.size:
            return f"{share}, and there are {_gb(room.size)} {room.bound}"
    return ""


def needs_of(
    settings: Settings, roles: Sequence[str], nodes: tuple[int, ...] = ()
) -> Iterator[Need]:
    """Yield the memory of each role whose files are known."""
    target = with_target(settings.target)
    folder = _folder(target.model)
    tensors = [] if folder is None else read_tensors(folder)
    in_memory = memory_of(target.device) is not Memory.OWN and not target.split.device
    for role in roles:
        if role in HUBS:
            name, process, share = HUBS[role]
            yield Need(f"the {name}", Footprint(process, tokenizer=_text(folder, share)))
        elif role == "draft":
            yield from _draft_need(settings, tensors)
        elif folder is not None and tensors and in_memory:
            own = _target_footprint(settings, folder, tensors)
            what = f"the target with {target.weights} weights"
            if role == "unified":
                codes = substitute_footprint(tensors, _bits(settings)).model
                own = replace(own, weights=own.weights + codes)
                what += " and its substitute"
            yield Need(what, own, nodes)


def _text(folder: Path | None, share: float) -> int:
    file = None if folder is None else folder / "tokenizer.json"
    return round(share * file.stat().st_size) if file is not None and file.is_file() else 0


def _target_footprint(settings: Settings, folder: Path, tensors: Sequence[Tensor]) -> Footprint:
    target = settings.target
    sizes = sizes_in(
        folder,
        tensors,
        target.weights,
        target.cached,
        longest=target.longest,
        library=_by_library(settings, tensors),
    )
    own = host_footprint(sizes, rows=1 + settings.tree.gamma)
    searched = SEARCH_BYTES if target.weights == INT4 else 0
    return replace(own, process=own.process + searched)


def _draft_need(settings: Settings, target: Sequence[Tensor]) -> Iterator[Need]:
    if settings.draft.kind == "none":
        return
    if settings.draft.kind == "ngram":
        yield Need("the look-up draft", Footprint(LOOKUP_BYTES))
        return
    if memory_of(settings.draft.device) is Memory.OWN:
        return
    if settings.draft.kind == "substitute":
        if target:
            yield Need("the substitute", substitute_footprint(target, _bits(settings)))
        return
    if settings.draft.kind == "mtp":
        if target:
            yield Need("the MTP layer", mtp_footprint(target))
        return
    draft = with_draft(settings.draft)
    folder = _folder(draft.model)
    if folder is None or not (tensors := read_tensors(folder)):
        return
    if draft.kind == "small" or any(tensor.is_table for tensor in tensors):
        stored = "half" if tensors[0].kind in ("F16", "BF16") else "fp32"
        weights = stored if draft.weights == "auto" else draft.weights
        sizes = sizes_in(folder, tensors, DRAFT_TYPES.get(weights, weights), "fp32")
        yield Need("the draft", host_footprint(sizes, rows=1 + settings.tree.gamma))
    else:
        yield Need("the draft head", head_footprint(tensors, target))


def _bits(settings: Settings) -> int:
    return BITS.get(settings.draft.weights, 4)


def _by_library(settings: Settings, tensors: Sequence[Tensor]) -> bool:
    if settings.target.backend == "library" or settings.target.weights == "int8-per-tensor":
        return True
    folder = _folder(with_target(settings.target).model)
    return rearranged(tensors) and not (folder is not None and in_pieces(folder))


def _smaller(settings: Settings, roles: Sequence[str]) -> Iterator[tuple[str, str, Settings]]:
    """Yield settings that need less memory, as name, value and all settings, most exact first."""
    folder, target = _folder(with_target(settings.target).model), settings.target
    smaller: list[tuple[str, str]] = []
    if "target" in roles or "unified" in roles:
        tensors = [] if folder is None else read_tensors(folder)
        types = types_below(target.weights, tensors, library=_by_library(settings, tensors))
        smaller += [("target", weights) for weights in types]
    if "draft" in roles and settings.draft.kind not in ("mtp", "ngram", "none", "substitute"):
        smaller += [("draft", "fp16"), ("draft", "int8")]
    for part, weights in smaller:
        own = getattr(settings, part).model_copy(update={"weights": weights})
        yield f"{part}.weights", weights, settings.model_copy(update={part: own})


def _folder(model: str) -> Path | None:
    """Return where a model is, in a folder or in the hub's cache; None if it is not on this
    machine."""
    if not model or (folder := Path(model).expanduser()).is_dir():
        return folder if model else None
    from dovetail.workers.models.checkpoints.hub import (
        local_folder,  # huggingface_hub takes long to import
    )

    try:
        return local_folder(model)
    except CheckpointError:  # loading it reports the error
        return None


def _listed(needs: Sequence[Need]) -> str:
    """Return the needs in words: "the target with fp32 weights takes 12 GB of memory", or several
    and their sum."""
    if len(needs) == 1:
        return f"{needs[0].what} takes {_gb(needs[0].size)} of memory"
    each = ", ".join(f"{need.what} {_gb(need.size)}" for need in needs)
    return f"together these take {_gb(sum(need.size for need in needs))} of memory ({each})"


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"


CONVERSATIONS = 8  # number of long conversations whose keys and values must fit
SESSIONS_SHARE = 4 / 3
"""A target offers three quarters of the free memory to sessions (`ROOM_SHARE` of its prefix
cache)."""
MARGIN = 1.1
LEAST_BYTES = {"coordinator": 500_000_000, "http": 1_000_000_000, "draft": 500_000_000}
"""Least limits of processes that grow with users: with 100, those of a small pair took 1.0 GB."""


def memory_limit(settings: Settings, role: str) -> int | None:
    """Return the bytes beyond which a process of this role (coordinator, http, target, draft,
    unified) is faulty; None if its weights are elsewhere or in a GPU's memory."""
    blocks = (settings.cache.memory_bytes or 0) if role in ("target", "draft") else 0
    if role in ("target", "unified") and settings.memory.ram_bytes is not None:
        return round(MARGIN * (settings.memory.ram_bytes + PROCESS_BYTES + blocks))
    if not (needs := [need.footprint for need in needs_of(settings, (role,))]):
        return None
    size = blocks + sum(
        MARGIN * one.size + SESSIONS_SHARE * CONVERSATIONS * one.caches for one in needs
    )
    return max(LEAST_BYTES.get(role, 0), round(size))
