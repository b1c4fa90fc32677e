"""Embeddings in their checkpoint's type, or in the packed head, converted to float32 at look-up."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from dovetail.workers.kernels import PackedMatrix
from dovetail.workers.kernels.blocks import unpack
from dovetail.workers.models.checkpoints.gguf.rows import Rows


class WidenedEmbedding(nn.Module):
    """ids [...] -> float32 [..., hidden], times `scale` after widening (Gemma's), if any."""

    def __init__(self, weight: Tensor, scale: float | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        rows = embedding(ids, self.weight).float()
        return rows if self.scale is None else rows * self.scale


class BlockEmbedding(nn.Module):
    """ids [...] -> float32 [..., hidden], times `scale`; rows of blocks, in the file until
    `hold`."""

    def __init__(self, rows: Rows, scale: float | None) -> None:
        super().__init__()
        self.rows, self.scale = rows, scale
        self.weight = _shape_alone(rows.count, rows.inputs)

    def hold(self) -> None:
        """Read all rows into memory."""
        self.rows = replace(self.rows, source=self.rows.content)

    def forward(self, ids: Tensor) -> Tensor:
        found = torch.empty(ids.numel(), self.rows.inputs)
        unpack(self.rows.kind, self.rows.taken(ids.flatten()).content, found)
        found = found.view(*ids.shape, -1)
        return found if self.scale is None else found * self.scale


class PackedEmbedding(nn.Module):
    """ids [...] -> float32 [..., hidden], times `scale`; rows of the packed head."""

    def __init__(self, matrix: PackedMatrix, scale: float | None) -> None:
        super().__init__()
        self._matrix, self.scale = matrix, scale
        self.weight = _shape_alone(matrix.n, matrix.k)

    def forward(self, ids: Tensor) -> Tensor:
        found = torch.empty(ids.numel(), self._matrix.k)
        self._matrix.unpack(ids.flatten().tolist(), found)
        found = found.view(*ids.shape, -1)
        return found if self.scale is None else found * self.scale


def _shape_alone(count: int, width: int) -> nn.Parameter:
    """Return a placeholder weight [count, width] on the CPU that takes no memory."""
    return nn.Parameter(torch.zeros(1).expand(count, width), requires_grad=False)


def scale_of(module: Any) -> float | None:
    """Return the factor of the embedding's output; None if there is none."""
    scale = getattr(module, "embed_scale", getattr(module, "scale", None))
    return None if scale is None else float(scale)


def is_table(module: Any) -> bool:
    """Return whether a module is a table of rows with at most a factor."""
    plain = type(module) in (nn.Embedding, WidenedEmbedding)
    return plain or (isinstance(module, nn.Embedding) and scale_of(module) is not None)
