"""The tensors of GGUF files as a checkpoint's: read singly, unpacked, and rearranged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dovetail.workers.kernels.exact import log
from dovetail.workers.models.checkpoints.digests import DigestSource, FilePart
from dovetail.workers.models.checkpoints.files import unreadable
from dovetail.workers.models.checkpoints.gguf.files import FileHead, Model
from dovetail.workers.models.checkpoints.gguf.kinds import KINDS
from dovetail.workers.models.checkpoints.gguf.placing import (
    BEHIND,
    BELOW,
    DECAYS,
    HALVES,
    LESS_INDEX,
    LESS_ONE,
    NOTHING,
    NUMBERS,
    TRANSPOSE,
    TURN,
    VALUE_INPUTS,
    VALUES,
    ZEROS,
    Placed,
    one_of,
    placed_in,
)
from dovetail.workers.models.checkpoints.gguf.rows import (
    UNPACK,
    Content,
    InFile,
    Pile,
    Rows,
    unpacked,
)
from dovetail.workers.models.checkpoints.stored import Stored

AT_A_TIME = 1 << 20  # numbers that are checked for NaN and infinity at a time


@dataclass(frozen=True)
class Blocks(Stored):
    """A tensor of a GGUF file, of blocks or of plain numbers."""

    placed: Placed

    def one(self, index: int) -> "Blocks":
        """Return the place of one expert's tensor."""
        found = _stored(one_of(self.placed, index))
        assert isinstance(found, Blocks)
        return found

    def read(self, name: str, *, checked: bool = False) -> Tensor:
        """Return the tensor as transformers has it; `CheckpointError` for NaN and infinity."""
        place = self.placed.place
        found = unpacked(self.content(name), place.kind, place.shape)
        if (checked or place.kind in UNPACK) and not _finite(found):
            raise self.not_finite(name)
        return _changed(found, self.placed)

    def rows(self, name: str) -> Rows | None:
        """Return a matrix [out, in] as blocks of its file with rows in place, to be read later;
        None if it has no blocks or needs other changes."""
        place, change = self.placed.place, self.placed.change
        if place.kind not in UNPACK or len(place.shape) != 2:
            return None
        count, blocks = place.shape[0], None
        if change == VALUE_INPUTS and self.placed.whole_heads:
            blocks = _values(torch.arange(place.shape[1] // KINDS[place.kind].numbers), self.placed)
        elif change not in (NOTHING, HALVES, TRANSPOSE, VALUES) or self.placed.single is not None:
            return None
        order = _moved(torch.arange(count), self.placed) if change in (HALVES, VALUES) else None
        shape = (count, place.size_bytes // count)
        return Rows(place.kind, InFile(self, name, place.kind, shape, order, blocks))


@dataclass(frozen=True)
class Woven(Stored):
    """Gates and ups of a layer's experts, interleaved in transformers, or stacked."""

    gate: Blocks
    up: Blocks
    by_turns: bool

    def read_one(self, name: str, index: int) -> Tensor:
        gate, up = (part.one(index).read(name) for part in (self.gate, self.up))
        return self._weave(gate[None], up[None])[0]

    def one(self, index: int) -> "Woven":
        """Return the places of one expert's tensor, of which only the content is read."""
        return replace(self, gate=self.gate.one(index), up=self.up.one(index))

    def read(self, name: str, *, checked: bool = False) -> Tensor:
        """Return [experts, in, 2 out], or biases [experts, 2 out]."""
        gate, up = (part.read(name, checked=checked) for part in (self.gate, self.up))
        return self._weave(gate, up)

    def _weave(self, gate: Tensor, up: Tensor) -> Tensor:
        wider = torch.promote_types(gate.dtype, up.dtype)
        gate, up = gate.to(wider), up.to(wider)
        both = torch.stack([gate, up], dim=2 if self.by_turns else 1).flatten(1, 2)
        return both.transpose(1, 2) if both.ndim == 3 else both


@dataclass(frozen=True)
class Piled(Stored):
    """A matrix whose rows are in two tensors."""

    upper: Blocks
    lower: Blocks
    order: Tensor  # int64 [rows]: the index of each row in both, concatenated

    def read(self, name: str, *, checked: bool = False) -> Tensor:
        """Return [out, in]."""
        parts = [part.read(name, checked=checked) for part in (self.upper, self.lower)]
        return torch.cat(parts)[self.order]

    def rows(self, name: str) -> Pile | None:
        """Return the rows as in the file; None if neither half consists of blocks."""
        parts = [part.rows(name) for part in (self.upper, self.lower)]
        if parts == [None, None]:
            return None
        halves = zip((self.upper, self.lower), parts, strict=True)
        return Pile(
            [part.read(name) if rows is None else rows for part, rows in halves], self.order
        )


@dataclass(frozen=True)
class Latents(Stored):
    """Matrices that make keys and values of latents, stored as separate tensors."""

    keys: Blocks  # [heads, rank, plain]
    values: Blocks  # [heads, width, rank]

    def read(self, name: str, *, checked: bool = False) -> Tensor:
        """Return [heads (plain + width), rank]."""
        keys, values = (part.read(name, checked=checked) for part in (self.keys, self.values))
        return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


def contents_of(stored: Stored, name: str) -> Sequence[Content]:
    """Return a matrix's rows [out] in parts, blocks as in their file; `name`: in errors."""
    if isinstance(stored, Woven):
        return [*contents_of(stored.gate, name), *contents_of(stored.up, name)]
    if isinstance(stored, Blocks):
        if (rows := stored.rows(name)) is not None:
            return [rows]
        found = stored.read(name)
        return [found.t() if stored.placed.change == TRANSPOSE else found]
    return [stored.read(name)]


def name_in_file(stored: Stored) -> str | None:
    """Return a tensor's (first) name in its GGUF file; None for safetensors."""
    for first in ("gate", "keys", "upper"):
        stored = getattr(stored, first, stored)
    return stored.placed.place.name if isinstance(stored, Blocks) else None


def stored_in(model: Model) -> dict[str, Stored]:
    """Return a model's tensors by transformers' names; `CheckpointError` for an unknown one."""
    return {name: _stored(placed) for name, placed in placed_in(model).items()}


def source_of(head: FileHead) -> DigestSource:
    """Return a file's parts for its digest: head, tensors in order, and gaps."""
    try:
        with head.file.open("rb") as file:
            content = file.read(head.size_bytes)
    except OSError as error:
        raise unreadable(head.file, error) from None
    parts, end = list[FilePart](), len(content)
    for place in sorted(head.tensors, key=lambda place: place.offset):
        parts += _gap(end, place.offset)
        parts.append(FilePart(place.name, KINDS[place.kind].name, place.size_bytes))
        end = place.offset + place.size_bytes
    return DigestSource(head.file, head.identity, content, [*parts, *_gap(end, head.identity.size)])


def _gap(begin: int, end: int) -> list[FilePart]:
    return [FilePart("", "", end - begin)] if end > begin else []


def _stored(placed: Placed) -> Stored:
    where, place, size = placed.head, placed.place, placed.place.size_bytes
    if placed.up is None:
        plain = (where.file, placed.kind, placed.shape, place.offset, size, where.identity)
        return Blocks(*plain, placed)
    one, other = _stored(Placed(where, place)), _stored(placed.up)
    assert isinstance(one, Blocks)
    assert isinstance(other, Blocks)
    both = size + other.size_bytes
    plain = (where.file, placed.kind, placed.shape, place.offset, both, where.identity)
    if placed.change == NUMBERS:
        return Latents(*plain, one, other)
    if placed.change == BELOW:
        return Piled(*plain, one, other, _order(placed))
    return Woven(*plain, one, other, by_turns=placed.change != BEHIND)


def _order(placed: Placed) -> Tensor:
    """Return the order of stacked rows, or by key head: its queries, keys, values and gates."""
    rows, upper, keys = torch.arange(placed.shape[0]), placed.place.shape[0], placed.first // 2
    if not placed.heads:
        return rows
    parts = rows[:keys], rows[keys : 2 * keys], rows[2 * keys : upper], rows[upper:]
    return torch.cat([part.view(placed.heads, -1) for part in parts], dim=1).flatten()


def _changed(found: Tensor, placed: Placed) -> Tensor:
    moved = _moved(found, placed)
    moved = moved.flatten() if placed.flat else moved
    return moved if placed.single is None else moved.unsqueeze(placed.single)


def _moved(found: Tensor, placed: Placed) -> Tensor:
    if placed.change == ZEROS:
        return torch.zeros_like(found)
    if placed.change == LESS_INDEX:
        return found - torch.arange(len(found))
    if placed.change == LESS_ONE:
        return found.float() - 1
    if placed.change == TRANSPOSE:
        return found.t()
    if placed.change == TURN:
        return found.transpose(1, 2)
    if placed.change == HALVES:
        return _halves(found, placed.heads)
    if placed.change == VALUES:
        return _values(found, placed)
    if placed.change == VALUE_INPUTS:
        return _values(found.t(), placed).t()
    return log(-_values(found.float(), placed)) if placed.change == DECAYS else found


def _values(found: Tensor, placed: Placed) -> Tensor:
    """Move rows of value heads, stored one for each key head at a time, beside their key head's."""
    if not placed.heads:
        return found
    others, own = found[: placed.first], found[placed.first :]
    tiles = own.reshape(placed.values, placed.heads, -1, *own.shape[1:])
    return torch.cat([others, tiles.transpose(0, 1).reshape(own.shape)])


def _halves(found: Tensor, heads: int) -> Tensor:
    halves = found.view(heads, -1, 2, *found.shape[1:]).transpose(1, 2)
    return halves.reshape(found.shape)


def _finite(found: Tensor) -> bool:
    """Return whether no number is NaN or infinite, without another copy of them."""
    flat = found.view(-1)
    return all(
        bool(torch.isfinite(flat[first : first + AT_A_TIME]).all())
        for first in range(0, len(flat), AT_A_TIME)
    )
