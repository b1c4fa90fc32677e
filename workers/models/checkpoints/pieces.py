"""Tensors that a checkpoint holds under another name than transformers' model has, or in pieces:
the experts of a layer, each of which has its own matrices in most files. A model's tensor is read
from its pieces alone, so that no more than one layer is there as it was stored. Knows names and
shapes; not what is computed with them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.gguf.kinds import MXFP4
from dovetail.workers.models.checkpoints.gguf.rows import Content, Rows
from dovetail.workers.models.checkpoints.gguf.tensors import contents_of
from dovetail.workers.models.checkpoints.namings import BLOCKS, EXPONENTS, Naming
from dovetail.workers.models.checkpoints.quantised.mxfp4 import as_in_gguf, packed_shapes, unpack
from dovetail.workers.models.checkpoints.stored import CODE_TYPES, FLOAT_TYPES, Stored

STACK = re.compile(r"^(.+\.experts)\.(gate_up|up|down)_proj$")
"""The matrices of all experts of a layer, as transformers names them: [experts, out, in]."""
EACH = re.compile(r"\.experts\.\d+\.")
"""The part of a name that says of which expert a piece is."""
UNREAD = "unread_experts"
"""The attribute of transformers' experts that has an `Unread` for each stack that has not been
read."""


def others(missing: Sequence[str]) -> str:
    """Return how many names follow the first one, in words."""
    return f" and {len(missing) - 1} others" if len(missing) > 1 else ""


@dataclass(frozen=True)
class Unread:
    """The matrices of all experts of a layer, each of which is read when it is asked for."""

    numbers: Callable[[int], Tensor]
    """Reads the matrix of an expert as transformers has it."""
    size_bytes: int
    """The bytes that are read for one of them."""
    rows: Callable[[int], Sequence[Content]] | None = None
    """Reads the rows [out] of the matrix of an expert, those of gates first, in parts one below the
    other of which those of blocks are as their file has them; None: nothing is computed from
    blocks."""


@dataclass(frozen=True)
class Pieces:
    """The tensors of a model, by those of a checkpoint that they are made of."""

    naming: Naming
    tensors: Mapping[str, Stored]
    shapes: Mapping[str, Sequence[int]]
    """The shapes of the model's tensors."""

    def of(self, name: str) -> Sequence[str]:
        """Return the names of the pieces of a tensor of the model, one below the other."""
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
        if stored in self.tensors or found is None:
            return [stored]
        if f"{stored}{BLOCKS}" in self.tensors:
            return [f"{stored}{BLOCKS}", f"{stored}{EXPONENTS}"]
        parts = self.naming.down if found[2] == "down" else self.naming.gate_up
        experts = range(self.shapes[name][0])
        return [f"{found[1]}.{expert}.{part}.weight" for expert in experts for part in parts]

    def read(self, name: str) -> Tensor:
        """Return a tensor of the model in the type that all its pieces are stored in, or in fp32
        where they differ."""
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
            rows[first : first + len(part)] = part
            first += len(part)
        return whole

    def unread(self, name: str) -> Unread:
        """Return the experts of a tensor of the model, to be read one by one."""
        size = sum(self.tensors[piece].size_bytes for piece in self.of(name))
        return Unread(
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
        """Return the tensor of one expert, at an index of the first dimension of a tensor of the
        model; in the type as `read`, but that pieces of other experts are not looked at."""
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
        """The pieces of one expert, where each has its own."""
        pieces = self.of(name)
        each = len(pieces) // self.shapes[name][0]
        return pieces[index * each : (index + 1) * each]

    def _blocks(self, name: str, index: int) -> Sequence[Content]:
        """The rows of the matrix of one expert in MXFP4; those of gates and ups stand by turns."""
        pieces = self.of(name)
        with self._numbers_in(pieces):
            rows = as_in_gguf(*(self.tensors[piece].read_one(piece, index) for piece in pieces))
        woven = "gate_up" in name
        parts = [rows[::2], rows[1::2]] if woven else [rows]
        return [Rows(MXFP4, part.contiguous()) for part in parts]

    def _unpack(self, pieces: Sequence[str], index: int | None = None) -> Tensor:
        """Return [experts, in, out], as transformers holds it, of blocks along `in`, or [in, out]
        of the expert of an index."""
        with self._numbers_in(pieces):
            if index is None:
                return unpack(*(self.tensors[name].read(name) for name in pieces)).transpose(1, 2)
            parts = (self.tensors[name].read_one(name, index)[None] for name in pieces)
            return unpack(*parts)[0].t()

    @contextmanager
    def _numbers_in(self, pieces: Sequence[str]) -> Iterator[None]:
        """Name the piece of which an exponent is no number."""
        try:
            yield
        except ValueError as error:
            raise CheckpointError(
                f"{self.tensors[pieces[1]].file}: {error} in tensor {pieces[1]}; fetch the model "
                "again"
            ) from None

    def refuse_misshapen(
        self, folder: Path, own_names: Callable[[Sequence[str]], Sequence[str]]
    ) -> None:
        """`CheckpointError` naming a piece that is missing (as `own_names` has it), that has
        another shape than the model calls for, or other numbers than fractions."""
        missing = [piece for name in self.shapes for piece in self._missing(name)]
        if missing:
            named = own_names(missing)
            raise CheckpointError(
                f"{folder} lacks tensor {named[0]}{others(named)}, which its config.json calls "
                "for; fetch the model again"
            )
        for name in self.shapes:
            for piece, shape in self._shaped(name):
                self._refuse_piece(piece, shape, folder)

    def superfluous(self) -> list[str]:
        """Return what the checkpoint has beside the pieces of the model."""
        used = {piece for name in self.shapes for piece in self.of(name)}
        return [name for name in self.tensors if name not in used]

    def _missing(self, name: str) -> Iterator[str]:
        return (piece for piece in self.of(name) if piece not in self.tensors)

    def _shaped(self, name: str) -> Iterator[tuple[str, Sequence[int]]]:
        """The pieces of a tensor, and the shape that each has to have."""
        pieces, shape = self.of(name), tuple(self.shapes[name])
        if pieces[0].endswith(BLOCKS):
            experts, inputs, outputs = shape
            return zip(pieces, packed_shapes((experts, outputs, inputs)), strict=True)
        if self._apart(name):
            shape = (shape[0] * shape[1] // len(pieces), shape[2])
        return ((piece, shape) for piece in pieces)

    def _refuse_piece(self, piece: str, shape: Sequence[int], folder: Path) -> None:
        stored = self.tensors[piece]
        if stored.shape != tuple(shape):
            raise CheckpointError(
                f"{folder}: tensor {piece} has the shape {list(stored.shape)}, where config.json "
                f"calls for {list(shape)}; fetch the model again"
            )
        coded = piece.endswith((BLOCKS, EXPONENTS))
        if stored.kind not in (CODE_TYPES if coded else FLOAT_TYPES):
            raise CheckpointError(
                f"{stored.file}: tensor {piece} has numbers of type {stored.kind}; take weights "
                f"of type {', '.join(CODE_TYPES if coded else FLOAT_TYPES)}"
            )


def leave_unread(part: nn.Module, name: str, experts: Unread, *, blocks: bool) -> None:
    """Have a stack of experts' matrices read one by one, each when it is asked for, as `blocks` or
    as numbers."""
    own = replace(experts, numbers=lambda index: within_fp32(experts.numbers(index)))
    own = own if blocks else replace(own, rows=None)
    part.__dict__.setdefault(UNREAD, {})[name] = own


def within_fp32(tensor: Tensor) -> Tensor:
    """Return a tensor of floats in the type it is stored in, but fp32 for fp64, which nothing is
    computed in."""
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def unread_of(part: nn.Module, name: str) -> Unread | None:
    """Return a stack of experts' matrices that has not been read; None where it has."""
    found: Unread | None = getattr(part, UNREAD, {}).get(name)
    return found
