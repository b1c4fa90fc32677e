"""Tensors that a checkpoint holds under other names or in pieces, such as the matrices of single
experts. Each is read by itself, so that only one layer is in memory as stored."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from dovetail.workers.models.checkpoints.files import damaged
from dovetail.workers.models.checkpoints.gguf.kinds import MXFP4
from dovetail.workers.models.checkpoints.gguf.rows import Content, Rows
from dovetail.workers.models.checkpoints.gguf.tensors import contents_of
from dovetail.workers.models.checkpoints.namings import BLOCKS, EXPONENTS, Naming
from dovetail.workers.models.checkpoints.quantised.codes import as_in_gguf, packed_shapes, unpack
from dovetail.workers.models.checkpoints.stored import CODE_TYPES, FLOAT_TYPES, Stored

STACK = re.compile(r"^(.+\.experts)\.(gate_up|up|down)_proj$")
"""The matrices of all experts of a layer, as transformers names them: [experts, out, in]."""
EACH = re.compile(r"\.experts\.\d+\.")  # the part of a name with the number of a piece's expert
UNREAD = "unread_experts"  # attribute of experts: an `UnreadStack` for each stack that is not read


def others(missing: Sequence[str]) -> str:
    """Return how many names follow the first one, in words."""
    return f" and {len(missing) - 1} others" if len(missing) > 1 else ""


@dataclass(frozen=True)
class UnreadStack:
    """The matrices of all experts of a layer, each read on demand."""

    numbers: Callable[[int], Tensor]  # reads the matrix of an expert as transformers has it
    size_bytes: int  # the bytes that are read for one of them
    rows: Callable[[int], Sequence[Content]] | None = None
    """Reads the rows [out] of an expert's matrix in parts, gates first, blocks as stored; None: no
    blocks."""


@dataclass(frozen=True)
class Pieces:
    """The tensors of a model, made of tensors of a checkpoint."""

    naming: Naming
    tensors: Mapping[str, Stored]
    shapes: Mapping[str, Sequence[int]]  # the shapes of the model's tensors

    def of(self, name: str) -> Sequence[str]:
        """Return the names of the pieces of a tensor of the model, in order."""
        if name in self.tensors:
            return [name]
        renamed = name
        for part, instead in self.naming.renamed.items():
            renamed = renamed.replace(part, instead)
        pieces, plain = self._of(name, renamed), self._of(name, name)
        return plain if pieces[0] not in self.tensors and plain[0] in self.tensors else pieces

    def _of(self, name: str, stored: str) -> Sequence[str]:
        """Return the pieces of a tensor of the model that the checkpoint calls `stored`."""
        found = STACK.match(stored)
        if stored in self.tensors:
            return [stored]
        for end, ends in self.naming.joined.items():
            if stored.endswith(end):
                return [stored.removesuffix(end) + part for part in ends]
        if found is None:
            return [stored]
        if f"{stored}{BLOCKS}" in self.tensors:
            return [f"{stored}{BLOCKS}", f"{stored}{EXPONENTS}"]
        parts = self.naming.down if found[2] == "down" else self.naming.gate_up
        experts = range(self.shapes[name][0])
        return [f"{found[1]}.{expert}.{part}.weight" for expert in experts for part in parts]

    def read(self, name: str) -> Tensor:
        """Return a tensor of the model in its pieces' type, or fp32 where they differ."""
        pieces, shape = self.of(name), self.shapes[name]
        if not self._apart(name) and len(pieces) == 1:
            return self.tensors[pieces[0]].read(pieces[0])
        if pieces[0].endswith(BLOCKS):
            return self._unpack(pieces)
        kinds = {self.tensors[piece].kind for piece in pieces}
        whole = torch.empty(shape, dtype=FLOAT_TYPES[kinds.pop()] if len(kinds) == 1 else None)
        rows, first = whole.view(-1, shape[-1]), 0
        for piece in pieces:
            part = self.tensors[piece].read(piece)
            rows[first : first + len(part)] = part.view(-1, shape[-1])
            first += len(part)
        return whole

    def unread(self, name: str) -> UnreadStack:
        """Return the experts of a tensor of the model, to be read one by one."""
        size = sum(self.tensors[piece].size_bytes for piece in self.of(name))
        return UnreadStack(
            lambda index: self.read_one(name, index),
            size // self.shapes[name][0],
            lambda index: self.contents_of_one(name, index),
        )

    def contents_of_one(self, name: str, index: int) -> Sequence[Content]:
        """Return the rows [out] of the matrix of one expert, as `Unread.rows` does."""
        pieces = self.of(name)
        if pieces[0].endswith(BLOCKS):
            return self._blocks(name, index)
        if not self._apart(name):
            return contents_of(self.tensors[pieces[0]].one(index), pieces[0])
        return [
            part
            for piece in self._of_one(name, index)
            for part in contents_of(self.tensors[piece], piece)
        ]

    def read_one(self, name: str, index: int) -> Tensor:
        """Return an expert's tensor, in the type of its own pieces."""
        pieces = self.of(name)
        if pieces[0].endswith(BLOCKS):
            return self._unpack(pieces, index)
        if not self._apart(name):
            return self.tensors[pieces[0]].read_one(pieces[0], index)
        parts = [self.tensors[piece].read(piece) for piece in self._of_one(name, index)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _apart(self, name: str) -> bool:
        """Return whether each expert of a tensor of the model has its own pieces."""
        return len(self.shapes[name]) == 3 and EACH.search(self.of(name)[0]) is not None

    def _of_one(self, name: str, index: int) -> Sequence[str]:
        pieces = self.of(name)
        each = len(pieces) // self.shapes[name][0]
        return pieces[index * each : (index + 1) * each]

    def _blocks(self, name: str, index: int) -> Sequence[Content]:
        pieces = self.of(name)
        with self._numbers_in(pieces):
            rows = as_in_gguf(*(self.tensors[piece].read_one(piece, index) for piece in pieces))
        woven = "gate_up" in name
        parts = [rows[::2], rows[1::2]] if woven else [rows]
        return [Rows(MXFP4, part.contiguous()) for part in parts]

    def _unpack(self, pieces: Sequence[str], index: int | None = None) -> Tensor:
        """Return [experts, in, out] of blocks along `in`, or [in, out] of one expert."""
        with self._numbers_in(pieces):
            if index is None:
                return unpack(*(self.tensors[name].read(name) for name in pieces)).transpose(1, 2)
            parts = (self.tensors[name].read_one(name, index)[None] for name in pieces)
            return unpack(*parts)[0].t()

    @contextmanager
    def _numbers_in(self, pieces: Sequence[str]) -> Iterator[None]:
        """Name the piece with an invalid exponent."""
        try:
            yield
        except ValueError as error:
            file = self.tensors[pieces[1]].file
            raise damaged(f"{file}: {error} in tensor {pieces[1]}") from None

    def refuse_misshapen(
        self, folder: Path, own_names: Callable[[Sequence[str]], Sequence[str]]
    ) -> None:
        """`CheckpointError` naming a piece that is missing (by `own_names`), misshapen, or of a
        wrong type."""
        missing = [piece for name in self.shapes for piece in self._missing(name)]
        if missing:
            named = own_names(missing)
            text = f"lacks tensor {named[0]}{others(named)}, which its config.json calls for"
            raise damaged(f"{folder} {text}")
        for name in self.shapes:
            for piece, shape in self._shaped(name):
                self._refuse_piece(piece, shape, folder)

    def superfluous(self) -> list[str]:
        """Return the tensors of the checkpoint that are not pieces of the model."""
        used = {piece for name in self.shapes for piece in self.of(name)}
        return [name for name in self.tensors if name not in used]

    def _missing(self, name: str) -> Iterator[str]:
        return (piece for piece in self.of(name) if piece not in self.tensors)

    def _shaped(self, name: str) -> Iterator[tuple[str, Sequence[int]]]:
        pieces, shape = self.of(name), tuple(self.shapes[name])
        if pieces[0].endswith(BLOCKS):
            experts, inputs, outputs = shape
            return zip(pieces, packed_shapes((experts, outputs, inputs)), strict=True)
        if len(pieces) > 1 and not self._apart(name):  # the last one has the rows that are left
            firsts = [prod(self.tensors[piece].shape[:1]) for piece in pieces[:-1]]
            counts = (*firsts, shape[0] - sum(firsts))
            return ((piece, (n, *shape[1:])) for piece, n in zip(pieces, counts, strict=True))
        if self._apart(name):
            shape = (shape[0] * shape[1] // len(pieces), shape[2])
        return ((piece, shape) for piece in pieces)

    def _refuse_piece(self, piece: str, shape: Sequence[int], folder: Path) -> None:
        coded, stored = piece.endswith((BLOCKS, EXPONENTS)), self.tensors[piece]
        stored.refuse_shape(piece, shape, folder)
        stored.refuse_kind(piece, CODE_TYPES if coded else FLOAT_TYPES)


def leave_unread(part: nn.Module, name: str, experts: UnreadStack, *, blocks: bool) -> None:
    """Let a stack's experts be read one by one when needed, as `blocks` or numbers."""
    own = replace(experts, numbers=lambda index: within_fp32(experts.numbers(index)))
    own = own if blocks else replace(own, rows=None)
    part.__dict__.setdefault(UNREAD, {})[name] = own


def within_fp32(tensor: Tensor) -> Tensor:
    """Return floats in their type, but fp64 as fp32."""
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def unread_of(part: nn.Module, name: str) -> UnreadStack | None:
    """Return a stack of experts' matrices that has not been read yet; None if it has been."""
    found: UnreadStack | None = getattr(part, UNREAD, {}).get(name)
    return found
