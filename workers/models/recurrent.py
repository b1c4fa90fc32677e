"""The states of a session, and the factors of rows that they do not hold yet. A state holds the
first rows and cannot be cut back; later rows, committed or of a tree, have factors by which a state
comes to hold them, so a tree is dropped for free. Long chains enter the states as they are
computed. Checkpoints are copies to which a session can go back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.workers.kernels.states import StateRows, StateShape

CPU = torch.device("cpu")
CHAIN = 16  # least rows of a chain that are written to the states as they are computed
PENDING = 8  # committed rows kept as factors: a write costs as much as 8 rows
STEP = 4096  # rows between checkpoints in a long session: by then caches take more
WAITING = 24  # approximate number of rows whose factors a session holds, besides a tree's


@dataclass(frozen=True)
class _Checkpoint:
    """The states of all layers at a length, and the factors of the rows that convolutions see."""

    length: int
    state: Tensor
    window: Sequence[Tensor]
    periodic: bool


class RecurrentStates:
    """The states of one session."""

    def __init__(self, shapes: Sequence[StateShape], device: torch.device = CPU) -> None:
        self.shapes, self._device = shapes, device
        self.state = torch.zeros(sum(shape.state for shape in shapes), device=device)
        self.folded = torch.zeros(len(shapes), dtype=torch.int64)
        self._ring, self._factors = 0, torch.empty(0, device=device)
        self._ahead = 0  # the slot up to which a chain has been advanced into the states, in parts
        self._checkpoints: list[_Checkpoint] = []
        self._window = max(shape.taps for shape in shapes) - 1

    @property
    def length(self) -> int:
        """Return how many rows the states hold."""
        return int(self.folded.max())

    def rows(
        self, committed: int, start: int, count: int, *, chain: bool, follows: bool = False
    ) -> StateRows:
        """Return the states for a pass over slots from `start` on, behind `committed` rows;
        `chain`: consecutive; `follows`: behind the last ones, in the same pass. RuntimeError after
        a failed pass."""
        if self.length > start:
            text = f"the states of a session hold {self.length} rows, not {start}"
            raise RuntimeError(f"{text}: a pass over them failed; read the session again")
        stop, oldest = start + count, int(self.folded.min())
        on = follows and chain and start == self._ahead
        whole = on or (chain and start == committed and count >= CHAIN)
        behind = committed - oldest >= PENDING
        fold = stop if whole else committed if behind else self.length
        self._ahead = stop if whole else -1
        if not on:
            self._make_room((start if whole else stop) - oldest + self._window, start)
        return StateRows(self.state, self._factors, self.folded, self._ring, fold)

    @torch.inference_mode()
    def keep(self, first: int, slots: Sequence[int], length: int) -> None:
        """Move the factors of `slots` to `first` on; `length` rows are then committed. RuntimeError
        if the states hold more."""
        if self.length > length:
            raise RuntimeError(f"{length} rows are to be kept, and the states hold {self.length}")
        if slots:
            source = self._places(torch.tensor(slots))
            target = self._places(torch.arange(first, first + len(slots)))
            for rows in self._layers():
                rows[target] = rows[source]
        last = max((c.length for c in self._checkpoints if c.periodic), default=0)
        if self.length - last >= STEP:
            self._save(periodic=True)

    def restorable(self, length: int) -> int:
        """Return the greatest length, at most this one, to which the states can go back."""
        if length >= self.length:
            return length
        return max((c.length for c in self._checkpoints if c.length <= length), default=0)

    @torch.inference_mode()
    def truncate(self, length: int) -> None:
        """Go back to a length that is `restorable`; ValueError for any other."""
        if self.restorable(length) != length:
            raise ValueError(f"there is no state of the first {length} of {self.length} rows")
        self._checkpoints = [c for c in self._checkpoints if c.length <= length]
        if length >= self.length:
            return
        found = next((c for c in self._checkpoints if c.length == length), None)
        self.folded.fill_(length)
        if found is None:
            self.state.zero_()
            return
        self.state.copy_(found.state)
        places = self._places(self._seen(length))
        for rows, seen in zip(self._layers(), found.window, strict=True):
            rows[places] = seen

    @torch.inference_mode()
    def checkpoint(self) -> None:
        """Store a copy of the current states, in place of the last copy."""
        self._checkpoints = [c for c in self._checkpoints if c.periodic]
        if self.length and all(c.length != self.length for c in self._checkpoints):
            self._save(periodic=False)

    @torch.inference_mode()
    def copied(self, length: int) -> tuple[Tensor, ...]:
        """Return copies, on the host, of the states of `length` rows and of the factors that
        convolutions see; empty if the states hold another number of rows."""
        if {*self.folded.tolist()} != {length}:
            return ()
        places = self._places(self._seen(length))
        parts = (self.state, *(rows[places] for rows in self._layers()))
        return tuple(part.to(CPU, copy=True) for part in parts)

    @torch.inference_mode()
    def restore(self, length: int, parts: Sequence[Tensor]) -> None:
        """Take over the `copied` states of `length` rows, in place of none."""
        state, *window = parts
        self._make_room(self._window, 0)
        self.state.copy_(state)
        self.folded.fill_(length)
        places = self._places(self._seen(length))
        for rows, seen in zip(self._layers(), window, strict=True):
            rows[places] = seen.to(self._device)

    @torch.inference_mode()
    def take_over(self, layer: int, other: "RecurrentStates", rows: int) -> None:
        """Take over the first `rows` rows of a layer, from the first layer of other states."""
        shape, folded = self.shapes[layer], int(other.folded[0])
        first = sum(shape.state for shape in self.shapes[:layer])
        self.state[first : first + shape.state] = other.state[: shape.state].to(self._device)
        self.folded[layer] = folded
        self._make_room(rows - folded + self._window, 0)
        slots = torch.arange(max(0, folded - self._window), rows)
        own, given = (list(part._layers()) for part in (self, other))
        own[layer][self._places(slots)] = given[0][other._places(slots)].to(self._device)

    def _places(self, slots: Tensor) -> Tensor:
        return (slots % max(1, self._ring)).to(self._device)

    def _save(self, *, periodic: bool) -> None:
        if int(self.folded.min()) != self.length:
            return
        places = self._places(self._seen(self.length))
        window = [rows[places].clone() for rows in self._layers()]
        self._checkpoints.append(_Checkpoint(self.length, self.state.clone(), window, periodic))

    def _seen(self, length: int) -> Tensor:
        return torch.arange(max(0, length - self._window), length)

    def _make_room(self, rows: int, start: int) -> None:
        if rows <= self._ring:
            return
        ring = -(-max(rows, 3 * self._ring // 2) // CHAIN) * CHAIN
        factors = torch.empty(ring * sum(shape.row for shape in self.shapes), device=self._device)
        slots = torch.arange(max(0, start - self._ring), start, device=self._device)
        if self._ring:
            layers = factors_of_layers(self.shapes, factors, ring)
            for new, old in zip(layers, self._layers(), strict=True):
                new[slots % ring] = old[slots % self._ring]
        self._ring, self._factors = ring, factors

    def _layers(self) -> Iterator[Tensor]:
        return factors_of_layers(self.shapes, self._factors, self._ring)


def factors_of_layers(shapes: Sequence[StateShape], factors: Tensor, ring: int) -> Iterator[Tensor]:
    """Yield the factors [ring, numbers of a row] of each layer."""
    first = 0
    for shape in shapes:
        yield factors[first * ring : (first + shape.row) * ring].view(ring, shape.row)
        first += shape.row


def session_bytes(shapes: Sequence[StateShape]) -> int:
    """Return a session's bytes of any length: states, a checkpoint, waiting rows' factors."""
    rows = WAITING + max((shape.taps for shape in shapes), default=0)
    return 4 * sum(2 * shape.state + rows * shape.row for shape in shapes)


def token_bytes(shapes: Sequence[StateShape]) -> int:
    """Return the memory per row of a session for periodic checkpoints."""
    return -(-4 * sum(shape.state for shape in shapes) // STEP)


class LentStates(RecurrentStates):
    """A session's states, unchanged, with another model's factors from slot `first` on."""

    def __init__(self, owner: RecurrentStates, first: int, room: int) -> None:
        """`room`: the number of slots."""
        self.shapes, self.owner, self.first, self.room = owner.shapes, owner, first, room
        numbers = room * sum(shape.row for shape in owner.shapes)
        self._own = torch.empty(numbers, device=owner.state.device)

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
        own, window = self.owner, (self._own, self.first, self.room)
        return StateRows(own.state, own._factors, own.folded.clone(), own._ring, 0, *window)

    @torch.inference_mode()
    def keep(self, first: int, slots: Sequence[int], length: int) -> None:
        source = torch.tensor(slots, dtype=torch.int64) - self.first
        target = torch.arange(first, first + len(slots)) - self.first
        for rows in factors_of_layers(self.shapes, self._own, self.room):
            rows[target] = rows[source]
