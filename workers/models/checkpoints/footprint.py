"""The memory of a model's process: the program, weights, keys and values, a pass, and loading. One
sum for admission, plans, limits and placements, from the configuration or the headers of tensors,
without torch."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.backends.sizes import (
    INT4,
    NUMBER_BYTES,
    TREE_ROWS,
    WEIGHT_BYTES,
    Sizes,
    has_sizes,
    matrix_bytes,
    sizes_of,
)
from dovetail.workers.models.checkpoints.composite import of_language_model, text_part
from dovetail.workers.models.checkpoints.context import LONGEST
from dovetail.workers.models.checkpoints.files import read_json
from dovetail.workers.models.checkpoints.gguf.kinds import KINDS, MXFP4, Q4_K, int4_kind
from dovetail.workers.models.checkpoints.gguf.view import FILE, described_tensors
from dovetail.workers.models.checkpoints.namings import BLOCKS, NAMINGS
from dovetail.workers.models.checkpoints.quantised.schemes import matrices, scheme_of

COMPILER_BYTES = 45_000_000 if find_spec("hqq") else 0
"""torch's compiler, which transformers imports where hqq is installed (measured)."""
PROCESS_BYTES = 305_000_000 + COMPILER_BYTES
"""A process with torch and transformers, without a model (2.13, 5.24; measured)."""
MIXTURE_BYTES = 30_000_000  # packing a layer with experts, beyond the sum (measured: 29 MB)
SEARCH_BYTES = 70_000_000  # memory kept after the search for int4 blocks (measured: 65 MB)
PROCESS_SPACE = 1_300_000_000  # bytes of its address space
EXPERTS_READ = 4  # matrices of an expert as they were stored: gate and up, apart and joined
CACHED_ROWS = 4096  # rows of keys and values in a limit: a long conversation, and a prompt of it
PASS_ROWS = {"cpu": 256, "gpu": 1024}  # rows of a prompt that pass a layer at a time
WIDENED_BYTES = 64 << 20  # bytes of a 16-bit matrix on a GPU that are widened to fp32 at a time
PACKED_LAYERS = 2  # layers that loading holds both as stored and as packed
PROOF_BYTES = 48 << 20  # a piece of a matrix in fp32, and the rows of a proof (`backends/fused.py`)
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors of a malformed file."""
MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
IN_BLOCKS = (FILE, INT4)  # weights in blocks, of the checkpoint or quantised here
STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}
FEWEST_BITS = 4  # minimum bits of a number of any other type
TABLE = re.compile(
    r"(^|\.)(embed_tokens|embeddings|embed_in|embed_positions|word_embeddings|wte|wpe|tok_embeddings)(_per_layer)?\.weight$"
)
PLACES = re.compile(r"(^|\.)(embed_positions|wpe)\.weight$")  # tables of positions
HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.weight$")
UNROUNDED = re.compile(r"\.kv_b_proj\.weight$")  # matrices over latents that stay as stored
LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
EXPERTS = re.compile(r"\.experts?\.|\.block_sparse_moe\.|_experts\.")


@dataclass(frozen=True)
class Tensor:
    """The entry of a tensor in a header."""

    name: str
    kind: str
    shape: tuple[int, ...]
    packed_bytes: int = 0  # bytes of its blocks in the kernels' layout; 0: it has none

    @property
    def numbers(self) -> int:
        """Return its number of weights: two for each byte of MXFP4 blocks, none for exponents."""
        if self.kind != "U8":
            return prod(self.shape)
        return 2 * prod(self.shape) if self.name.endswith(BLOCKS) else 0

    @property
    def stored_bytes(self) -> int:
        """Return its memory once read, when MXFP4 has become bf16."""
        return self.numbers * STORED_BYTES.get(self.kind, 2 if self.kind == "U8" else 1)

    @property
    def is_table(self) -> bool:
        return TABLE.search(self.name) is not None

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2 and not self.is_table

    @property
    def is_expert(self) -> bool:
        """Return whether this tensor belongs to one expert of a layer, or to all of them."""
        return is_expert(self.name, self.shape)


def is_expert(name: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor is of one expert of a layer, or of all of them."""
    return EXPERTS.search(name) is not None or (len(shape) > 2 and "conv" not in name)


def read_tensors(folder: Path) -> list[Tensor]:
    """Return the tensors of a folder's weight files; none if unreadable: loading reports it."""
    if described := described_tensors(folder):
        return [
            Tensor(name, one.kind, one.shape, one.packed_bytes) for name, one in described.items()
        ]
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    try:
        names = (
            {"model.safetensors"}
            if single.is_file()
            else {*json.loads(index.read_bytes())["weight_map"].values()}
        )
        found = [tensor for name in sorted(names) for tensor in _header(folder / name)]
        return _decoded(folder, found)
    except UNREADABLE:
        return []


def _decoded(folder: Path, tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors once read: quantised ones as matrices in fp32."""
    try:
        content = read_json(folder / "config.json")
        tensors = [tensor for tensor in tensors if of_language_model(content, tensor.name)]
        scheme = scheme_of(text_part(content))
    except CheckpointError:
        scheme = None
    if scheme is None:
        return tensors
    found, plain = matrices(scheme, {tensor.name: tensor for tensor in tensors})
    whole = [Tensor(name, "F32", matrix.shape) for name, matrix in found.items()]
    return [*plain.values(), *whole]


def _header(file: Path) -> list[Tensor]:
    with file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        if size > MAX_HEADER_BYTES:
            raise ValueError("no header")
        entries = json.loads(content.read(size))
    entries.pop("__metadata__", None)
    return [_entry(name, entry) for name, entry in entries.items()]


def _entry(name: str, entry: Mapping[str, Any]) -> Tensor:
    kind, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
    start, stop = map(int, entry["data_offsets"])
    least_bits = 8 * STORED_BYTES[kind] if kind in STORED_BYTES else FEWEST_BITS
    if prod(shape) * least_bits > 8 * (stop - start):
        raise ValueError("more numbers than its bytes hold")
    own = Tensor(name, kind, shape)
    coded = kind == "U8" and name.endswith(BLOCKS)
    return replace(own, packed_bytes=KINDS[MXFP4].packed_size_of((own.numbers,))) if coded else own


def in_blocks(folder: Path) -> bool:
    """Return whether weights `file` are possible: blocks of GGUF, or experts in MXFP4."""
    return any(tensor.packed_bytes for tensor in read_tensors(folder))


def half_of(tensors: Sequence[Tensor]) -> bool:
    """Return whether all matrices are stored in one type of 16 bits, for `half` weights."""
    return type_of_matrices(tensors) != "fp32"


def type_of_matrices(tensors: Sequence[Tensor]) -> str:
    """Return the type in which matrices are stored: fp16 or bf16 if all of them are, else fp32."""
    kinds = {tensor.kind for tensor in tensors if len(tensor.shape) == 2}
    return {"F16": "fp16", "BF16": "bf16"}.get("".join(kinds), "fp32")


def rearranged(tensors: Sequence[Tensor]) -> bool:
    """Return whether transformers rearranges tensors while loading, all of them in fp32."""
    return any(tensor.is_expert for tensor in tensors)


def in_pieces(folder: Path) -> bool:
    """Return whether the experts of a folder's model are read one by one."""
    try:
        return text_part(read_json(folder / "config.json")).get("model_type") in NAMINGS
    except (CheckpointError, TypeError):
        return False


@dataclass(frozen=True)
class Footprint:
    """The memory of a process, in bytes, without mapped files."""

    process: int  # the interpreter and its imports
    weights: int = 0  # packed matrices, tables, norms
    caches: int = 0  # keys and values, or states, of a long conversation and of a tree behind it
    scratch: int = 0  # what a pass holds: states, the inside of a layer, logits
    loading: int = 0  # the most memory beyond process and weights while these are loaded
    tokenizer: int = 0

    @property
    def model(self) -> int:
        """Return the memory of the model."""
        return self.weights + max(self.loading, self.caches + self.scratch)

    @property
    def size(self) -> int:
        """Return the total."""
        return self.process + self.tokenizer + self.model


def host_footprint(
    sizes: Sizes, computed: int = 0, resident: int = 0, *, rows: int = TREE_ROWS
) -> Footprint:
    """Return the host's memory if a device computes `computed` layers and keeps `resident`; `rows`:
    of a pass with logits."""
    own = sizes.layers - computed
    inside = pass_bytes(sizes, "cpu", rows=0) if own else 0
    head = 0 if computed else sizes.head - sizes.tied
    return Footprint(
        PROCESS_BYTES + (MIXTURE_BYTES if sizes.experts else 0),
        sizes.embedding + head + (sizes.layers - resident) * sizes.layer + resident * sizes.apart,
        caches=own * cache_bytes(sizes),
        scratch=rows * sizes.logits + inside,
        loading=sizes.loading or PACKED_LAYERS * sizes.layer,
    )


def cache_bytes(sizes: Sizes) -> int:
    """Return keys and values, or the state, of a layer for a long conversation and a tree."""
    return sizes.row * (long_rows(sizes) + TREE_ROWS) + sizes.states


def pass_bytes(sizes: Sizes, device: str, *, rows: int = TREE_ROWS) -> int:
    """Return the memory of a pass: states of a prompt, a chunk within a layer, logits of `rows`."""
    on_gpu = device != "cpu"
    chunk = min(PASS_ROWS["gpu" if on_gpu else "cpu"], long_rows(sizes))
    seen = long_rows(sizes) * seen_bytes(sizes) + WIDENED_BYTES if on_gpu else 0
    held = long_rows(sizes) if on_gpu else chunk
    return (
        held * (2 * sizes.state + sizes.inputs) + chunk * sizes.inner + seen + rows * sizes.logits
    )


def seen_bytes(sizes: Sizes) -> int:
    """Return the GPU memory per row that a chunk of a prompt sees."""
    chunk = min(PASS_ROWS["gpu"], long_rows(sizes))
    return chunk * sizes.groups * NUMBER_BYTES + sizes.widened


def long_rows(sizes: Sizes) -> int:
    """Return the rows of a long conversation."""
    return min(CACHED_ROWS, sizes.context)


def sizes_in(
    folder: Path,
    tensors: Sequence[Tensor],
    weights: str,
    cache: str,
    *,
    longest: int | None = None,
    library: bool = False,
) -> Sizes:
    """Return the sizes of a folder's model with these tensors; keys and values of the type `cache`
    if config.json has sizes, for at most `longest` tokens."""
    try:
        config = text_part(read_json(folder / "config.json"))
    except CheckpointError:
        config = {}
    count = max(1, len(layers_in(tensors)))
    sizes = Sizes(count, 0, 0, 0, 0, row=0, context=0, state=0, inner=0, groups=1, logits=0)
    if has_sizes(config):
        longer = {**config, LONGEST: longest} if longest else config
        sizes = sizes_of(longer, weights if weights in WEIGHT_BYTES else "int8", cache)
    return sizes_by_tensors(sizes, tensors, weights, library=library)


def bytes_of_codes(numbers: int, bits: int) -> int:
    """Return the bytes of the codes of this many weights: 4 or 8 bits each, with 2 x 16 bits for 64
    weights of 4."""
    return -(-numbers // 64) * (32 + 4) * (1 if bits <= 4 else 2)


def substitute_footprint(tensors: Sequence[Tensor], bits: int) -> Footprint:
    """Return the memory of a substitute's process whose codes have `bits` bits, once they exist."""
    layers = layers_in(tensors)
    numbers = sum(tensor.numbers for layer in layers for tensor in layer if tensor.is_matrix)
    inside = {tensor.name for layer in layers for tensor in layer}
    rest = [tensor for tensor in tensors if tensor.name not in inside] + tied_head(tensors)
    stored = [sum(tensor.stored_bytes for tensor in part) for part in (*layers, *zip(rest))]
    codes = bytes_of_codes(numbers, bits)
    ends = sum(tensor.stored_bytes for tensor in rest)
    return Footprint(PROCESS_BYTES, codes + ends, loading=max(stored, default=0))


def head_footprint(tensors: Sequence[Tensor], target: Sequence[Tensor]) -> Footprint:
    """Return the memory of a draft head's process, with its target's tables if it has none."""
    whole = (*tensors, *tables_lacking(tensors, target))
    return Footprint(PROCESS_BYTES, sum(tensor.stored_bytes for tensor in whole))


def mtp_footprint(target: Sequence[Tensor]) -> Footprint:
    """Return the memory of the process of a target's MTP layer, taken to be its largest layer."""
    own = [tensor for tensor in target if not tensor.name.startswith("mtp.")]
    return head_footprint(max(layers_in(own), key=_stored_bytes, default=[]), target)


def _stored_bytes(layer: Sequence[Tensor]) -> int:
    return sum(tensor.stored_bytes for tensor in layer)


def tables_lacking(tensors: Sequence[Tensor], target: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the parts of a target's embedding and output head that a draft head lacks."""
    lacks = [
        found for found in (TABLE, HEAD) if not any(found.search(tensor.name) for tensor in tensors)
    ]
    return [tensor for tensor in target if any(found.search(tensor.name) for found in lacks)]


def weights_bytes(tensors: Sequence[Tensor], weights: str) -> int:
    """Return the bytes of weights in memory: packed matrices, and tables as stored unless in the
    head."""
    tied = _in_the_head(tensors, weights)
    return sum(_kept_bytes(tensor, weights) for tensor in [*tensors, *tied_head(tensors)]) - tied


def _in_the_head(tensors: Sequence[Tensor], weights: str) -> int:
    """Return the bytes of a table whose numbers lie in the packed head."""
    if weights.startswith("int8"):
        return 0
    return sum(
        _kept_bytes(replace(table, name="embed_tokens.weight"), weights)
        for table in tied_head(tensors)
    )


def sizes_by_tensors(
    sizes: Sizes, tensors: Sequence[Tensor], weights: str, *, library: bool = False
) -> Sizes:
    """Return sizes by a checkpoint's tensors; `sizes`: by its configuration. `library`: torch
    computes it, with each matrix also as stored."""
    layers = layers_in(tensors)
    inside = [tensor for layer in layers for tensor in layer]
    mean = -(-_bytes_of(inside, weights) // sizes.layers)
    heads = _heads(tensors)
    experts = [tensor for tensor in inside if tensor.is_expert and len(tensor.shape) > 1]
    found = replace(
        sizes,
        layer=mean,
        wider=max((_bytes_of(layer, weights) for layer in layers), default=mean) - mean,
        matrix=max((_bytes_of([tensor], weights) for tensor in inside), default=0),
        head=_bytes_of(heads, weights) + 2 * sizes.state,
        embedding=_bytes_of([tensor for tensor in tensors if tensor.is_table], weights),
        tied=0 if library else _in_the_head(tensors, weights),
        experts=-(-_bytes_of(experts, weights) // sizes.layers),
        unrounded=0,
    )
    return replace(found, loading=_loading_bytes(found, tensors, weights, library=library))


def _loading_bytes(sizes: Sizes, tensors: Sequence[Tensor], weights: str, *, library: bool) -> int:
    """Return the peak of loading above packed weights: table and head as stored, and parts of a
    layer or the packed head."""
    if library and rearranged(tensors):
        largest = max((tensor.numbers for tensor in tensors if tensor.is_matrix), default=0)
        whole = 4 * (sum(tensor.numbers for tensor in tensors) + largest)
        return max(1, whole - weights_bytes(tensors, weights))
    layers, expert = _without_experts(layers_in(tensors))
    heads, ends = _heads(tensors), [tensor for tensor in tensors if _is_end(tensor)]
    dense = [tensor for tensor in ends if not _stays_in_blocks(tensor, weights)]
    held = sum(tensor.stored_bytes for tensor in dense)
    at_layer = max((_at_layer(layer, weights) for layer in layers), default=0)
    if weights == INT4:  # table and head become blocks before there are any layers
        held = sum(_kept_bytes(tensor, weights) for tensor in ends)
        first = max((tensor.stored_bytes for tensor in ends), default=0)
        inside = [tensor.stored_bytes for layer in layers for tensor in layer]
        at_layer = max(first - sizes.layers * sizes.layer, *inside, 0)
    widened = 4 * max((tensor.numbers for tensor in heads), default=0) if library else 0
    packed = sizes.head + widened
    kept = sizes.head + sizes.embedding - sizes.tied
    return max(1, PROOF_BYTES + held + max(at_layer + EXPERTS_READ * expert, packed) - kept)


def _at_layer(layer: Sequence[Tensor], weights: str) -> int:
    """Return the peak above packed matrices while a layer is packed: its last three as stored."""
    dense = [tensor for tensor in layer if not _stays_in_blocks(tensor, weights)]
    largest = max(dense, key=lambda tensor: tensor.stored_bytes, default=None)
    if largest is None:
        return 0
    stored = min(3 * largest.stored_bytes, sum(tensor.stored_bytes for tensor in dense))
    return max(0, stored - _kept_bytes(largest, weights))


def _stays_in_blocks(tensor: Tensor, weights: str) -> bool:
    return weights == FILE and tensor.packed_bytes > 0


def _is_end(tensor: Tensor) -> bool:
    return tensor.is_table or HEAD.search(tensor.name) is not None


def _heads(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if HEAD.search(tensor.name)] or tied_head(tensors)


def _bytes_of(tensors: Sequence[Tensor], weights: str) -> int:
    return sum(_kept_bytes(tensor, weights) for tensor in tensors)


def _without_experts(layers: Sequence[Sequence[Tensor]]) -> tuple[list[list[Tensor]], int]:
    """Return the layers without their experts, and the bytes of the largest matrix of one."""
    experts = (tensor for layer in layers for tensor in layer if tensor.is_expert)
    stacks = [(one.shape[0] if len(one.shape) > 2 else 1, one) for one in experts]
    largest = max((one.stored_bytes // count for count, one in stacks), default=0)
    return [[tensor for tensor in layer if not tensor.is_expert] for layer in layers], largest


def _kept_bytes(tensor: Tensor, weights: str) -> int:
    if weights == FILE:
        return tensor.packed_bytes or tensor.stored_bytes
    if weights == INT4 and len(tensor.shape) == 2:
        return _int4_bytes(tensor)
    if weights == INT4 and tensor.is_expert and len(tensor.shape) > 2:
        return tensor.numbers * KINDS[Q4_K].packed_size_of((256,)) // 256
    if tensor.is_table:
        return tensor.numbers * min(4, STORED_BYTES.get(tensor.kind, 4))
    kind = weights if weights in WEIGHT_BYTES else "int8" if weights.startswith("int8") else "fp32"
    if kind == "int8" and UNROUNDED.search(tensor.name):
        kind = "half" if STORED_BYTES.get(tensor.kind) == 2 else "fp32"
    if tensor.is_matrix:
        return matrix_bytes(kind, *tensor.shape)
    if len(tensor.shape) == 3:
        return tensor.shape[0] * matrix_bytes(kind, *tensor.shape[1:])
    if tensor.kind == "U8" and tensor.packed_bytes:  # experts in MXFP4: [experts, out, blocks, 16]
        experts, outputs, blocks, half = tensor.shape
        return experts * matrix_bytes(kind, outputs, blocks * 2 * half)
    return 4 * tensor.numbers


def _int4_bytes(tensor: Tensor) -> int:
    """Return the bytes of a table or a matrix with weights int4, and of a bias."""
    end = _is_end(tensor)
    kind = int4_kind(tensor.shape[1], end=end)
    if kind is None or UNROUNDED.search(tensor.name) or PLACES.search(tensor.name):
        return tensor.stored_bytes
    return KINDS[kind].packed_size_of(tensor.shape) + (0 if end else 4 * tensor.shape[0])


def tied_head(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the head made from the embedding if the checkpoint has none."""
    if any(HEAD.search(tensor.name) for tensor in tensors):
        return []
    tables = [
        tensor
        for tensor in tensors
        if tensor.is_table and len(tensor.shape) == 2 and "_per_layer." not in tensor.name
    ]
    largest = max(tables, key=lambda tensor: tensor.shape[0], default=None)
    return [] if largest is None else [replace(largest, name="lm_head.weight")]


def linears_bytes(tensors: Sequence[Tensor], weights: str = FILE) -> int:
    """Return the bytes of a checkpoint's matrices as blocks, with the head."""
    return sum(_kept_bytes(tensor, weights) for tensor in _matrices(tensors))


def numbers_by_type(folder: Path) -> Counter[int]:
    """Return the number of weights per ggml type of a GGUF file's matrices; None for other
    folders."""
    described, found = described_tensors(folder), Counter[int]()
    tensors = read_tensors(folder) if described else []
    table = next((tensor.name for tensor in tensors if tensor.is_table), "")
    for tensor in _matrices(tensors):
        found[described[tensor.name if tensor.name in described else table].type] += tensor.numbers
    return found


def _matrices(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return all matrices that a row is multiplied by, including the head."""
    every = [*tensors, *tied_head(tensors)]
    return [tensor for tensor in every if len(tensor.shape) > 1 and not tensor.is_table]


def layers_in(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors of layers, layer by layer."""
    found: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        if match := LAYER.search(f".{tensor.name}"):
            found.setdefault(match[1], []).append(tensor)
    return [*found.values()]


def types_below(weights: str, tensors: Sequence[Tensor], *, library: bool) -> list[str]:
    """Return the smaller types of weights that a target can have, the most exact first."""
    smaller: Mapping[str, tuple[str, ...]] = {
        "fp32": ("half", FILE, "int8", INT4),
        "half": (FILE, "int8", INT4),
        "bf16": ("int8", INT4),
        "int8": (INT4,),
    }
    if library:
        return [] if rearranged(tensors) else ["bf16"] if weights == "fp32" else []
    in_file = any(tensor.packed_bytes for tensor in tensors)
    able = {"half": half_of(tensors), FILE: in_file, INT4: not in_file}
    return [name for name in smaller.get(weights, ()) if able.get(name, True)]
