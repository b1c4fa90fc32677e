"""Embeddings that stay in the 16 bits of their checkpoint and are widened as they are looked up:
half the memory, the same numbers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding


class WidenedEmbedding(nn.Module):
    """ids [...] -> float32 [..., hidden], times `scale` if there is one (Gemma's, which multiplies
    the widened rows)."""

    def __init__(self, weight: Tensor, scale: float | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        rows = embedding(ids, self.weight).float()
        return rows if self._scale is None else rows * self._scale


def widen_embeddings(model: Any) -> None:
    """Replace the embeddings of a model, in place, so that all of them give float32; one of an
    unknown kind is widened as a whole."""
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Embedding) or module.weight.dtype == torch.float32:
            continue
        scale = getattr(module, "embed_scale", None)
        if type(module) is nn.Embedding or scale is not None:
            model.set_submodule(
                name, WidenedEmbedding(module.weight, None if scale is None else float(scale))
            )
        else:
            module.float()
