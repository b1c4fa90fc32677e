"""Where each decoder layer of a model is computed, and from where: on the CPU, on a device that
keeps its weights, or on one that they pass through.

Functions of a model's configuration and of sizes alone; nothing is measured, and nothing of torch
is needed. Which of the possible placements is the fastest is a planner's business. Knows no devices
beyond their names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dovetail.protocol.errors import SettingsError

ALIGNMENT, VECTOR, STEP = 64, 16, 4
"""Of the packed matrices (`kernels/native/packing.h`): bytes between two of them, outputs side by
side, and int8 inputs side by side."""
WEIGHT_BYTES = {"fp32": 4, "half": 2, "fp16": 2, "bf16": 2, "int8": 1}
NUMBER_BYTES = 4
"""Of states, norms, biases, keys and values: fp32."""
BUFFERS = 2
"""That streamed layers pass through: one is computed from while the next is filled."""
CACHED_ROWS = 4096
"""Rows of keys and values that a limit leaves room for: a long conversation, and a prompt of it
that is read at once."""
PASS_ROWS = {"cpu": 256, "gpu": 1024}
"""Of a prompt, so many go through a layer at a time."""
TREE_ROWS = 289
"""Of a pass, so many may have logits: the largest of the papers' trees, 288 nodes and the root."""
TREES_AHEAD = 8
"""A draft that shares its target's cache has rows for so many trees there (`drafters/tree.py`)."""
LOGITS = 2
"""So often the host has them beside who computes them: with the noise of the target, and with a
session's processors done to them."""
WIDENED_BYTES = 64 << 20
"""Of a 16-bit matrix on a GPU, so much is in fp32 at a time (`device_layer.py`)."""
PACKED_LAYERS = 2
"""While a model is loaded one layer is there as it was stored and as it is packed, before it lies
where it stays."""
MOST = 1 << 24
"""Of any number of a config.json: none of a model that there is comes near."""
GPT2 = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


class Place(Enum):
    """Of a layer."""

    CPU = "cpu"
    RESIDENT = "resident"
    """On the device, which keeps its weights."""
    STREAMED = "streamed"
    """On the device; its weights stay in the memory of the host and are copied for every pass."""


@dataclass(frozen=True)
class Sizes:
    """Of a model's parts, in bytes. A bias is counted whether there is one or not: 4 bytes an
    output."""

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
    state: int
    """The state of one row between two layers."""
    inner: int
    """What one row takes within a layer: normed states, queries, keys and values, what was attended
    to, units of the MLP before and after they are gated."""
    groups: int
    """Query heads of a key head: a GPU has what a row sees once for each."""
    logits: int
    """Of one row."""


def has_sizes(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says what `sizes_of` asks, in numbers that a model can have."""
    gpt2 = config.get("model_type") == "gpt2"
    needed = [
        config.get(name)
        for name in (*(GPT2.values() if gpt2 else (*GPT2, "intermediate_size")), "vocab_size")
    ]
    optional = [
        config.get(name) for name in (("n_inner",) if gpt2 else ("num_key_value_heads", "head_dim"))
    ]
    if not all(map(_is_size, needed)) or not all(
        value is None or _is_size(value) for value in optional
    ):
        return False
    heads = config[GPT2["num_attention_heads"] if gpt2 else "num_attention_heads"]
    hidden = config[GPT2["hidden_size"] if gpt2 else "hidden_size"]
    fits = hidden >= heads if gpt2 or not config.get("head_dim") else True
    return bool(fits and heads % (1 if gpt2 else config.get("num_key_value_heads") or heads) == 0)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST


def sizes_of(config: Mapping[str, Any], weights: str) -> Sizes:
    """The sizes of a model by its config.json (a dense decoder's) with these weights; an embedding
    is as the checkpoint has it, 2 or 4 bytes a number."""
    gpt2 = config.get("model_type") == "gpt2"

    def number(name: str) -> int:
        return int(config[GPT2.get(name, name) if gpt2 else name])

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    kv_heads = heads if gpt2 else int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    units = int((config.get("n_inner") or 4 * hidden) if gpt2 else config["intermediate_size"])
    shapes = (
        ((heads + 2 * kv_heads) * head_dim, hidden),
        (hidden, heads * head_dim),
        ((1 if gpt2 else 2) * units, hidden),
        (hidden, units),
    )
    matrices = [matrix_bytes(weights, n, k) for n, k in shapes]
    queries = (heads + 2 * kv_heads) * head_dim
    vocabulary, stored = (
        int(config["vocab_size"]),
        2 if str(config.get("dtype") or config.get("torch_dtype")).endswith("16") else 4,
    )
    return Sizes(
        layers=number("num_hidden_layers"),
        layer=sum(matrices) + 4 * hidden * NUMBER_BYTES,
        matrix=max(matrices),
        head=matrix_bytes(weights, vocabulary, hidden) + 2 * hidden * NUMBER_BYTES,
        embedding=vocabulary * hidden * stored,
        row=2 * kv_heads * head_dim * NUMBER_BYTES,
        context=number("max_position_embeddings"),
        state=hidden * NUMBER_BYTES,
        inner=(3 * hidden + 2 * queries + heads * head_dim + (2 if gpt2 else 3) * units)
        * NUMBER_BYTES,
        groups=heads // kv_heads,
        logits=vocabulary * NUMBER_BYTES,
    )


def matrix_bytes(weights: str, outputs: int, inputs: int) -> int:
    """A packed matrix with a bias, and what is missing to a whole line of a cache."""
    columns = -(-outputs // VECTOR) * VECTOR
    packed = columns * inputs * WEIGHT_BYTES[weights]
    if weights == "int8":
        packed = (
            columns * -(-inputs // STEP) * STEP + columns * NUMBER_BYTES + outputs * NUMBER_BYTES
        )
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
    """Whether what has no room is streamed, where nothing is said of `computed`; else the CPU
    computes it."""
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
    """What the device needs for weights, buffers, the keys and values of one long conversation, and
    a pass."""
    host_bytes: int
    """What the host needs for weights, those keys and values of the layers that it computes, and a
    pass; while the model is loaded too."""

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
        how = [
            f"{count} {word}"
            for count, word in ((self.resident, "resident"), (self.streamed, "streamed"))
            if count
        ]
        on_device = f"{self.device} {first}-{layers - 1} ({', '.join(how)}) and head"
        return f"cpu 0-{first - 1}, {on_device}" if first else on_device


def place_layers(sizes: Sizes, demand: Demand) -> Placement:
    """The placement that is asked for, or the one with as many layers on the device as there is
    room for; `SettingsError` where there is too little."""
    computed = _computed(sizes, demand)
    resident = _resident(sizes, demand, computed)
    on_device = [
        Place.RESIDENT
        if (i + 1) * resident // computed > i * resident // computed
        else Place.STREAMED
        for i in range(computed)
    ]
    places = (*[Place.CPU] * (sizes.layers - computed), *on_device)
    needed = needed_bytes(sizes, computed, resident, demand.device)
    if demand.device_bytes is not None and needed > demand.device_bytes:
        raise SettingsError(
            f"{demand.device} would need {_gb(needed)} for {resident} of {computed} layers "
            f"resident, the head, a pass and {_rows(sizes)} tokens, "
            f"and memory.vram leaves {_gb(demand.device_bytes)}: give the device fewer layers "
            "(target.split.layers, target.resident), or raise memory.vram"
        )
    return Placement(
        demand.device, places, needed, _on_host(sizes, computed, resident, demand.host_bytes)
    )


def all_on_cpu(sizes: Sizes, limit: int | None) -> Placement:
    """Every layer on the CPU; `SettingsError` where they take more of the host's memory than
    `limit` bytes."""
    return Placement("cpu", (Place.CPU,) * sizes.layers, 0, _on_host(sizes, 0, 0, limit))


def _on_host(sizes: Sizes, computed: int, resident: int, limit: int | None) -> int:
    host = host_bytes(sizes, computed, resident)
    if limit is not None and host > limit:
        raise SettingsError(
            f"{sizes.layers - resident} layers, the embedding and a pass take {_gb(host)} of "
            f"the host's memory, and memory.ram is {_gb(limit)}: "
            "keep more of them on a device (target.resident), take smaller weights "
            "(target.weights), or raise memory.ram"
        )
    return host


def needed_bytes(sizes: Sizes, computed: int, resident: int, device: str = "cuda:0") -> int:
    """What a device needs that computes so many layers and keeps so many of them."""
    buffers = min(BUFFERS, computed - resident)
    return (
        (resident + buffers) * sizes.layer
        + sizes.matrix
        + sizes.head
        + computed * cache_bytes(sizes)
        + pass_bytes(sizes, device)
    )


def cache_bytes(sizes: Sizes) -> int:
    """The keys and values of one layer: of a long conversation, and of a tree behind it."""
    return sizes.row * (_rows(sizes) + TREE_ROWS)


def host_bytes(sizes: Sizes, computed: int, resident: int) -> int:
    """What the host needs beside a device that computes so many layers and keeps so many of
    them."""
    own = sizes.layers - computed
    at_work = LOGITS * TREE_ROWS * sizes.logits + (0 if computed else sizes.head)
    if own:
        at_work += own * cache_bytes(sizes) + pass_bytes(sizes, "cpu", head=not computed)
    return (
        sizes.embedding
        + (sizes.layers - resident) * sizes.layer
        + max(at_work, PACKED_LAYERS * sizes.layer)
    )


def pass_bytes(sizes: Sizes, device: str, *, head: bool = True) -> int:
    """What is held while rows are computed: the states of a whole prompt, what its rows take within
    a layer, so many at a time, and logits."""
    on_gpu = device != "cpu"
    chunk = min(PASS_ROWS["gpu" if on_gpu else "cpu"], _rows(sizes))
    seen = chunk * sizes.groups * _rows(sizes) * NUMBER_BYTES + WIDENED_BYTES if on_gpu else 0
    return (
        2 * _rows(sizes) * sizes.state
        + chunk * sizes.inner
        + seen
        + (TREE_ROWS * sizes.logits if head else 0)
    )


def _rows(sizes: Sizes) -> int:
    return min(CACHED_ROWS, sizes.context)


def coded_bytes(sizes: Sizes, weights: str, bits: int) -> int:
    """What a substitute takes that shares the target's layers, cache and head: the codes of all
    layers, 4 bits a weight or twice that, and for each 4 bits of 64 weights two numbers of 16; and
    the rows of its trees, which grow ahead."""
    number = sizes.layers * sizes.layer // WEIGHT_BYTES[weights]
    return (
        number // 64 * (32 + 4) * (1 if bits <= 4 else 2)
        + sizes.layers * sizes.row * TREES_AHEAD * TREE_ROWS
    )


def draft_bytes(sizes: Sizes, device: str = "cuda:0") -> int:
    """What a draft of these sizes needs of a device: all of its weights, the keys and values of a
    long conversation and of trees, and a pass."""
    return (
        sizes.layers * (sizes.layer + cache_bytes(sizes))
        + sizes.embedding
        + sizes.head
        + pass_bytes(sizes, device)
    )


def substitute_bytes(sizes: Sizes, bits: int, device: str = "cuda:0") -> int:
    """The same of a target's substitute in a process of its own; `sizes`: the target's with weights
    of 16 bits."""
    return (
        draft_bytes(sizes, device) - sizes.layers * sizes.layer + coded_bytes(sizes, "half", bits)
    )


def reader_bytes(sizes: Sizes, device: str = "cuda:0") -> int:
    """What a device needs that reads prompts for layers on the CPU: buffers, one layer's keys and
    values of a long prompt, and a pass without logits."""
    return (
        min(BUFFERS, sizes.layers) * sizes.layer
        + sizes.matrix
        + sizes.row * _rows(sizes)
        + pass_bytes(sizes, device, head=False)
    )


def _computed(sizes: Sizes, demand: Demand) -> int:
    if demand.computed is not None:
        if demand.computed > sizes.layers:
            raise SettingsError(
                f"target.split.layers = {demand.computed}, and the model has {sizes.layers} "
                "layers: ask for at most so many"
            )
        return demand.computed
    if demand.device_bytes is None or demand.streams:
        return sizes.layers
    keeps = demand.resident is None

    def needed(n: int) -> int:
        return needed_bytes(sizes, n, n if keeps else min(n, demand.resident or 0), demand.device)

    return max(
        (n for n in range(1, sizes.layers + 1) if needed(n) <= demand.device_bytes), default=1
    )


def _resident(sizes: Sizes, demand: Demand, computed: int) -> int:
    if demand.resident is not None:
        if demand.resident > computed:
            raise SettingsError(
                f"target.resident = {demand.resident}, and {demand.device} computes {computed} "
                "layers: ask for at most so many"
            )
        return demand.resident
    if demand.device_bytes is None:
        return computed
    return max(
        (
            n
            for n in range(computed + 1)
            if needed_bytes(sizes, computed, n, demand.device) <= demand.device_bytes
        ),
        default=0,
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
