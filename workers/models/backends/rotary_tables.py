"""The rotary tables of a model, compared with the angles of transformers' own embedding."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.workers.kernels.layer import rotary_table
from dovetail.workers.kernels.layer_plan import Rotary
from dovetail.workers.models.checkpoints.configured import base_model
from dovetail.workers.models.families.description import Growth, Rope
from dovetail.workers.models.parity.following import UnsupportedError

ROTARY_NAMES = ("rotary_emb", "pos_emb")  # the names of a model's rotary embedding
TABLE_ROWS = 512  # positions of the context at which angles are compared with the model's
TABLE_TOLERANCE = 1e-5


class RotaryTables:
    """The angles of all positions of a model, a table for each type of layer."""

    def __init__(self, model: Any, context: int) -> None:
        base = base_model(model)
        found = (getattr(base, name, None) for name in ROTARY_NAMES)
        embedding = next((part for part in found if part is not None), None)
        self.given = embedding is not None
        self._base, self._context = base, context
        self._embeddings: dict[str, Any] = {"": copy.deepcopy(embedding)}
        self._tables: dict[tuple[Rope | None, Growth | None], Rotary] = {}
        self.angles: dict[str, tuple[Sequence[float], float]] = {}
        """Frequencies of each table in use, and the factor of its cosines and sines."""

    def of(self, rope: Rope | None, growth: Growth | None = None) -> Rotary | None:
        """Return the table of a layer; None if it neither rotates nor has growing queries."""
        if rope is None and growth is None:
            return None
        key = rope, growth
        if key not in self._tables:
            table = Rotary(*torch.empty(2, self._context, 0)) if rope is None else self._make(rope)
            self._tables[key] = (
                table if growth is None else replace(table, factors=self._grow(growth))
            )
        return self._tables[key]

    def _make(self, rope: Rope) -> Rotary:
        name = rope.part + rope.table
        if name not in self.angles:
            self.angles[name] = self._read(rope)
        frequencies, scaling = self.angles[name]
        table = rotary_table(torch.tensor(frequencies), self._context, scaling=scaling)
        self._check(table, rope)
        return replace(table, sines=-table.sines) if rope.backward else table

    def _read(self, rope: Rope) -> tuple[Sequence[float], float]:
        if rope.part not in self._embeddings:
            self._embeddings[rope.part] = copy.deepcopy(self._base.get_submodule(rope.part))
        embedding, prefix = self._embeddings[rope.part], f"{rope.table}_" if rope.table else ""
        frequencies = getattr(embedding, f"{prefix}inv_freq", None)
        if not isinstance(frequencies, Tensor) or frequencies.ndim != 1:
            raise UnsupportedError(f"a rotary embedding of type {type(embedding).__name__}")
        scaling = float(getattr(embedding, f"{prefix}attention_scaling", 1.0))
        return frequencies.float().tolist(), scaling

    def _check(self, table: Rotary, rope: Rope) -> None:
        _check_table(table, self._embeddings[rope.part], self._context, rope)

    def _grow(self, growth: Growth) -> Tensor:
        """Return the factors of queries, float32 [context]: the same bytes on every machine."""
        steps = (torch.arange(self._context) + growth.ahead) // growth.period
        last = int(steps[-1])
        return torch.tensor([1 + growth.beta * math.log1p(k) for k in range(last + 1)])[steps]


class KnownTables(RotaryTables):
    """The angles of a model that was proved before."""

    def __init__(self, angles: Mapping[str, tuple[Sequence[float], float]], context: int) -> None:
        self.given, self._context, self._tables = bool(angles), context, {}
        self.angles = dict(angles)

    def _read(self, rope: Rope) -> tuple[Sequence[float], float]:
        raise UnsupportedError(f"the proof has no rotary table {rope.part + rope.table!r}")

    def _check(self, table: Rotary, rope: Rope) -> None:
        """Do nothing: the table comes with the proof."""


def _check_table(table: Rotary, embedding: nn.Module, context: int, of: Rope) -> None:
    """`UnsupportedError` if a table has other angles than the model's rotary embedding."""
    positions = torch.linspace(0, context - 1, min(context, TABLE_ROWS), dtype=torch.float64).long()
    which = (of.table,) if of.table else ()
    given = embedding(torch.zeros(1, 1), positions.unsqueeze(0), *which)
    if isinstance(given, Tensor) and given.is_complex():
        given = given.real, given.imag
    if not isinstance(given, tuple) or len(given) != 2:
        raise UnsupportedError(f"a rotary embedding of type {type(embedding).__name__}")
    for own, other in zip((table.cosines, table.sines), given, strict=True):
        found = own[positions]
        expected = found.repeat_interleave(2, 1) if of.interleaved else found.repeat(1, 2)
        # some embeddings of neighbours give halves, and their layers repeat each angle
        if of.interleaved and torch.equal(other[0, :, 0], other[0, :, other.shape[-1] // 2]):
            expected = found.repeat(1, 2)
        if other.shape[-1] == found.shape[-1]:  # each angle once
            expected = found
        if other.shape[1:] != expected.shape:
            raise UnsupportedError(f"a rotary embedding of type {type(embedding).__name__}")
        far = (other[0] - expected).abs().amax(-1) > TABLE_TOLERANCE
        if bool(far.any()):
            position = int(positions[far][0])
            raise UnsupportedError(
                f"the angles of position {position} differ from those of {type(embedding).__name__}"
            )


class NoAngles(nn.Module):
    """Stands in for transformers' rotary embedding: the kernels have a table of all angles."""

    def forward(self, *unused: Any, **also_unused: Any) -> None:
        """Compute nothing."""
