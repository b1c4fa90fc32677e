"""Places each layer and its weights: on the CPU, resident on a device, or streamed through one.
Functions only of sizes, without torch; the planner decides which placement is fastest."""

from dataclasses import dataclass
from enum import Enum

from dovetail.protocol.errors import SettingsError
from dovetail.workers.models.backends.sizes import (
    NUMBER_BYTES,
    TREE_ROWS,
    WEIGHT_BYTES,
    Sizes,
    with_host_experts,
)
from dovetail.workers.models.checkpoints.footprint import (
    bytes_of_codes,
    cache_bytes,
    host_footprint,
    long_rows,
    pass_bytes,
    seen_bytes,
)

BUFFERS = 2  # buffers of streamed layers: one is computed from while the next is filled
TREES_AHEAD = 8  # trees for which a draft in its target's cache has rows (`drafters/tree.py`)
LEVEL_ROWS, LEVEL_LOGITS = 64, 4  # rows of the largest captured pass, and copies of its logits


class Place(Enum):
    """The place where a layer is computed."""

    CPU = "cpu"
    RESIDENT = "resident"  # on the device, which keeps its weights
    STREAMED = "streamed"  # on the device; the weights stay in the host's memory and are copied


@dataclass(frozen=True)
class Demand:
    """The requested placement; None: as many layers as fit."""

    device: str = "cpu"  # the device that computes the layers; the CPU may take the place of a GPU
    computed: int | None = None  # number of the last layers, which the device computes
    resident: int | None = None  # layers of these that stay on the device
    streams: bool = True  # without `computed`: True streams the rest, False leaves it to the CPU
    device_bytes: int | None = None  # the most that the target may take; None: no limit
    host_bytes: int | None = None
    host_experts: bool = False  # True if the CPU computes the experts of these layers
    codes: int = 0  # bytes of a layer's codes in a substitute; resident layers need none


@dataclass(frozen=True)
class Placement:
    """The chosen placement."""

    device: str
    places: tuple[Place, ...]  # the places of all layers, those on the CPU first
    device_bytes: int  # bytes on the device: weights, buffers, a long conversation, a pass
    host_bytes: int  # bytes that the host needs for the same of its layers, and to load the model
    host_experts: bool = False
    tokens: int | None = None  # tokens of all sessions that fit, trees included; None: no limit

    @property
    def first(self) -> int:
        """The first layer that the device computes."""
        return self.places.count(Place.CPU)

    @property
    def resident(self) -> int:
        return self.places.count(Place.RESIDENT)

    @property
    def streamed(self) -> int:
        return self.places.count(Place.STREAMED)

    @property
    def buffers(self) -> int:
        """The number of buffers for streamed layers."""
        return min(BUFFERS, self.streamed)

    def __str__(self) -> str:
        """Describe the placement: cpu 0-4, cuda:0 5-7 (1 resident, 2 streamed) and head."""
        layers, first = len(self.places), self.first
        if first == layers:
            return f"cpu 0-{layers - 1} and head"
        how = [
            f"{count} {word}"
            for count, word in ((self.resident, "resident"), (self.streamed, "streamed"))
            if count
        ]
        on_device = f"{self.device} {first}-{layers - 1} ({', '.join(how)}) and head"
        if self.host_experts:
            on_device += ", its experts on the cpu"
        return f"cpu 0-{first - 1}, {on_device}" if first else on_device


def place_layers(sizes: Sizes, demand: Demand) -> Placement:
    """Return the requested placement, or as many layers on the device as fit; `SettingsError` if
    they do not fit."""
    if demand.host_experts:
        if not sizes.experts:
            raise SettingsError(
                "target.split.experts_on_cpu leaves experts to the CPU, and the model has none: "
                "leave it out"
            )
        sizes = with_host_experts(sizes)
    computed = _computed(sizes, demand)
    resident = _resident(sizes, demand, computed)
    on_device = [
        Place.RESIDENT
        if (i + 1) * resident // computed > i * resident // computed
        else Place.STREAMED
        for i in range(computed)
    ]
    places = (*[Place.CPU] * (sizes.layers - computed), *on_device)
    needed = _with_codes(sizes, demand, computed, resident)
    if demand.device_bytes is not None and needed > demand.device_bytes:
        codes = "codes of the others, " if demand.codes else ""
        raise SettingsError(
            f"{demand.device} would need {_gb(needed)} for {resident} of {computed} layers "
            f"resident, {codes}the head, a pass and {long_rows(sizes)} tokens, "
            f"and memory.vram leaves {_gb(demand.device_bytes)}: give the device fewer layers "
            "(target.split.layers, target.resident) or shorter texts (target.context), "
            "or raise memory.vram"
        )
    return Placement(
        demand.device,
        places,
        needed_bytes(sizes, computed, resident, demand.device),
        _on_host(sizes, computed, resident, demand.host_bytes),
        demand.host_experts,
        _tokens(sizes, computed, demand.device_bytes, needed),
    )


def _tokens(sizes: Sizes, computed: int, room: int | None, needed: int) -> int | None:
    """Return how many tokens fit into `room` bytes of a device that needs `needed` for one
    conversation."""
    if room is None:
        return None
    return (
        long_rows(sizes) + TREE_ROWS + (room - needed) // (computed * sizes.row + seen_bytes(sizes))
    )


def all_on_cpu(sizes: Sizes, limit: int | None) -> Placement:
    """Return all layers on the CPU; `SettingsError` above `limit` bytes of the host."""
    return Placement("cpu", (Place.CPU,) * sizes.layers, 0, _on_host(sizes, 0, 0, limit))


def _on_host(sizes: Sizes, computed: int, resident: int, limit: int | None) -> int:
    host = host_footprint(sizes, computed, resident).model
    if limit is not None and host > limit:
        raise SettingsError(
            f"{sizes.layers - resident} layers, the embedding and a pass take {_gb(host)} of the "
            f"host's memory, and memory.ram is {_gb(limit)}: keep more of them on a device "
            "(target.resident), use smaller weights (target.weights), or raise memory.ram"
        )
    return host


def needed_bytes(sizes: Sizes, computed: int, resident: int, device: str = "cuda:0") -> int:
    """Return the memory of a device that computes this many layers and keeps this many of them."""
    buffers = min(BUFFERS, computed - resident)
    copied = sizes.lent * (long_rows(sizes) + TREE_ROWS) if computed < sizes.layers else 0
    return (
        (resident + buffers) * (sizes.layer + sizes.wider - sizes.apart)
        + sizes.matrix
        + sizes.head
        + copied
        + computed * cache_bytes(sizes)
        + pass_bytes(sizes, device)
        + (level_bytes(sizes) if resident and device != "cpu" else 0)
    )


def _with_codes(sizes: Sizes, demand: Demand, computed: int, resident: int) -> int:
    """Return the device's memory, including the codes of layers that it does not keep."""
    codes = (computed - resident) * demand.codes
    return needed_bytes(sizes, computed, resident, demand.device) + codes


def code_bytes(sizes: Sizes, weights: str, bits: int) -> int:
    """Return the bytes of a layer's codes."""
    return bytes_of_codes(sizes.layer // WEIGHT_BYTES[weights], bits)


def level_bytes(sizes: Sizes) -> int:
    """Return the memory of graphs: states of the largest captured pass, masks, logits."""
    seen = long_rows(sizes) + TREES_AHEAD * TREE_ROWS
    row = 2 * sizes.state + sizes.inputs + sizes.inner + LEVEL_LOGITS * sizes.logits
    masks = 2 * LEVEL_ROWS * sizes.groups * NUMBER_BYTES
    return LEVEL_ROWS * row + seen * (masks + sizes.widened)


def coded_bytes(sizes: Sizes, weights: str, bits: int, resident: int = 0) -> int:
    """Return the memory of a substitute in addition to its target: codes of layers that are not
    `resident`, rows of trees, and graphs."""
    return (
        (sizes.layers - resident) * code_bytes(sizes, weights, bits)
        + sizes.layers * (sizes.row + sizes.factors) * TREES_AHEAD * TREE_ROWS
        + level_bytes(sizes)
    )


def draft_bytes(sizes: Sizes, device: str = "cuda:0") -> int:
    """Return a draft's memory on a device: weights, caches, a pass, graphs."""
    return (
        sizes.layers * (sizes.layer + cache_bytes(sizes))
        + sizes.embedding
        + sizes.head
        + pass_bytes(sizes, device)
        + level_bytes(sizes)
    )


def substitute_bytes(sizes: Sizes, bits: int, device: str = "cuda:0") -> int:
    """Return a substitute's memory in its own process; `sizes`: of the target in 16 bits."""
    codes = coded_bytes(sizes, "half", bits) - level_bytes(sizes)
    return draft_bytes(sizes, device) - sizes.layers * sizes.layer + codes


def reader_bytes(sizes: Sizes, device: str = "cuda:0") -> int:
    """Return a device's memory for reading prompts for the CPU: buffers, a layer's keys, a pass."""
    return (
        min(BUFFERS, sizes.layers) * sizes.layer
        + sizes.matrix
        + (sizes.row + sizes.lent) * long_rows(sizes)
        + pass_bytes(sizes, device, rows=0)
    )


def _computed(sizes: Sizes, demand: Demand) -> int:
    if demand.computed is not None:
        if demand.computed > sizes.layers:
            text = f"target.split.layers = {demand.computed}, but the model has {sizes.layers}"
            raise SettingsError(f"{text} layers: use at most that many")
        return demand.computed
    if demand.device_bytes is None or demand.streams:
        return sizes.layers
    keeps = demand.resident is None

    def needed(n: int) -> int:
        return _with_codes(sizes, demand, n, n if keeps else min(n, demand.resident or 0))

    return max(
        (n for n in range(1, sizes.layers + 1) if needed(n) <= demand.device_bytes), default=1
    )


def _resident(sizes: Sizes, demand: Demand, computed: int) -> int:
    if demand.resident is not None:
        if demand.resident > computed:
            text = f"target.resident = {demand.resident}, and {demand.device} computes {computed}"
            raise SettingsError(f"{text} layers: use at most that many")
        return demand.resident
    if demand.device_bytes is None:
        return computed
    return max(
        (
            n
            for n in range(computed + 1)
            if _with_codes(sizes, demand, computed, n) <= demand.device_bytes
        ),
        default=0,
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
