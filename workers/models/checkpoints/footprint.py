"""The memory that a model takes while it is loaded, by what its files say of themselves: names and
shapes of tensors, and types of numbers.

Counted is what cannot be given back: the process itself, weights as they will lie, and the most
that is there beside them on the way. Keys and values of sessions come later and are not counted.
Functions of shapes; reads headers alone, needs no torch.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.backends.sizes import INT4, WEIGHT_BYTES, Sizes, matrix_bytes
from dovetail.workers.models.checkpoints.composite import text_part
from dovetail.workers.models.checkpoints.files import read_json
from dovetail.workers.models.checkpoints.gguf.kinds import KINDS, MXFP4, Q4_K, int4_kind
from dovetail.workers.models.checkpoints.gguf.view import FILE, described_tensors
from dovetail.workers.models.checkpoints.namings import BLOCKS, NAMINGS
from dovetail.workers.models.checkpoints.quantised.layout import matrices
from dovetail.workers.models.checkpoints.quantised.schemes import scheme_of

PROCESS_BYTES = 300_000_000
"""Memory of a process that has imported torch and transformers and holds no model (torch 2.13,
measured: 295 MB)."""
PROCESS_SPACE = 1_300_000_000
"""Bytes of its address space."""
EXPERTS_READ = 4
"""Matrices of one expert that are there at a time as they were stored: gate and up, one by one and
together."""
PROOF_BYTES = 48 << 20
"""A piece of a matrix in fp32 while it is packed, and the rows on which a layer is proved
(`backends/fused.py`)."""
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors of a file that is not what it should be."""
MAX_HEADER_BYTES = 100 << 20
"""safetensors' own limit."""
IN_BLOCKS = (FILE, INT4)
"""Weights that are blocks, of the checkpoint or searched for."""
STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}
FEWEST_BITS = 4
"""Bits of a number of any other type at least."""
TABLE = re.compile(
    r"(^|\.)(embed_tokens|embeddings|embed_in|embed_positions|word_embeddings|wte|wpe|tok_embeddings)(_per_layer)?\.weight$"
)
PLACES = re.compile(r"(^|\.)(embed_positions|wpe)\.weight$")
"""Tables of positions."""
HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.weight$")
UNROUNDED = re.compile(r"\.kv_b_proj\.weight$")
"""Matrices of attention over latents, which are as they are stored where others are int8."""
LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
EXPERTS = re.compile(r"\.experts?\.|\.block_sparse_moe\.|_experts\.")


@dataclass(frozen=True)
class Tensor:
    """The entry of a tensor in a header."""

    name: str
    kind: str
    shape: tuple[int, ...]
    packed_bytes: int = 0
    """Bytes of its blocks as the kernels have them; 0: it has none."""

    @property
    def numbers(self) -> int:
        """Return how many numbers it stands for: blocks of MXFP4 for two in each byte, and their
        exponents for none."""
        if self.kind != "U8":
            return prod(self.shape)
        return 2 * prod(self.shape) if self.name.endswith(BLOCKS) else 0

    @property
    def stored_bytes(self) -> int:
        """Return the memory that it takes as it is read, when MXFP4 has become bf16."""
        return self.numbers * STORED_BYTES.get(self.kind, 2 if self.kind == "U8" else 1)

    @property
    def is_table(self) -> bool:
        return TABLE.search(self.name) is not None

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2 and not self.is_table

    @property
    def is_expert(self) -> bool:
        """Return whether this is of one expert of a layer, or of all of them."""
        return is_expert(self.name, self.shape)


def is_expert(name: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor is of one expert of a layer, or of all of them."""
    return EXPERTS.search(name) is not None or (len(shape) > 2 and "conv" not in name)


def read_tensors(folder: Path) -> list[Tensor]:
    """Return what the weight files of a folder hold; nothing where that cannot be told: whoever
    loads them says what is wrong."""
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
    """Return what tensors are once they are read: quantised ones matrices in fp32."""
    try:
        scheme = scheme_of(text_part(read_json(folder / "config.json")))
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
    """Return whether the model of a folder has blocks that weights `file` are there for: those of
    its GGUF file, or experts in MXFP4."""
    return any(tensor.packed_bytes for tensor in read_tensors(folder))


def half_of(tensors: Sequence[Tensor]) -> bool:
    """Return whether the matrices are stored in one type of 16 bits, as `half` weights need
    them."""
    kinds = {tensor.kind for tensor in tensors if len(tensor.shape) == 2}
    return len(kinds) == 1 and kinds <= {"F16", "BF16"}


def type_of_matrices(tensors: Sequence[Tensor]) -> str:
    """Return the type in which matrices are stored: fp16 or bf16 if all of them are, else fp32."""
    kinds = {tensor.kind for tensor in tensors if len(tensor.shape) == 2}
    return {"F16": "fp16", "BF16": "bf16"}.get("".join(kinds), "fp32")


def rearranged(tensors: Sequence[Tensor]) -> bool:
    """Return whether transformers would rearrange these as it loads them, and so have all of them
    in fp32 at a time: experts become one tensor."""
    return any(tensor.is_expert for tensor in tensors)


def in_pieces(folder: Path) -> bool:
    """Return whether the model of a folder is one whose experts are read one by one."""
    try:
        return read_json(folder / "config.json").get("model_type") in NAMINGS
    except (CheckpointError, TypeError):
        return False


def weights_bytes(tensors: Sequence[Tensor], weights: str) -> int:
    """Return what weights of a type take once they are there: packed matrices, tables as they are
    stored, a head beside the table that it is tied to."""
    return sum(_kept_bytes(tensor, weights) for tensor in [*tensors, *tied_head(tensors)])


def loading_bytes(
    tensors: Sequence[Tensor], weights: str, *, library: bool = False, inflate_bytes: int = 0
) -> int:
    """Return the most that a process holds while it loads a model with weights of a type;
    `inflate_bytes`: of its linears in fp32, 0 for no inflation.

    `library`: torch computes it, and each matrix is there as stored and in the type that is
    computed with.
    """
    if weights == FILE:
        return _file_loading_bytes(tensors)
    if library and rearranged(tensors):
        largest = max((tensor.numbers for tensor in tensors if tensor.is_matrix), default=0)
        return PROCESS_BYTES + 4 * (sum(tensor.numbers for tensor in tensors) + largest)
    heads = [tensor for tensor in tensors if HEAD.search(tensor.name)] or tied_head(tensors)
    whole = weights_bytes(tensors, weights)
    layers = layers_in(tensors)
    matrices = sum(tensor.numbers for layer in layers for tensor in layer if tensor.is_matrix)
    grown = 1.0
    if inflate_bytes and matrices:
        of_heads = sum(tensor.numbers for tensor in heads)
        grown = max(1.0, (inflate_bytes / 4 - of_heads) / matrices)
        whole += int((grown - 1.0) * matrices * WEIGHT_BYTES.get(weights, 4))
        grown = max(1.0, grown / 2)  # half of it are more layers
    # experts are read, packed and proved one by one
    layers, expert = _without_experts(layers)
    packed = max(
        (int(grown * sum(_kept_bytes(tensor, weights) for tensor in layer)) for layer in layers),
        default=0,
    )
    stored = max(
        (int(grown * sum(tensor.stored_bytes for tensor in layer)) for layer in layers), default=0
    )
    if inflate_bytes:  # a layer grows in the type that it is packed from
        number = 2 if WEIGHT_BYTES.get(weights) == 2 else 4
        stored = max(
            (int(grown * number * sum(tensor.numbers for tensor in layer)) for layer in layers),
            default=0,
        )
    head_stored = max((tensor.stored_bytes for tensor in heads), default=0)
    of_heads = sum(_kept_bytes(tensor, weights) for tensor in heads)
    tables = sum(tensor.stored_bytes for tensor in tensors if tensor.is_table)
    # a layer is proved before it is packed: as it was stored, as the kernels have that, and as
    # transformers computes it, in fp32
    widest = max(
        (
            int(grown * 4 * sum(tensor.numbers for tensor in layer if not tensor.is_expert))
            for layer in layers
        ),
        default=0,
    )
    at_layers = whole - of_heads - tables - packed + 2 * stored + widest + EXPERTS_READ * expert
    # embedding and head are read when all layers are packed
    widened = 4 * max((tensor.numbers for tensor in heads), default=0) if library else 0
    at_head = whole + head_stored + widened
    return PROCESS_BYTES + PROOF_BYTES + max(whole, at_layers, at_head)


def _file_loading_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the most that a process holds while it loads a model as the blocks of its file: beside
    what is packed a layer as it is read, one of its experts in numbers, and the head."""
    heads = [tensor for tensor in tensors if HEAD.search(tensor.name)] or tied_head(tensors)
    layers, expert = _without_experts(layers_in(tensors))
    sizes = (sum(_kept_bytes(tensor, FILE) for tensor in layer) for layer in layers)
    read = max(sizes, default=0) + sum(_kept_bytes(tensor, FILE) for tensor in heads)
    whole = weights_bytes(tensors, FILE)
    return PROCESS_BYTES + PROOF_BYTES + whole + read + EXPERTS_READ * expert


def _without_experts(layers: Sequence[Sequence[Tensor]]) -> tuple[list[list[Tensor]], int]:
    """Return the layers without their experts, and the bytes of the largest matrix of one."""
    experts = (tensor for layer in layers for tensor in layer if tensor.is_expert)
    largest = max((tensor.stored_bytes // _experts_in(tensor) for tensor in experts), default=0)
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
    end = tensor.is_table or HEAD.search(tensor.name) is not None
    kind = int4_kind(tensor.shape[1], end=end)
    if kind is None or UNROUNDED.search(tensor.name) or PLACES.search(tensor.name):
        return tensor.stored_bytes
    return KINDS[kind].packed_size_of(tensor.shape) + (0 if end else 4 * tensor.shape[0])


def _experts_in(tensor: Tensor) -> int:
    """Return how many experts one tensor is of."""
    return tensor.shape[0] if len(tensor.shape) > 2 else 1


def tied_head(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the head that is made of the embedding where there is none of its own."""
    if any(HEAD.search(tensor.name) for tensor in tensors):
        return []
    tables = [
        tensor
        for tensor in tensors
        if tensor.is_table and len(tensor.shape) == 2 and "_per_layer." not in tensor.name
    ]
    largest = max(tables, key=lambda tensor: tensor.shape[0], default=None)
    return [] if largest is None else [replace(largest, name="lm_head.weight")]


def sizes_in_blocks(sizes: Sizes, tensors: Sequence[Tensor]) -> Sizes:
    """Return the sizes of a model whose matrices are the blocks of a GGUF file; `sizes`: of the
    same model in any weights."""
    matrices = _matrices(tensors)
    inside = [tensor for tensor in matrices if LAYER.search(f".{tensor.name}")]
    layers, head = _in_bytes(inside), _in_bytes(matrices) - _in_bytes(inside)
    mean = -(-layers // sizes.layers)
    experts = -(-_in_bytes([tensor for tensor in inside if tensor.is_expert]) // sizes.layers)
    return replace(
        sizes,
        layer=mean + 4 * sizes.state,
        wider=max(map(_in_bytes, layers_in(inside))) - mean,
        matrix=max(_in_bytes([tensor]) for tensor in inside),
        head=head + 2 * sizes.state,
        embedding=_in_bytes([tensor for tensor in tensors if tensor.is_table]),
        experts=experts,
        unrounded=0,
    )


def linears_bytes(tensors: Sequence[Tensor], weights: str = FILE) -> int:
    """Return what the matrices of a checkpoint take as blocks, the head's included: those of its
    GGUF file, or with weights int4 those that are searched for."""
    return sum(_kept_bytes(tensor, weights) for tensor in _matrices(tensors))


def numbers_by_type(folder: Path) -> Counter[int]:
    """Return how many numbers of each of ggml's types the matrices of a GGUF file have, the head's
    included; nothing of a folder that is the view of none."""
    described, found = described_tensors(folder), Counter[int]()
    tensors = read_tensors(folder) if described else []
    table = next((tensor.name for tensor in tensors if tensor.is_table), "")
    for tensor in _matrices(tensors):
        found[described[tensor.name if tensor.name in described else table].type] += tensor.numbers
    return found


def _matrices(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return all that a row is multiplied with, the head among it."""
    every = [*tensors, *tied_head(tensors)]
    return [tensor for tensor in every if len(tensor.shape) > 1 and not tensor.is_table]


def _in_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(_kept_bytes(tensor, FILE) for tensor in tensors)


def layers_in(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors of layers, layer by layer."""
    found: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        if match := LAYER.search(f".{tensor.name}"):
            found.setdefault(match[1], []).append(tensor)
    return [*found.values()]


def types_below(weights: str, tensors: Sequence[Tensor], *, library: bool) -> list[str]:
    """Return the types of weights of a target that take less than these and can be computed, the
    most exact first."""
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
