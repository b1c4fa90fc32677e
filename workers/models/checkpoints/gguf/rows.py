"""Rows of a matrix or a table as a GGUF file has them: blocks that are not unpacked. Of a module
they stand in the place of its weight, which stays without numbers, until they are packed."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.workers.models.checkpoints.gguf.formats import unpacked
from dovetail.workers.models.checkpoints.gguf.kinds import KINDS

ROWS = "rows_of_file"
"""The attribute of a linear that has its rows."""


@dataclass(frozen=True)
class Rows:
    """Rows of one type of blocks."""

    kind: int
    """ggml's number of the type."""
    content: Tensor
    """uint8 [rows, bytes]."""

    def __deepcopy__(self, memo: Any) -> "Rows":
        return self  # nobody changes them, and a copy of a layer is to take no memory for them

    @property
    def inputs(self) -> int:
        """Return the numbers of a row."""
        said = KINDS[self.kind]
        return self.content.shape[1] // said.size_bytes * said.numbers

    def taken(self, places: Tensor) -> "Rows":
        """Return the rows of these places."""
        return replace(self, content=self.content[places])

    def numbers(self) -> Tensor:
        """Return what all of them stand for, [rows, inputs] in fp32."""
        content = bytearray(self.content.numpy().tobytes())
        return unpacked(content, self.kind, (len(self.content), self.inputs)).float()


Content = Rows | Tensor
"""Rows of a matrix: blocks as a file has them, or plain numbers [rows, inputs]."""


def keep_rows(part: nn.Module, rows: Rows | None) -> None:
    """Have a linear compute with these rows, once they are packed; None: it has no more."""
    part.__dict__[ROWS] = rows


def rows_of(part: nn.Module) -> Rows | None:
    """Return the rows of a linear whose weight is blocks; None for any other."""
    found: Rows | None = getattr(part, ROWS, None)
    return found


def weight_of(part: nn.Linear, places: Tensor) -> Tensor:
    """Return rows [places, in] of the weight of a linear in fp32."""
    rows = rows_of(part)
    return part.weight.detach()[places].float() if rows is None else rows.taken(places).numbers()


def take_places(part: nn.Linear, places: Tensor, into: nn.Linear) -> None:
    """Give a linear, which may be the same, the outputs of another at these places."""
    rows = rows_of(part)
    if rows is None:
        into.weight = nn.Parameter(part.weight.detach()[places], requires_grad=False)
    else:
        keep_rows(into, rows.taken(places))
    if part.bias is not None:
        into.bias = nn.Parameter(part.bias.detach()[places], requires_grad=False)


def drop_weight(part: nn.Linear) -> None:
    """Take the weight of a linear away."""
    part.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    keep_rows(part, None)
