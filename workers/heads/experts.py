"""Jakiro's mixture of experts in the place of a layer's MLP: two experts for each row, weighted by
a router.

Jakiro (no star) also subtracts them (the contrast), which predicts one token further; Jakiro* lets
each of the two predict for itself, and what is drafted follows the exact mixture of their
distributions. With more than two experts the router's two first choices count, as in Mixtral, and
everything else is what it is with two. All experts lie side by side as one wide MLP whose middle is
weighted expert by expert, so that any number of them costs two matrices.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu

from dovetail.workers.heads.arithmetic import Product


@dataclass(frozen=True)
class Choice:
    """What the gate says of each row."""

    shares: Tensor
    """[R, E]: of the experts in the mixture; 0 for all but two."""
    contrast: Tensor | None
    """[R, E]: the same with one of the two negative, the weaker one by the gate's last two rows."""
    first: Tensor
    """int64 [R, 1]: the expert with the larger share."""
    second: Tensor


def choose(gate: Tensor, experts: int, *, contrast: bool) -> Choice:
    """gate [R, E], or with contrast [R, E + 2], as it comes from its matrix.

    The two contrast rows belong to experts 0 and 1 where there are no more, else to the router's
    first and second choice.
    """
    router = gate[:, :experts].float()
    order = router.argsort(dim=-1, descending=True, stable=True)[:, :2]
    shares = torch.zeros_like(router).scatter(1, order, router.gather(1, order).softmax(dim=-1))
    signed = None
    if contrast:
        weights = gate[:, experts:].float().softmax(dim=-1)
        signs = (weights >= weights.flip(-1)) * 2.0 - 1.0
        signs[:, 1] = -signs[:, 0]  # of equal ones the first counts as the larger
        owners = order if experts > 2 else torch.arange(2, device=gate.device).expand_as(order)
        signed = torch.zeros_like(router).scatter(1, owners, weights * signs)
    return Choice(shares, signed, order[:, :1], order[:, 1:])


@dataclass(frozen=True)
class Gated:
    """Jakiro's experts, which are gated MLPs."""

    count: int
    contrast: bool
    gate: Product
    gate_up: Product
    """[T, H] -> [T, 2 E I]: the gates of all experts, then their ups."""
    gated: Product
    down: Product
    """[T, E I] -> [T, H]."""

    def __call__(self, x: Tensor, *, contrast: bool) -> tuple[Tensor, Tensor | None]:
        """x [R, H] -> the mixture and, where asked for, the contrast, each [R, H]."""
        choice = choose(self.gate(x), self.count, contrast=self.contrast)
        middle = self.gated(self.gate_up(x))
        mixed = self.down(_weighted(middle, choice.shares))
        return mixed, self.down(
            _weighted(middle, choice.contrast)
        ) if contrast and choice.contrast is not None else None


@dataclass(frozen=True)
class Branched:
    """Jakiro*'s experts, each two matrices with an exact GELU between them."""

    count: int
    gate: Product
    up: Product
    down: Product

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [R, H] -> what the first and the second choice add, each [R, H], and the first one's
        share [R, 1]."""
        choice = choose(self.gate(x), self.count, contrast=False)
        middle = gelu(self.up(x))
        single = torch.zeros_like(choice.shares)
        first, second = (
            self.down(_weighted(middle, single.scatter(1, expert, 1.0)))
            for expert in (choice.first, choice.second)
        )
        return first, second, choice.shares.gather(1, choice.first)


def _weighted(middle: Tensor, weights: Tensor) -> Tensor:
    """middle [R, E I] times the weight [R, E] of the expert that each number belongs to."""
    rows, experts = weights.shape
    return (middle.view(rows, experts, -1) * weights.unsqueeze(-1).to(middle.dtype)).view(rows, -1)
