"""Embeddings that stay as their checkpoint has them and are widened as they are looked up: in 16
bits or in blocks they take that much less memory, and give the same numbers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from dovetail.workers.kernels.blocks import unpack
from dovetail.workers.models.checkpoints.gguf.rows import Rows


class WidenedEmbedding(nn.Module):
    """ids [...] -> float32 [..., hidden], times `scale` if there is one (Gemma's, which multiplies
    the widened rows)."""

    def __init__(self, weight: Tensor, scale: float | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        rows = embedding(ids, self.weight).float()
        return rows if self.scale is None else rows * self.scale


class BlockEmbedding(nn.Module):
    """ids [...] -> float32 [..., hidden], times `scale` if there is one; the blocks of a row are
    unpacked as it is looked up."""

    def __init__(self, rows: Rows, scale: float | None) -> None:
        super().__init__()
        self._kind, self._inputs, self.scale = rows.kind, rows.inputs, scale
        self.weight = nn.Parameter(rows.content, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        found = torch.empty(ids.numel(), self._inputs)
        unpack(self._kind, self.weight[ids.flatten()], found)
        found = found.view(*ids.shape, -1)
        return found if self.scale is None else found * self.scale


def scale_of(module: Any) -> float | None:
    """Return the factor of what an embedding gives; None: there is none."""
    scale = getattr(module, "embed_scale", getattr(module, "scale", None))
    return None if scale is None else float(scale)


def is_table(module: Any) -> bool:
    """Return whether a module is a table of rows, and at most a factor."""
    plain = type(module) in (nn.Embedding, WidenedEmbedding)
    return plain or (isinstance(module, nn.Embedding) and scale_of(module) is not None)
