"""The state of a layer and the factors of its rows on a device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.workers.kernels.states import COLUMNS, ScanPlan, StateRows


@dataclass(frozen=True)
class Factors:
    """How rows change a state (decay state + key added); keys and queries repeated for value
    heads."""

    decay: Tensor  # [T, value_heads, 1, 1]
    key: Tensor  # [T, value_heads, key_dim, 1]
    added: Tensor  # [T, value_heads, 1, value_dim], without the part that depends on the state


class StatePlace:
    """The state and the factors of a layer, as a part of a session's."""

    def __init__(self, plan: ScanPlan, states: StateRows) -> None:
        self._plan, self._states = plan, states
        shape, ring = plan.shape, states.ring
        first = plan.row_before * ring
        self._rows = states.factors[first : first + shape.row * ring].view(ring, shape.row)
        self._state = states.state[plan.state_before : plan.state_before + shape.state]

    def state(self) -> Tensor:
        """Return a copy of the state [1, value_heads, key_dim, value_dim]."""
        plan = self._plan
        return self._columns().permute(0, 2, 1, 3).flatten(2)[None, ..., : plan.value_dim].clone()

    def hold(self, state: Tensor) -> None:
        """Store a state [1, value_heads, key_dim, value_dim] in the session."""
        own = self._columns()
        wide = own.new_zeros(own.shape[0], own.shape[2], own.shape[1] * COLUMNS)
        wide[..., : self._plan.value_dim] = state[0]
        own.copy_(wide.view(*wide.shape[:2], -1, COLUMNS).transpose(1, 2))

    def _columns(self) -> Tensor:
        """The state [value_heads, blocks, key_dim, columns] in the kernels' layout."""
        return self._state.view(self._plan.value_heads, -1, self._plan.key_dim, COLUMNS)

    def inputs(self, slots: Sequence[int]) -> Tensor:
        """Return the convolution's inputs at some slots, [T, channels]."""
        return self._of(slots)[:, : self._plan.taps.shape[1]]

    def kept(self, slots: Sequence[int]) -> Factors:
        """Return the factors with which slots update a state."""
        plan, rows = self._plan, self._of(slots)
        key, added, decay = self._parts
        columns = (added.stop - added.start) // plan.value_heads
        keys = rows[:, key][:, : plan.key_heads * plan.key_dim]
        return Factors(
            rows[:, decay][:, : plan.value_heads, None, None],
            by_value(plan, keys.reshape(-1, plan.key_heads, plan.key_dim)),
            rows[:, added].view(-1, plan.value_heads, 1, columns)[..., : plan.value_dim],
        )

    def keep_inputs(self, first: int, inputs: Tensor) -> None:
        """Store the convolution's inputs at the slots from `first` on."""
        places = self._places(range(first, first + len(inputs)))
        self._rows[places, : inputs.shape[1]] = inputs

    def keep(self, first: int, rows: Factors, added: Tensor) -> None:
        """Store the factors with which the slots from `first` on update a state."""
        places, plan = self._places(range(first, first + len(added))), self._plan
        of_key, of_added, of_decay = self._parts
        key = rows.key[:, :: plan.value_heads // plan.key_heads].flatten(1)
        self._rows[places, of_key.start : of_key.start + key.shape[1]] = key
        wide = self._rows.new_zeros(len(key), of_added.stop - of_added.start)
        wide.view(*added.shape[:3], -1)[..., : added.shape[3]] = added
        self._rows[places, of_added] = wide
        self._rows[places, of_decay.start : of_decay.start + plan.value_heads] = rows.decay.flatten(
            1
        )

    @property
    def _parts(self) -> tuple[slice, slice, slice]:
        """The places of keys, additions and decays in a row."""
        plan = self._plan
        key = _filled(plan.taps.shape[1])
        added = key + _filled(plan.key_heads * plan.key_dim)
        decay = added + plan.value_heads * _filled(plan.value_dim)
        return slice(key, added), slice(added, decay), slice(decay, plan.shape.row)

    def _of(self, slots: Sequence[int]) -> Tensor:
        return self._rows[self._places(slots)]

    def _places(self, slots: Sequence[int]) -> Tensor:
        places = torch.tensor([slot % self._states.ring for slot in slots], dtype=torch.int64)
        return places.to(self._rows.device)


def by_value(plan: ScanPlan, heads: Tensor) -> Tensor:
    """Return [T, value_heads, key_dim, 1] of queries or keys [T, key_heads, key_dim]."""
    return heads.repeat_interleave(plan.value_heads // plan.key_heads, dim=1).unsqueeze(-1)


def _filled(numbers: int) -> int:
    return -(-numbers // COLUMNS) * COLUMNS
