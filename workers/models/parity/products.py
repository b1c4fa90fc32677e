"""Linears of a layer in its proof, which compute with the packed matrices of the kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.models.backends.packing import compare_product, product_of, sampled_rows
from dovetail.workers.models.checkpoints.gguf.rows import weight_of


class Product:
    """A layer's matrix in its proof, with its last input and output for linears that share it."""

    def __init__(
        self, name: str, linears: Sequence[nn.Linear], orders: Sequence[Tensor | None] | None = None
    ) -> None:
        """`linears`: concatenated by outputs; some rows are kept. `orders`: int64 [out] of each,
        places of outputs in the checkpoint; None: in place."""
        self.name = name
        self.given, self.result = torch.empty(0), torch.empty(0)
        self._matrix: PackedMatrix | None = None
        self._first: list[int] = []
        self._samples: list[tuple[Tensor, Tensor, Tensor | float]] = []
        first = 0
        for part in linears:
            picked = sampled_rows(part.out_features)
            bias = 0.0 if part.bias is None else part.bias.detach()[picked].float()
            self._first.append(first)
            self._samples.append((picked, weight_of(part, picked), bias))
            first += part.out_features
        self._counts = [part.out_features for part in linears]
        self._orders = orders or [None] * len(linears)

    def stand_ins(self) -> list[nn.Module]:
        """Return a stand-in for each linear; they own the product, which is freed with the last of
        them."""
        return [
            _Rows(self, first, count, None if order is None else order.argsort())
            for first, count, order in zip(self._first, self._counts, self._orders, strict=True)
        ]

    def use(self, matrix: PackedMatrix) -> None:
        """Compute with this matrix from now on."""
        self._matrix = matrix

    def __call__(self, x: Tensor) -> Tensor:
        """x [m, in] -> [m, out]; linears of the same rows share one product."""
        assert self._matrix is not None
        if self.given.shape != x.shape or not torch.equal(self.given, x):
            self.given, self.result = x.clone(), self._matrix.linear(x.contiguous())
            self._check(x)
        return self.result

    def _check(self, x: Tensor) -> None:
        """`UnsupportedError` if packed weights are not the checkpoint's; single rows may cancel
        out."""
        assert self._matrix is not None
        if self._matrix.kind not in list(Kind) or len(x) == 1:
            return
        for first, (picked, weight, bias) in zip(self._first, self._samples, strict=True):
            expected = product_of(self._matrix, first + picked, x, weight) + bias
            compare_product(self.name, self._matrix, self.result[:, first + picked], expected)


class _Rows(nn.Module):
    def __init__(
        self, product: Product, first: int, count: int, order: Tensor | None = None
    ) -> None:
        super().__init__()
        self._order = order
        self._product, self._first, self._count = product, first, count

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        y = self._product(x.reshape(-1, x.shape[-1]))[:, self._first : self._first + self._count]
        y = y.clone() if self._order is None else y[:, self._order]  # a layer may add to it
        return y.reshape(*x.shape[:-1], self._count)


class Joined(nn.Module):
    """Linears in place of a joined one; `order`, int64 [out]: places of their outputs there."""

    def __init__(self, parts: Sequence[nn.Module], order: Tensor) -> None:
        super().__init__()
        self._parts, self._back = parts, order.argsort()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return torch.cat([part(x) for part in self._parts], dim=-1)[..., self._back]
