"""Where each decoder layer of a model is computed, and from where: on the CPU, on a device that keeps its weights, or on one that they pass through.

Functions of a model's configuration and of sizes alone; nothing is measured, and nothing of torch is needed. Which of the possible placements is the fastest
is a planner's business. Knows no devices beyond their names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dovetail.protocol.errors import SettingsError

ALIGNMENT, VECTOR, STEP = 64, 16, 4
"""Of the packed matrices (`kernels/native/packing.h`): bytes between two of them, outputs side by side, and int8 inputs side by side."""
WEIGHT_BYTES = {"fp32": 4, "half": 2, "fp16": 2, "bf16": 2, "int8": 1}
NUMBER_BYTES = 4
"""Of states, norms, biases, keys and values: fp32."""
BUFFERS = 2
"""That streamed layers pass through: one is computed from while the next is filled."""
CACHED_ROWS = 4096
"""Rows of keys and values that a limit leaves room for: a long conversation."""
GPT2 = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "max_position_embeddings": "n_positions"}


class Place(Enum):
    """Of a layer."""

    CPU = "cpu"
    RESIDENT = "resident"
    """On the device, which keeps its weights."""
    STREAMED = "streamed"
    """On the device; its weights stay in the memory of the host and are copied for every pass."""


@dataclass(frozen=True)
class Sizes:
    """Of a model's parts, in bytes. A bias is counted whether there is one or not: 4 bytes an output."""

    layers: int
    layer: int
    """One decoder layer's matrices and norms."""
    matrix: int
    """The largest matrix of a layer: a device needs it once more while it is laid out."""
    head: int
    """The final norm and the language model's head."""
    embedding: int
    row: int
    """The keys and values of one token in one layer."""
    context: int


def has_sizes(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says what `sizes_of` asks."""
    names = GPT2.values() if config.get("model_type") == "gpt2" else (*GPT2, "intermediate_size")
    return all(isinstance(config.get(name), int) for name in (*names, "vocab_size"))


def sizes_of(config: Mapping[str, Any], weights: str) -> Sizes:
    """The sizes of a model by its config.json (a dense decoder's) with these weights; an embedding is as the checkpoint has it, 2 or 4 bytes a number."""
    gpt2 = config.get("model_type") == "gpt2"

    def number(name: str) -> int:
        return int(config[GPT2.get(name, name) if gpt2 else name])

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    kv_heads = heads if gpt2 else int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    units = int((config.get("n_inner") or 4 * hidden) if gpt2 else config["intermediate_size"])
    shapes = ((heads + 2 * kv_heads) * head_dim, hidden), (hidden, heads * head_dim), ((1 if gpt2 else 2) * units, hidden), (hidden, units)
    matrices = [matrix_bytes(weights, n, k) for n, k in shapes]
    vocabulary, stored = int(config["vocab_size"]), 2 if str(config.get("dtype") or config.get("torch_dtype")).endswith("16") else 4
    return Sizes(
        layers=number("num_hidden_layers"),
        layer=sum(matrices) + 4 * hidden * NUMBER_BYTES,
        matrix=max(matrices),
        head=matrix_bytes(weights, vocabulary, hidden) + 2 * hidden * NUMBER_BYTES,
        embedding=vocabulary * hidden * stored,
        row=2 * kv_heads * head_dim * NUMBER_BYTES,
        context=number("max_position_embeddings"),
    )


def matrix_bytes(weights: str, outputs: int, inputs: int) -> int:
    """A packed matrix with a bias, and what is missing to a whole line of a cache."""
    columns = -(-outputs // VECTOR) * VECTOR
    packed = columns * inputs * WEIGHT_BYTES[weights]
    if weights == "int8":
        packed = columns * -(-inputs // STEP) * STEP + columns * NUMBER_BYTES + outputs * NUMBER_BYTES
    return -(-(packed + outputs * NUMBER_BYTES) // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Demand:
    """What the settings ask for; None: as many as there is room for."""

    device: str = "cpu"
    """Where the device's layers are computed; the CPU may stand for a GPU."""
    computed: int | None = None
    """So many of the last layers the device computes."""
    resident: int | None = None
    """Of those, so many stay on the device."""
    streams: bool = True
    """Whether what has no room is streamed, where nothing is said of `computed`; else the CPU computes it."""
    device_bytes: int | None = None
    """The most that the target may take of the device's memory; None: nothing is too much."""
    host_bytes: int | None = None


@dataclass(frozen=True)
class Placement:
    """What is decided."""

    device: str
    places: tuple[Place, ...]
    """Of every layer; those on the CPU come first. The head is where the last one is."""
    device_bytes: int
    """What the device needs for weights, buffers and the keys and values of one long conversation."""
    host_bytes: int
    """What the host needs for weights."""

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
        """That streamed layers pass through."""
        return min(BUFFERS, self.streamed)

    def __str__(self) -> str:
        """In words: cpu 0-4, cuda:0 5-7 (1 resident, 2 streamed) and head."""
        layers, first = len(self.places), self.first
        if first == layers:
            return f"cpu 0-{layers - 1} and head"
        how = [f"{count} {word}" for count, word in ((self.resident, "resident"), (self.streamed, "streamed")) if count]
        on_device = f"{self.device} {first}-{layers - 1} ({', '.join(how)}) and head"
        return f"cpu 0-{first - 1}, {on_device}" if first else on_device


def place_layers(sizes: Sizes, demand: Demand) -> Placement:
    """The placement that is asked for, or the one with as many layers on the device as there is room for; `SettingsError` where there is too little."""
    computed = _computed(sizes, demand)
    resident = _resident(sizes, demand, computed)
    on_device = [Place.RESIDENT if (i + 1) * resident // computed > i * resident // computed else Place.STREAMED for i in range(computed)]
    places = (*[Place.CPU] * (sizes.layers - computed), *on_device)
    needed = needed_bytes(sizes, computed, resident)
    if demand.device_bytes is not None and needed > demand.device_bytes:
        raise SettingsError(
            f"{demand.device} would need {_gb(needed)} for {resident} of {computed} layers resident, the head and {min(CACHED_ROWS, sizes.context)} tokens, "
            f"and memory.vram leaves {_gb(demand.device_bytes)}: give the device fewer layers (target.split.layers, target.resident), or raise memory.vram"
        )
    host = sizes.embedding + (sizes.layers - resident) * sizes.layer
    if demand.host_bytes is not None and host > demand.host_bytes:
        raise SettingsError(
            f"{sizes.layers - resident} layers and the embedding take {_gb(host)} of the host's memory, and memory.ram is {_gb(demand.host_bytes)}: "
            "keep more of them on a device (target.resident), take smaller weights (target.weights), or raise memory.ram"
        )
    return Placement(demand.device, places, needed, host)


def needed_bytes(sizes: Sizes, computed: int, resident: int) -> int:
    """What a device needs that computes so many layers and keeps so many of them."""
    buffers = min(BUFFERS, computed - resident)
    rows = min(CACHED_ROWS, sizes.context)
    return (resident + buffers) * sizes.layer + sizes.matrix + sizes.head + computed * sizes.row * rows


def reader_bytes(sizes: Sizes) -> int:
    """What a device needs that reads prompts for layers on the CPU: buffers, and one layer's keys and values of a long prompt."""
    return min(BUFFERS, sizes.layers) * sizes.layer + sizes.matrix + sizes.row * min(CACHED_ROWS, sizes.context)


def _computed(sizes: Sizes, demand: Demand) -> int:
    if demand.computed is not None:
        if demand.computed > sizes.layers:
            raise SettingsError(f"target.split.layers = {demand.computed}, and the model has {sizes.layers} layers: ask for at most so many")
        return demand.computed
    if demand.device_bytes is None or demand.streams:
        return sizes.layers
    keeps = demand.resident is None
    fitting = [n for n in range(1, sizes.layers + 1) if needed_bytes(sizes, n, n if keeps else min(n, demand.resident or 0)) <= demand.device_bytes]
    return max(fitting, default=1)


def _resident(sizes: Sizes, demand: Demand, computed: int) -> int:
    if demand.resident is not None:
        if demand.resident > computed:
            raise SettingsError(f"target.resident = {demand.resident}, and {demand.device} computes {computed} layers: ask for at most so many")
        return demand.resident
    if demand.device_bytes is None:
        return computed
    return max((n for n in range(computed + 1) if needed_bytes(sizes, computed, n) <= demand.device_bytes), default=0)


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
