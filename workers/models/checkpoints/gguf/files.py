"""GGUF files (ggml's `docs/gguf.md`, versions 2 and 3, little-endian): facts by key, and the place
of every tensor, of one file or the parts of a split model (`llama-gguf-split`). Every count, length
and offset is checked, so that damaged and forged files end in an error."""

import mmap
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.digests import Identity, refuse_changed
from dovetail.workers.models.checkpoints.files import unreadable
from dovetail.workers.models.checkpoints.gguf.kinds import F32, I64, KINDS, UNREAD
from dovetail.workers.models.checkpoints.gguf.names import AGAIN, parts_of

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""numpy's types for the numeric types of values."""
STRING, ARRAY = 8, 9
MOST_KEYS, MOST_TENSORS = 1 << 16, 1 << 20
MOST_ITEMS = 1 << 24  # items of an array: more tokens than any embedding has rows here
MOST_NESTED = 2  # deepest nesting of a list in other lists; no such key is used
NEEDED = ("tokenizer.", "the name of a tensor")  # prefixes of values that must be valid text
LONGEST_NAME = 1 << 16
LONGEST_TEXT = 1 << 28
TABLES = ("d2t",)  # tensors of ids; all others hold weights
DIMENSIONS = 4
LARGEST = 1 << 48  # numbers of a tensor
ALIGNMENT, MOST_ALIGNMENT = 32, 1 << 16


@dataclass(frozen=True)
class Place:
    """A tensor as described in a file's header."""

    name: str
    shape: tuple[int, ...]  # the last dimension is that of a row, whose numbers are neighbours
    kind: int  # ggml's number of the type
    offset: int  # offset in bytes from the beginning of the file

    @property
    def size_bytes(self) -> int:
        """Return the bytes that it takes; ValueError if its rows are not whole blocks."""
        return KINDS[self.kind].size_of(self.shape)


@dataclass(frozen=True)
class FileHead:
    """The head of a GGUF file."""

    file: Path
    identity: Identity
    facts: Mapping[str, Any]  # numbers, texts, lists, and arrays; text that is not UTF-8 is bytes
    tensors: tuple[Place, ...]
    size_bytes: int  # offset of the first tensor, in bytes from the beginning of the file
    ends: Mapping[str, int]  # keys -> offset of the end of their value


def read_head(file: Path, *, texts: bool = True) -> FileHead:
    """Return a GGUF file's head, with its vocabulary if `texts`; `CheckpointError` if it is
    damaged."""
    try:
        if not file.is_file():
            raise OSError(None, "it is not a file")
        with file.open("rb") as opened:
            identity = Identity.of(opened)
            if opened.read(4) != MAGIC:
                text = "is no GGUF file: it does not begin with the letters GGUF"
                raise CheckpointError(f"{file} {text}; {AGAIN}")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Reader(file, content, texts=texts).head(identity)
    except OSError as error:
        raise unreadable(file, error) from None


class _Reader:
    """A position in a file, from which values are read in sequence."""

    def __init__(self, file: Path, content: mmap.mmap, *, texts: bool) -> None:
        self._file, self._content, self._size = file, content, len(content)
        self._wants_texts = texts
        self._place = len(MAGIC)

    def head(self, identity: Identity) -> FileHead:
        version = self._number("<I")
        if version not in VERSIONS:
            self._refuse_version(version)
        tensors, keys = self._number("<Q"), self._number("<Q")
        if tensors > MOST_TENSORS or keys > MOST_KEYS:
            self._refuse(f"it declares {tensors} tensors and {keys} keys")
        facts, spans = dict[str, Any](), dict[str, slice]()
        for _ in range(keys):
            key = self._bytes("a key", LONGEST_NAME).decode(errors="backslashreplace")
            begin = self._place
            facts[key] = self._value(self._number("<I"), key)
            own = slice(begin, self._place)
            if self._content[spans.setdefault(key, own)] != self._content[own]:
                self._refuse_double(f"the key {key[:100]} twice, with different values")
        places = [self._tensor() for _ in range(tensors)]
        alignment = facts.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= MOST_ALIGNMENT or alignment % 8:
            self._refuse(f"general.alignment is {str(alignment)[:50]}")
        begin = -(-self._place // alignment) * alignment
        found: dict[str, Place] = {}
        for name, shape, kind, offset in places:
            if name in found:
                self._refuse_double(f"the tensor {name[:100]} twice")
            if offset % alignment:
                self._refuse(f"tensor {name[:100]} begins at {offset}, not at a whole {alignment}")
            found[name] = Place(name, shape, kind, begin + offset)
        ends = {key: span.stop for key, span in spans.items()}
        tensors_at, size = tuple(found.values()), min(begin, self._size)
        return FileHead(self._file, identity, facts, tensors_at, size, ends)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text("the name of a tensor", LONGEST_NAME)
        dimensions = self._number("<I")
        if not 0 < dimensions <= DIMENSIONS:
            self._refuse(f"tensor {name[:100]} has {dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
        if not all(shape) or prod(shape) > LARGEST:
            self._refuse(f"tensor {name[:100]} has the shape {list(shape)}")
        return name, shape, self._number("<I"), self._number("<Q")

    def _value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == STRING:
            return self._text(key, LONGEST_TEXT)
        if kind == ARRAY:
            if depth > MOST_NESTED:
                self._refuse(f"{key[:100]} has lists that are nested too deeply")
            kind, count = self._number("<I"), self._number("<Q")
            if count > MOST_ITEMS:
                self._refuse(f"{key[:100]} has {count} items")
            if kind == STRING:
                return self._texts(key, count)
            if kind == ARRAY:
                return [self._value(kind, key, depth + 1) for _ in range(count)]
            return self._numbers(kind, key, count)
        return self._numbers(kind, key, 1)[0].item()

    def _numbers(self, kind: int, key: str, count: int) -> np.ndarray:
        if kind not in SCALARS:
            self._refuse(f"{key[:100]} has values of the unknown type {kind}")
        size = np.dtype(SCALARS[kind]).itemsize * count
        return np.frombuffer(self._take(size, key), dtype=SCALARS[kind])

    def _texts(self, key: str, count: int) -> list[Any]:
        """Return a list of texts, inlined: vocabularies have hundreds of thousands."""
        content, place, size = self._content, self._place, self._size
        length, found = struct.Struct("<Q").unpack_from, list[Any]()
        wanted = self._wants_texts or not key.startswith("tokenizer.")
        try:
            for _ in range(count):
                begin = place + 8
                place = begin + length(content, place)[0]
                if place > size:
                    self._refuse(f"it ends within {key[:100]}")
                if wanted:
                    found.append(self._decoded(content[begin:place], key))
        except struct.error:
            self._refuse(f"it ends within {key[:100]}")
        self._place = place
        return found

    def _text(self, what: str, most: int) -> Any:
        return self._decoded(self._bytes(what, most), what)

    def _bytes(self, what: str, most: int) -> bytes:
        length = self._number("<Q")
        if length > most:
            self._refuse(f"{what[:100]} has {length} bytes")
        return self._take(length, what)

    def _decoded(self, content: bytes, what: str) -> str | bytes:
        """Return a text, or its bytes if they are not UTF-8 and the text is not `NEEDED`."""
        try:
            return content.decode()
        except UnicodeDecodeError:
            if what.startswith(NEEDED):
                text = f"{self._file}: {what[:100]} has text that is not UTF-8"
                raise CheckpointError(f"{text}; take another file of this model") from None
            return content

    def _number(self, kind: str) -> int:
        (number,) = struct.unpack(kind, self._take(struct.calcsize(kind), "its header"))
        return int(number)

    def _take(self, size: int, what: str) -> bytes:
        begin, self._place = self._place, self._place + size
        if self._place > self._size:
            self._refuse(f"it ends within {what[:100]}")
        return self._content[begin : self._place]

    def _refuse(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self._file} is not a whole GGUF file: {why}; {AGAIN}")

    def _refuse_double(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self._file} has {what}; take another file of this model")

    def _refuse_version(self, version: int) -> NoReturn:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in VERSIONS:
            raise CheckpointError(f"{self._file} is big-endian; take a little-endian GGUF file")
        raise CheckpointError(f"{self._file} is GGUF of version {version}; take version 2 or 3")


MOST_NUMBERS = 1 << 16


@dataclass(frozen=True)
class Model:
    """The heads of a model's files."""

    heads: Sequence[FileHead]

    @property
    def file(self) -> Path:
        """Return the file that names the model: its first."""
        return self.heads[0].file

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return the model's metadata."""
        return self.heads[0].facts


def read_model(file: Path, *, texts: bool = True) -> Model:
    """Return the heads of a model by any of its files, with its vocabulary if `texts`;
    `CheckpointError` for parts that are missing or foreign."""
    parts = parts_of(file)
    if missing := next((part for part in parts if not part.is_file()), None):
        if len(parts) == 1:
            raise CheckpointError(f"{file}: there is no such file; check the path")
        raise CheckpointError(f"{missing} is missing, a part of {file.name}; fetch it, too")
    heads = [read_head(part, texts=texts) for part in parts]
    for number, head in enumerate(heads):
        _refuse_part(head, number, len(heads))
    _refuse_kind(heads[0])
    for head in heads:
        _refuse_places(head)
    names = [place.name for head in heads for place in head.tensors]
    if len(set(names)) != len(names):
        [(twice, _)] = Counter(names).most_common(1)
        raise CheckpointError(f"{file}: its parts have the tensor {twice[:100]} twice; {AGAIN}")
    counted = heads[0].facts.get("split.tensors.count", len(names))
    if len(heads) > 1 and counted != len(names):
        text = f"its parts have {len(names)} tensors, not {str(counted)[:50]}"
        raise CheckpointError(f"{file}: {text}; {AGAIN}")
    return Model(heads)


def numbers_of(model: Model, name: str) -> list[float]:
    """Return the numbers of a small fp32 tensor, such as the factors of a rotation."""
    head, place = next((h, p) for h in model.heads for p in h.tensors if p.name == name)
    if place.kind != F32 or len(place.shape) != 1 or place.shape[0] > MOST_NUMBERS:
        raise CheckpointError(f"{head.file}: tensor {name} is no short list of F32; {AGAIN}")
    try:
        with head.file.open("rb") as file:
            file.seek(place.offset)
            found = np.frombuffer(file.read(place.size_bytes), dtype="<f4")
            refuse_changed(head.file, head.identity, file)
    except OSError as error:
        raise unreadable(head.file, error) from None
    if not np.isfinite(found).all():
        raise CheckpointError(f"{head.file}: tensor {name} holds NaN or infinite values")
    return [float(number) for number in found]


def _refuse_places(head: FileHead) -> None:
    """`CheckpointError` for tensors of an unread type, beyond the file's end, or overlapping."""
    end, before = head.size_bytes, ""
    for place in sorted(head.tensors, key=lambda place: place.offset):
        if place.kind not in KINDS or (place.kind == I64 and place.name not in TABLES):
            kind = {**UNREAD, I64: "I64"}.get(place.kind, f"number {place.kind}")
            text = f"{head.file}: tensor {place.name} is of type {kind}, which is not read here"
            raise CheckpointError(f"{text}; take another quantisation, such as Q4_K_M or Q8_0")
        try:
            size = place.size_bytes
        except ValueError as error:
            raise CheckpointError(f"{head.file}: tensor {place.name} {error}; {AGAIN}") from None
        if place.offset < end:
            within = f"tensor {before}" if before else "the head"
            raise CheckpointError(f"{head.file}: {place.name} begins within {within}; {AGAIN}")
        end, before = place.offset + size, place.name
        if end > head.identity.size:
            raise CheckpointError(f"{head.file} ends within tensor {place.name}; {AGAIN}")


def _refuse_part(head: FileHead, number: int, count: int) -> None:
    """`CheckpointError` for a part whose metadata contradicts its name."""
    said = tuple(head.facts.get(f"split.{key}", usual) for key, usual in (("no", 0), ("count", 1)))
    if not all(isinstance(value, int) for value in said):
        raise CheckpointError(f"{head.file}: split.no or split.count is no whole number; {AGAIN}")
    place, parts = said[0], said[1] or 1
    if (place, parts) != (number, count):
        raise CheckpointError(
            f"{head.file} states that it is part {place + 1} of {parts}, but its name is that of "
            f"part {number + 1} of {count}; restore its original name"
        )


def _refuse_kind(head: FileHead) -> None:
    """Return a `CheckpointError` for a file that is not a complete model."""
    kind = head.facts.get("general.type", "model")
    architecture = head.facts.get("general.architecture")
    if not isinstance(kind, str):
        raise CheckpointError(f"{head.file}: general.type is no text; {AGAIN}")
    if not isinstance(architecture, str) or not architecture:
        raise CheckpointError(f"{head.file} does not name its architecture; {AGAIN}")
    if kind == "adapter":
        raise CheckpointError(f"{head.file} holds a LoRA adapter; merge it into its model")
    if kind == "mmproj" or architecture == "clip":
        raise CheckpointError(f"{head.file} is an encoder of images; name the model next to it")
    if kind != "model":
        raise CheckpointError(f"{head.file} is not a model, but a {kind[:50]}; name a model's file")
