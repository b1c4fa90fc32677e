"""The rotary tables of a model on a device, and the angles of the rows of a pass."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dovetail.workers.kernels.layer_plan import Rotary


class Angles:
    """The rotary tables of a model on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[int, tuple[Rotary, Tensor, Tensor]] = {}
        self._alike: dict[int, tuple[Rotary, int]] = {}
        """Tables with the numbers of another table, and the id of that."""
        self._factors: dict[int, Tensor] = {}  # the factors of queries of tables that have any

    def add(self, rotary: Rotary) -> None:
        """Take a table over, if it is a new one; one with the same numbers is not copied again."""
        if id(rotary) in self._tables or id(rotary) in self._alike:
            return
        for key, (known, _, _) in self._tables.items():
            if _equal(known, rotary):
                self._alike[id(rotary)] = (rotary, key)
                return
        tables = rotary.cosines.to(self._device), rotary.sines.to(self._device)
        self._tables[id(rotary)] = (rotary, *tables)
        if rotary.factors is not None:
            self._factors[id(rotary)] = rotary.factors.to(self._device)

    def at(self, positions: Tensor) -> "Turn | None":
        """Return the angles of rows at positions int64 [T]; None without tables."""
        found = {
            key: (cosines[positions].unsqueeze(1), sines[positions].unsqueeze(1))
            for key, (_, cosines, sines) in self._tables.items()
        }
        grown = {key: table[positions].view(-1, 1, 1) for key, table in self._factors.items()}
        for key, (_, of) in self._alike.items():
            found[key] = found[of]
            if of in grown:
                grown[key] = grown[of]
        return Turn(found, grown) if found else None


@dataclass(frozen=True)
class Turn:
    """The angles of the rows of a pass."""

    angles: Mapping[int, tuple[Tensor, Tensor]]  # cosines and sines [T, 1, rotary_dim / 2] by table
    factors: Mapping[int, Tensor] = field(default_factory=dict)
    """The factors of queries [T, 1, 1], by the id of their table."""

    def of(self, heads: Tensor, rotary: Rotary) -> Tensor:
        """Return heads [T, H, head_dim] rotated by a table's angles at the rows' positions."""
        cosines, sines = self.angles[id(rotary)]
        half = cosines.shape[-1]
        a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        first, second = (
            torch.addcmul(a * cosines, b, sines, value=-1),
            torch.addcmul(b * cosines, a, sines),
        )
        return torch.cat([first, second, rest] if rest.shape[-1] else [first, second], dim=-1)

    def grow(self, query: Tensor, rotary: Rotary) -> Tensor:
        """query [T, heads, head_dim] times the factors that a table has for its rows' positions."""
        factors = self.factors.get(id(rotary))
        return query if factors is None else query * factors


def _equal(one: Rotary, other: Rotary) -> bool:
    pairs = ((one.cosines, other.cosines), (one.sines, other.sines), (one.factors, other.factors))
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)
