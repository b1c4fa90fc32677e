"""The plan of attention over latents (MLA) that callers give to the kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dovetail.workers.kernels import PackedMatrix, check_matrix


@dataclass(frozen=True)
class LatentPlan:
    """Attention over latents: of a row the cache holds a latent and a rotated key that all heads
    share. Keys and values of a head would be matrices times the latent; its queries, and what it
    attends to, go through them in their place."""

    rank: int
    """Numbers of a latent."""
    plain: int
    """Numbers of a head's query that are not rotated; those that are stand behind them."""
    latent_norm: Tensor
    """The weights of their RMS norm, float32 [rank]."""
    key_up: Sequence[PackedMatrix]
    """A matrix [rank, plain] for each head: what makes keys of latents, turned."""
    value_up: Sequence[PackedMatrix]
    """A matrix [value_dim, rank] for each head."""
    query_up: PackedMatrix | None = None
    """[heads (plain + rotated), ...], what makes queries of the first numbers that `qkv` gives;
    None: they are the queries."""
    query_norm: Tensor | None = None
    """The weights of the RMS norm of those numbers, float32; None: there is none."""
    epsilon: float = 1e-6
    """The epsilon of both norms."""

    @property
    def value_dim(self) -> int:
        """Return the numbers of a head's value."""
        return self.value_up[0].n

    def widths(self, heads: int, rotated: int) -> tuple[int, int]:
        """Return what the matrix before it gives, and that behind it takes; ValueError for matrices
        or heads that do not fit together."""
        if not len(self.key_up) == len(self.value_up) == heads:
            raise ValueError(f"{heads} heads, of which {len(self.key_up)} have matrices")
        for key_up, value_up in zip(self.key_up, self.value_up, strict=True):
            check_matrix("key_up", key_up, self.rank, self.plain)
            check_matrix("value_up", value_up, self.value_dim, self.rank)
        queries, first = heads * (self.plain + rotated), self.query_up
        if first is not None:
            check_matrix("query_up", first, queries, first.k)
        given = queries if first is None else first.k
        return given + self.rank + rotated, heads * self.value_dim
