"""How a head joins the embedding of a token with the feature of the position before it. Knows
single rows; no attention and no cache."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from dovetail.workers.heads.arithmetic import Product

Fusion = Callable[[Tensor, Tensor], Tensor]
"""Embedded tokens [T, H] and features [T, H] -> what enters the first layer [T, H]."""


def concatenated(fc: Product) -> Fusion:
    """EAGLE's: one matrix over both side by side, the embedding first."""
    return lambda embedded, features: fc(torch.cat([embedded, features], dim=-1))


def gated(
    *, norm: Product | None, feature: Product, embedding: Product, gate: Product, activated: bool
) -> Fusion:
    """Dovetail's dynamic gating fusion: z h1 + (1 - z) h2 of the feature's h1 and the embedding's
    h2, z = sigmoid of a matrix over both.

    `norm` and `activated` (SiLU on h2) are not in the paper (section 3.2), but its weights are made
    for them.
    """

    def fuse(embedded: Tensor, features: Tensor) -> Tensor:
        first, second = feature(features), embedding(embedded if norm is None else norm(embedded))
        if activated:
            second = silu(second)
        return torch.lerp(second, first, torch.sigmoid(gate(torch.cat([first, second], dim=-1))))

    return fuse


def tapped(fc: Product | None, norms: Sequence[Product]) -> Product:
    """EAGLE-3's, of the target's streams alone: one matrix over all taps side by side, each normed
    first where it has a norm."""

    def fuse(features: Tensor) -> Tensor:
        if norms:
            taps = features.chunk(len(norms), dim=-1)
            features = torch.cat(
                [norm(tap.contiguous()) for norm, tap in zip(norms, taps, strict=True)], dim=-1
            )
        return features if fc is None else fc(features)

    return fuse
