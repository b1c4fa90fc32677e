"""The plan of attention over latents (MLA)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dovetail.workers.kernels import PackedMatrix, check_matrix


@dataclass(frozen=True)
class LatentPlan:
    """Attention over latents: a row of the cache is a latent and a rotated key that all heads
    share. Instead of expanding latents to keys and values of each head, queries and results go
    through the heads' matrices."""

    rank: int  # width of a latent
    plain: int  # numbers of a head's query that are not rotated; the rotated ones follow them
    latent_norm: Tensor  # the weights of the latents' RMS norm, float32 [rank]
    key_up: Sequence[PackedMatrix]
    """For each head the matrix that expands latents to keys, transposed: [rank, plain]."""
    value_up: Sequence[PackedMatrix]  # for each head the matrix [value_dim, rank]
    query_up: PackedMatrix | None = None
    """[heads (plain + rotated), ...], which computes queries from the first numbers of `qkv`; None:
    these are the queries."""
    query_norm: Tensor | None = None
    """The weights of the RMS norm of those numbers, float32, if any."""
    epsilon: float = 1e-6  # the epsilon of both norms

    @property
    def value_dim(self) -> int:
        """The width of a head's value."""
        return self.value_up[0].n

    def widths(self, heads: int, rotated: int) -> tuple[int, int]:
        """Return the output width of the matrix before it and the input width of the one after it.
        Raises ValueError for matrices or heads that do not fit together."""
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
