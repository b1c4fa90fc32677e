"""Where transformers' tensors are in GGUF files: types, shapes, and conversions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from dovetail.workers.models.checkpoints.gguf.architectures.namings import (
    BOTH_UP,
    KEYS_UP,
    LOWER,
    MERGED,
    NAMINGS,
    NOT_READ,
    UPPER,
    VALUES_UP,
    Naming,
    Stacks,
    Tiled,
)
from dovetail.workers.models.checkpoints.gguf.facts import HEADS, KV_HEADS, Facts
from dovetail.workers.models.checkpoints.gguf.files import FileHead, Model, Place
from dovetail.workers.models.checkpoints.gguf.kinds import F32, KINDS, STORED

SHARING = "attention.shared_kv_layers"
SCALE = "attention.scale"
ENDS = ("weight", "bias", "scale")
OF_KEYS = ("attn_k", "attn_v", "attn_k_norm")
NOTHING, LESS_ONE, TRANSPOSE, TURN, HALVES, VALUES, VALUE_INPUTS, DECAYS, NUMBERS = range(9)
"""Changes of a tensor: less 1; its two or last two dimensions swapped; neighbours that rotate
together into halves; rows or inputs of value heads next to their key head's; logarithms of decays;
numbers."""
WOVEN, BEHIND, BELOW = range(9, 12)
"""Changes of two tensors into one: gates and ups of experts interleaved or stacked, [experts, in,
out]; rows below others', or by key head."""
ZEROS, LESS_INDEX = 12, 13  # changes of a tensor: all zeros; each number less its index


@dataclass(frozen=True)
class Placed:
    """A tensor of transformers' model within a file."""

    head: FileHead
    place: Place
    change: int = NOTHING
    heads: int = 0  # the number of heads that HALVES is about, or of key heads
    values: int = 1  # the number of value heads for each key head
    first: int = 0  # the first row of value heads
    single: int | None = None  # a dimension of one that the file's tensor does not have
    flat: bool = False  # True if transformers has one dimension
    up: "Placed | None" = None  # the other half: interleaved, stacked, or values of latents

    @property
    def kind(self) -> str:
        """Return safetensors' name of the type of its numbers."""
        kinds = {STORED.get(one.place.kind, "F32") for one in (self, self.up) if one is not None}
        return kinds.pop() if len(kinds) == 1 else "F32"

    @property
    def packed_bytes(self) -> int:
        """Return the bytes of its blocks in the kernels' layout; 0 for plain numbers."""
        if self.change == NUMBERS or (self.change == VALUE_INPUTS and not self.whole_heads):
            return 0
        own = KINDS[self.place.kind].packed_size_of(self.place.shape)
        return own if self.up is None else own + self.up.packed_bytes

    @property
    def whole_heads(self) -> bool:
        """Return whether the inputs of each value head are whole blocks."""
        width = self.place.shape[-1] // max(1, self.heads * self.values)
        return width % KINDS[self.place.kind].numbers == 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that transformers has."""
        shape = self.place.shape
        if self.up is not None and self.change == NUMBERS:
            heads, rank, plain = shape
            return (heads * (plain + self.up.place.shape[1]), rank)
        if self.up is not None and self.change == BELOW:
            return (shape[0] + self.up.place.shape[0], shape[1])
        if self.up is not None:
            experts, outputs, *inputs = shape
            return (experts, *inputs, 2 * outputs)
        if self.flat:
            return (prod(shape),)
        if self.change in (TRANSPOSE, TURN):
            return (*shape[:-2], shape[-1], shape[-2])
        if self.single is not None:
            return (*shape[: self.single], 1, *shape[self.single :])
        return shape


def placed_in(model: Model) -> dict[str, Placed]:
    """Return a model's tensors by transformers' names; `CheckpointError` for an unknown tensor."""
    facts = Facts(model)
    naming, layers, blocks = naming_of(facts), facts.layers, facts.whole("block_count")
    if beyond := next((name for name in facts.tensors if _layer_of(name) >= blocks), None):
        raise facts.refusal(f"tensor {beyond} is of a layer beyond its {blocks} (block_count)")
    found = {
        name: placed
        for head in model.heads
        for place in head.tensors
        if place.name not in NOT_READ and _layer_of(place.name) < layers
        if not _reads_another(place.name, facts)
        for name, placed in _named(Placed(head, place), facts, naming)
    }
    if facts.architecture == "apertus":
        found |= _activations(facts)
    if facts.architecture == "nemotron_h_moe":
        found = {**_without_shared(found), **found}
    if naming.latents:
        return _joined(found, facts)
    if naming.stacks is not Stacks.APART:
        return _turned(found, facts, naming)
    return _piled(found, facts)


def _activations(facts: Facts) -> dict[str, Placed]:
    """Return the parameters of Apertus's activations, which files have as lists under keys."""
    head, found, layers = facts.model.heads[0], {}, facts.layers
    for part, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ())):
        values = head.facts.get(key := f"xielu.{part}")
        if not isinstance(values, np.ndarray) or (values.dtype, len(values)) != ("<f4", layers):
            raise facts.refusal(f"{key} is not a list of {layers} fp32 numbers")
        for at in range(layers):
            place = Place(key, shape, F32, head.ends[key] - 4 * (layers - at))
            found[f"model.layers.{at}.mlp.act_fn.{part}"] = Placed(head, place)
    return found


def _without_shared(found: Mapping[str, Placed]) -> dict[str, Placed]:
    """Return shared experts with one unit of zeros, which transformers requires if a file has
    none."""
    return {
        f"{name[:-11]}mixer.shared_experts.{part}_proj.weight": replace(
            placed, change=ZEROS, single=single
        )
        for name, placed in found.items()
        if f"{name[:-11]}mixer.gate.weight" in found and name.endswith(".norm.weight")
        for single, part in enumerate(("up", "down"))
    }


def _reads_another(name: str, facts: Facts) -> bool:
    """Return whether a tensor is an unused key or value of a layer that reads another's."""
    if SHARING not in facts:
        return False
    first = facts.layers - facts.whole(SHARING)
    return _layer_of(name) >= first and name.split(".")[2] in OF_KEYS


def _layer_of(name: str) -> int:
    """The layer of a tensor; -1 if it belongs to none."""
    block, _, rest = name.partition(".")
    index = rest.partition(".")[0]
    return int(index) if block == "blk" and index.isdecimal() else -1


def naming_of(facts: Facts) -> Naming:
    """Return the names of a file's architecture."""
    if facts.architecture == "llama" and "blk.0.ffn_gate_exps.weight" in facts.tensors:
        return NAMINGS["mixtral"]
    return NAMINGS["bamba" if is_bamba(facts) else facts.architecture]


def is_bamba(facts: Facts) -> bool:
    """Return whether a file of granitehybrid is a Bamba: rotated, and without Granite's factors."""
    hybrid = facts.architecture == "granitehybrid" and SCALE not in facts
    return hybrid and facts.truth("rope.scaling.finetuned", True)


def _named(placed: Placed, facts: Facts, naming: Naming) -> Iterator[tuple[str, Placed]]:
    """The tensors that a tensor of the file becomes, by transformers' names."""
    place = placed.place
    if place.name in naming.tables:
        yield place.name, replace(placed, change=LESS_INDEX)
        return
    stem, _, end = place.name.rpartition(".")
    known = end in ENDS
    if not known and place.name.count(".") == 2:  # it has no suffix
        stem, end, known = place.name, "", place.name.rpartition(".")[2] in naming.bare
    if known and stem in naming.outside and end == "weight" and len(place.shape) == 3:
        for number, one in enumerate(_apart(placed)):
            yield f"{naming.outside[stem]}.{number}.weight", one
        return
    if known and stem in naming.outside and end in ("weight", "bias"):
        yield f"{naming.outside[stem]}.{end}", _changed(placed, stem, facts, naming)
        return
    block, _, rest = stem.partition(".")
    index, _, name = rest.partition(".")
    known = known and block == "blk" and index.isdecimal()
    layer = f"{naming.prefix}{index}."
    part = f"{layer}{naming.expert_part}.experts" if naming.expert_part else f"{layer}experts"
    if known and name in naming.layer and end in ("weight", "bias"):
        yield _ended(f"{layer}{naming.layer[name]}", end), _changed(placed, name, facts, naming)
    elif known and name == "attn_qkv" and "attn_q" in naming.layer:
        for own, rows in _split(placed, facts):
            yield f"{layer}{naming.layer[own]}.{end}", _changed(rows, own, facts, naming)
    elif known and (bare := naming.bare.get(f"{name}.{end}".removesuffix("."))) is not None:
        yield f"{layer}{bare}", _changed(placed, name, facts, naming)
    elif known and name in naming.experts and naming.stacks is not Stacks.APART:
        yield f"{part}.{name}.{end}", placed
    elif known and name in naming.experts and end == "weight" and len(place.shape) == 3:
        for expert, one in enumerate(_apart(placed)):
            yield f"{part}.{expert}.{naming.experts[name]}.weight", one
    elif known and name == MERGED and naming.experts and end == "weight":
        yield f"{part}.gate_up_proj", placed
    else:
        raise facts.refusal(f"tensor {place.name} is not known for this architecture here")


def _split(placed: Placed, facts: Facts) -> Iterator[tuple[str, Placed]]:
    """Yield the queries, keys and values of a fused tensor (`--fuse-qkv`), by files' names."""
    place, heads, first = placed.place, facts.whole(HEADS), 0
    keys = facts.each(KV_HEADS)[_layer_of(place.name)] if KV_HEADS in facts else heads
    each, rest = divmod(place.shape[0], max(1, heads + 2 * keys))
    if rest or not each:
        rows = f"{place.shape[0]} rows for {heads} heads and {keys} key heads"
        raise facts.refusal(f"tensor {place.name} has {rows}")
    for own, count in (("attn_q", heads), ("attn_k", keys), ("attn_v", keys)):
        shape = (count * each, *place.shape[1:])
        offset = place.offset + first * (place.size_bytes // place.shape[0])
        yield own, replace(placed, place=Place(place.name, shape, place.kind, offset))
        first += shape[0]


def _ended(name: str, end: str) -> str:
    """A name with its suffix before the mark of a half."""
    stem, mark, half = name.partition("#")
    return f"{stem}.{end}{mark}{half}"


def _apart(placed: Placed) -> Iterator[Placed]:
    """The matrices of a layer's experts, which are stored consecutively."""
    return (one_of(placed, index) for index in range(placed.place.shape[0]))


def one_of(placed: Placed, index: int) -> Placed:
    """Return the tensor of one expert within that of all experts of a layer."""
    place = placed.place
    experts, *shape = place.shape
    offset = place.offset + index * (place.size_bytes // experts)
    change = TRANSPOSE if placed.change == TURN else placed.change
    return replace(placed, place=Place(place.name, tuple(shape), place.kind, offset), change=change)


def _changed(placed: Placed, name: str, facts: Facts, naming: Naming) -> Placed:
    shape = placed.place.shape
    if len(shape) == 4 and name in naming.single:  # the converter's [1, channels, 1, taps]
        shape = tuple(size for size in shape if size != 1)
    if name in naming.boxed:
        shape = (1, 1, prod(shape), 1)
    placed = replace(placed, place=replace(placed.place, shape=shape))
    axis, whole = naming.single.get(name), placed.place.name
    if axis is not None and axis < len(shape) and shape[axis] != 1:
        placed = replace(placed, single=axis)
    if name in naming.flat:
        placed = replace(placed, flat=True)
    if name in naming.logarithms:
        return replace(placed, change=DECAYS)
    if name in naming.by_heads:
        return _by_heads(placed, facts)
    normed = name.endswith("norm") and name not in naming.plain_norms
    if naming.plus_one and normed and whole.endswith(".weight"):
        return replace(placed, change=LESS_ONE)
    if name in naming.tiled:
        return _tiled(placed, naming.tiled[name], facts)
    if naming.transposed and len(shape) == 2 and name in naming.layer:
        return replace(placed, change=TRANSPOSE)
    if naming.permuted and name in ("attn_q", "attn_k"):
        heads = facts.whole(HEADS)
        if name == "attn_k" and KV_HEADS in facts:
            heads = facts.each(KV_HEADS)[_layer_of(whole)]
        if heads < 1 or shape[0] % (2 * heads):
            rows = f"{shape[0]} rows for {heads} heads"
            raise facts.refusal(f"tensor {placed.place.name} has {rows}")
        return replace(placed, change=HALVES, heads=heads)
    return placed


def _tiled(placed: Placed, what: Tiled, facts: Facts) -> Placed:
    """A tensor with the first value head of each key head, then the second of each, and so on."""
    keys, values = facts.whole("ssm.group_count"), facts.whole("ssm.time_step_rank")
    first = 2 * keys * facts.whole("ssm.state_size") if what is Tiled.BEHIND_KEYS else 0
    inputs = what is Tiled.INPUTS
    count = placed.place.shape[-1 if inputs else 0] - first
    if keys < 1 or values < 1 or values % keys or count < 1 or count % values:
        raise facts.refusal(f"tensor {placed.place.name}: {count} values for {values} heads")
    change = {Tiled.INPUTS: VALUE_INPUTS, Tiled.DECAYS: DECAYS}.get(what, VALUES)
    return replace(placed, change=change, heads=keys, values=values // keys, first=first)


def _by_heads(placed: Placed, facts: Facts) -> Placed:
    """A tensor of queries, keys and values that transformers has head by head."""
    heads, rows = facts.whole(HEADS), placed.place.shape[0]
    if heads < 1 or rows % (3 * heads):
        raise facts.refusal(f"tensor {placed.place.name} has {rows} rows for {heads} heads")
    return replace(placed, change=VALUES, heads=heads, values=3)


def _piled(found: Mapping[str, Placed], facts: Facts) -> dict[str, Placed]:
    """Matrices that are two tensors in files, joined."""
    piled: dict[str, Placed] = {}
    for name, placed in found.items():
        if name.endswith(UPPER):
            whole = name.removesuffix(UPPER)
            below, shape = found.get(f"{whole}{LOWER}"), placed.place.shape
            if below is None or len(shape) != 2 or below.place.shape[1:] != shape[1:]:
                raise facts.refusal(f"tensor {placed.place.name} has no counterpart of its width")
            heads = facts.whole("ssm.group_count") if "in_proj_qkvz" in name else 0  # of keys
            first = 2 * heads * facts.whole("ssm.state_size") if heads else 0  # rows of both
            piled[whole] = replace(placed, change=BELOW, up=below, heads=heads, first=first)
        elif not name.endswith(LOWER):
            piled[name] = placed
        elif f"{name.removesuffix(LOWER)}{UPPER}" not in found:
            raise facts.refusal(f"tensor {placed.place.name} has no counterpart")
    return piled


def _turned(found: Mapping[str, Placed], facts: Facts, naming: Naming) -> dict[str, Placed]:
    """gpt-oss's and Llama 4's experts in transformers' layout [experts, in, out], interleaved or
    stacked."""
    change = WOVEN if naming.stacks is Stacks.WOVEN else BEHIND
    woven: dict[str, Placed] = {}
    for name, placed in found.items():
        stem, _, part = name.partition(".experts.")
        end = "_bias" if part.endswith("bias") else ""
        matrix = len(placed.place.shape) == 3
        if not part:
            woven[name] = placed
        elif part.startswith("ffn_down"):
            down = replace(placed, change=TURN) if matrix else placed
            woven[f"{stem}.experts.down_proj{end}"] = down
        elif part.startswith("ffn_gate"):
            up = found.get(name.replace("ffn_gate", "ffn_up"))
            if up is None or up.place.shape != placed.place.shape:
                raise facts.refusal(f"tensor {placed.place.name} has no counterpart of its shape")
            woven[f"{stem}.experts.gate_up_proj{end}"] = replace(placed, change=change, up=up)
    return woven


def _joined(found: Mapping[str, Placed], facts: Facts) -> dict[str, Placed]:
    """transformers' matrix of latents' keys and values, [heads (plain + values), rank], by head."""
    joined: dict[str, Placed] = {}
    for name, placed in found.items():
        layer, keys, end = name.partition(KEYS_UP)
        if BOTH_UP in name:
            joined[name] = replace(placed, change=NUMBERS)
        elif keys:
            values, whole = found.get(f"{layer}{VALUES_UP}{end}"), f"{layer}{BOTH_UP}{end}"
            if values is None or whole in found or not _fit(placed.place, values.place):
                raise facts.refusal(
                    f"tensor {placed.place.name} does not fit attn_v_b, or attn_kv_b is also there"
                )
            joined[whole] = replace(placed, change=NUMBERS, up=values)
        elif VALUES_UP not in name:
            joined[name] = placed
        elif name.replace(VALUES_UP, KEYS_UP) not in found:
            raise facts.refusal(f"tensor {placed.place.name} has no attn_k_b")
    return joined


def _fit(keys: Place, values: Place) -> bool:
    """Return whether keys [heads, rank, plain] and values [heads, width, rank] are of one layer."""
    if len(keys.shape) != 3 or len(values.shape) != 3:
        return False
    return (keys.shape[0], keys.shape[1]) == (values.shape[0], values.shape[2])
