"""The states of a session for its target's substitute, which reads them with factors of its own."""

from collections.abc import Sequence

import torch

from dovetail.workers.kernels.states import StateRows
from dovetail.workers.models.recurrent.states import RecurrentStates, factors_of_layers


class LentStates(RecurrentStates):
    """A session's states, unchanged, with another model's factors from slot `first` on."""

    def __init__(self, owner: RecurrentStates, first: int, room: int) -> None:
        """`room`: the number of slots."""
        self.shapes, self.owner, self.first, self.room = owner.shapes, owner, first, room
        self._own = torch.empty(room * sum(shape.row for shape in owner.shapes))

    @property
    def length(self) -> int:
        """Return how many rows the states hold."""
        return self.owner.length

    def rows(
        self, committed: int, start: int, count: int, *, chain: bool, follows: bool = False
    ) -> StateRows:
        """Return the states for a pass over slots from `start` on; ValueError for other slots."""
        if chain or not self.first <= start <= start + count <= self.first + self.room:
            raise ValueError(f"slots {start}..{start + count - 1} of a session are another model's")
        own = self.owner.rows_as_they_are()
        return StateRows(
            own.state, own.factors, own.folded, own.ring, 0, self._own, self.first, self.room
        )

    @torch.inference_mode()
    def keep(self, first: int, slots: Sequence[int], length: int) -> None:
        """Move the factors of `slots` to the slots from `first` on."""
        source = torch.tensor(slots, dtype=torch.int64) - self.first
        target = torch.arange(first, first + len(slots)) - self.first
        for rows in factors_of_layers(self.shapes, self._own, self.room):
            rows[target] = rows[source]
