"""A mixer with a state computed by torch's operations, on a GPU as anywhere: the function of the
kernels' (`kernels/native/scan.inl`) up to rounding, over the same states and factors.

A state goes row after row, and by a tree level after level: what a row gives follows from the rows
on its path, whatever stands beside it. Knows a mixer by its plan, and the slots of rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

from dovetail.workers.kernels.states import COLUMNS, ScanPlan, ScanRule, StateRows
from dovetail.workers.models.segment import Segment

AT_A_TIME = 16
"""Rows of a level whose states are there at a time, beside those that have children."""
LEAST = 1e-6
"""Added to the squares of queries and keys before they are divided by their length."""


@dataclass(frozen=True)
class StatefulRows:
    """The rows of one session in a pass, and its states."""

    segment: Segment
    first: int
    """The first row in the pass."""
    states: StateRows


@dataclass(frozen=True)
class _Factors:
    """The numbers by which rows add to a state, and read it."""

    decay: Tensor
    """[T, value_heads]."""
    key: Tensor
    """[T, key_heads, key_dim]."""
    query: Tensor
    value: Tensor
    """[T, value_heads, value_dim]."""
    step: Tensor
    """[T, value_heads], by which values are multiplied."""


class _Place:
    """The state and the factors of a layer in those of a session."""

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
        """Have the session hold a state [1, value_heads, key_dim, value_dim]."""
        own = self._columns()
        wide = own.new_zeros(own.shape[0], own.shape[2], own.shape[1] * COLUMNS)
        wide[..., : self._plan.value_dim] = state[0]
        own.copy_(wide.view(*wide.shape[:2], -1, COLUMNS).transpose(1, 2))

    def _columns(self) -> Tensor:
        """The state [value_heads, blocks, key_dim, columns] as the kernels have it."""
        return self._state.view(self._plan.value_heads, -1, self._plan.key_dim, COLUMNS)

    def inputs(self, slots: Sequence[int]) -> Tensor:
        """Return what the convolution reads of slots, [T, channels]."""
        return self._of(slots)[:, : self._plan.taps.shape[1]]

    def kept(self, slots: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Decays [T, value_heads], keys [T, key_heads, key_dim] and what is added [T, value_heads,
        value_dim] of slots."""
        plan, rows = self._plan, self._of(slots)
        key, added, decay = self._parts
        columns = (added.stop - added.start) // plan.value_heads
        return (
            rows[:, decay][:, : plan.value_heads],
            rows[:, key][:, : plan.key_heads * plan.key_dim].reshape(
                -1, plan.key_heads, plan.key_dim
            ),
            rows[:, added].view(-1, plan.value_heads, columns)[..., : plan.value_dim],
        )

    def keep_inputs(self, first: int, inputs: Tensor) -> None:
        """Keep what the convolution reads of the slots from `first` on."""
        places = self._places(range(first, first + len(inputs)))
        self._rows[places, : inputs.shape[1]] = inputs

    def keep(self, first: int, decay: Tensor, key: Tensor, added: Tensor) -> None:
        """Keep what the slots from `first` on do to a state."""
        places = self._places(range(first, first + len(key)))
        of_key, of_added, of_decay = self._parts
        key = key.flatten(1)
        self._rows[places, of_key.start : of_key.start + key.shape[1]] = key
        wide = self._rows.new_zeros(len(key), of_added.stop - of_added.start)
        wide.view(*added.shape[:2], -1)[..., : added.shape[2]] = added
        self._rows[places, of_added] = wide
        self._rows[places, of_decay.start : of_decay.start + decay.shape[1]] = decay

    @property
    def _parts(self) -> tuple[slice, slice, slice]:
        """The places of keys, of what is added, and of decays in a row."""
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


class DeviceScan:
    """A mixer with a state whose numbers are on a device."""

    def __init__(self, plan: ScanPlan, device: torch.device) -> None:
        self._plan = plan

        def there(numbers: Tensor | None) -> Tensor | None:
            return None if numbers is None else numbers.to(device)

        self._taps, self._bias = plan.taps.to(device), there(plan.taps_bias)
        self._decay, self._step_bias = there(plan.decay), there(plan.step_bias)
        self._skip, self._norm = there(plan.skip), there(plan.norm)
        self._given_factors = there(plan.given_factors)

    def run(self, rows: Sequence[StatefulRows], given: Tensor) -> Tensor:
        """Return what the mixer gives of what its matrix gave [T, ...], for the matrix behind
        it."""
        if self._given_factors is not None:
            given = given * self._given_factors
        parts = (given[part.first : part.first + part.segment.count] for part in rows)
        return torch.cat([self._segment(*both) for both in zip(rows, parts, strict=True)])

    def _segment(self, rows: StatefulRows, given: Tensor) -> Tensor:
        plan, channels = self._plan, self._taps.shape[1]
        place, segment = _Place(plan, rows.states), rows.segment
        inputs, alone = given[:, :channels], plan.rule is ScanRule.SHORT_CONVOLUTION
        if alone:
            inputs = inputs * given[:, 2 * channels :]
        mixed = self._convolve(place, segment, inputs)
        folded = int(rows.states.folded[plan.index])
        fold = max(folded, rows.states.fold)
        whole = fold == segment.start + segment.count
        if alone:
            out = given[:, channels : 2 * channels] * mixed
        else:
            factors = self._factors(mixed, given)
            gates = given[:, channels : channels + plan.value_heads * plan.value_dim]
            read = self._walk(place, segment, factors, folded, fold)
            out = self._finish(read.flatten(1), gates)
        first = max(0, segment.count - plan.shape.taps + 1) if whole else 0
        place.keep_inputs(segment.start + first, inputs[first:])
        rows.states.folded[plan.index] = fold
        return out

    def _convolve(self, place: _Place, segment: Segment, inputs: Tensor) -> Tensor:
        """The convolution of rows and those before them on their paths, the oldest first."""
        taps, start = self._plan.shape.taps, segment.start
        seen = [_ancestors(segment, row, taps) for row in range(segment.count)]
        before = sorted({slot for path in seen for slot in path if 0 <= slot < start})
        nothing = inputs.new_zeros(1, inputs.shape[1])
        old = place.inputs(before) if before else nothing[:0]
        where = {slot: 1 + index for index, slot in enumerate(before)} | {-1: 0}
        at = torch.tensor(
            [
                [where[slot] if slot < start else 1 + len(before) + slot - start for slot in path]
                for path in seen
            ]
        )
        source, index = torch.cat([nothing, old, inputs]), at.to(inputs.device)
        mixed = source[index[:, 0]] * self._taps[0]
        for tap in range(1, taps):
            mixed = torch.addcmul(mixed, source[index[:, tap]], self._taps[tap])
        if self._bias is not None:
            mixed = mixed + self._bias
        return mixed if self._plan.rule is ScanRule.SHORT_CONVOLUTION else silu(mixed)

    def _factors(self, mixed: Tensor, given: Tensor) -> _Factors:
        plan = self._plan
        delta, keys = plan.rule is ScanRule.GATED_DELTA, plan.key_heads * plan.key_dim
        values = plan.value_heads * plan.value_dim
        query, key, value = torch.split(mixed, [keys, keys, values], dim=1)
        query, key = (part.reshape(-1, plan.key_heads, plan.key_dim) for part in (query, key))
        if delta:
            query, key = _normalised(query) * plan.query_scale, _normalised(key)
        raw = given[:, mixed.shape[1] + values :]
        assert self._decay is not None
        assert self._step_bias is not None
        step = softplus(raw[:, -plan.value_heads :] + self._step_bias, threshold=80.0)
        decay = torch.exp(self._decay * step)
        if delta:
            step = torch.sigmoid(raw[:, : plan.value_heads])
        return _Factors(
            decay, key, query, value.reshape(-1, plan.value_heads, plan.value_dim), step
        )

    def _walk(
        self, place: _Place, segment: Segment, rows: _Factors, folded: int, fold: int
    ) -> Tensor:
        """Return what rows read of the state [T, value_heads, value_dim], which holds the slots up
        to `fold` then."""
        start, out, added = (
            segment.start,
            torch.empty_like(rows.value),
            torch.empty_like(rows.value),
        )
        state = place.state()
        for slot in range(folded, fold):
            if slot < start:
                state = self._replay(place, state, [slot])
            else:
                state = self._step(rows, state, [slot - start], out, added)
        if fold > folded:
            place.hold(state)
        if fold == start + segment.count:
            return out
        below = {fold - 1: state}
        for level in _levels(segment, fold):
            nodes, below_next = list(level.items()), dict[int, Tensor]()
            for own in _pieces(nodes, start):
                slots = [slot for slot, _ in own]
                states = torch.cat([below[node.parent] for _, node in own])
                if slots[0] < start:
                    states = self._replay(place, states, slots)
                else:
                    states = self._step(rows, states, [slot - start for slot in slots], out, added)
                for index, (slot, node) in enumerate(own):
                    if node.inner:
                        below_next[slot] = states[index : index + 1]
            below = below_next
        place.keep(start, rows.decay, rows.key, added)
        return out

    def _replay(self, place: _Place, states: Tensor, slots: Sequence[int]) -> Tensor:
        """States [T, value_heads, key_dim, value_dim] behind slots whose factors are there."""
        decay, key, added = place.kept(slots)
        return torch.addcmul(
            states * decay[..., None, None], self._by_value(key)[..., None], added.unsqueeze(-2)
        )

    def _step(
        self, rows: _Factors, states: Tensor, which: Sequence[int], out: Tensor, added: Tensor
    ) -> Tensor:
        """States [T, value_heads, key_dim, value_dim] behind rows of the pass; what these read and
        add is written down."""
        plan, at = self._plan, _index(which, states.device)
        key, query = (self._by_value(part[at]).unsqueeze(-1) for part in (rows.key, rows.query))
        value, states = rows.value[at], states * rows.decay[at][..., None, None]
        if plan.rule is ScanRule.GATED_DELTA:
            value = value - (states * key).sum(-2)
        adds = value * rows.step[at].unsqueeze(-1)
        states = torch.addcmul(states, key, adds.unsqueeze(-2))
        read = (states * query).sum(-2)
        if self._skip is not None:
            read = torch.addcmul(read, rows.value[at], self._skip.unsqueeze(-1))
        out[at], added[at] = read, adds
        return states

    def _by_value(self, heads: Tensor) -> Tensor:
        """Queries or keys [T, key_heads, ...], once for each of the value heads that share one."""
        return heads.repeat_interleave(self._plan.value_heads // self._plan.key_heads, dim=1)

    def _finish(self, read: Tensor, gates: Tensor) -> Tensor:
        plan, gates = self._plan, silu(gates)
        if plan.gate_first:
            read = read * gates
        if self._norm is not None:
            parts = read.view(len(read), -1, plan.norm_width)
            weight = self._norm.view(-1, plan.norm_width)
            read = (rms_norm(parts, (plan.norm_width,), None, plan.epsilon) * weight).flatten(1)
        return read if plan.gate_first else read * gates


@dataclass
class _Node:
    """A slot in a tree."""

    parent: int
    inner: bool = False
    """True if it has children."""


def _levels(segment: Segment, fold: int) -> list[dict[int, _Node]]:
    """The slots from `fold` on that rows see, by their distance from there; the first ones hang
    below the slot before it."""
    levels: list[dict[int, _Node]] = []
    paths = segment.paths
    for row in range(segment.count):
        own = () if paths is None else paths.row(row).tolist()
        stop = segment.start + row + 1 if paths is None else paths.prefix
        parent = fold - 1
        for depth, slot in enumerate((*range(fold, stop), *own)):
            if depth == len(levels):
                levels.append({})
            if depth:
                levels[depth - 1][parent].inner = True
            levels[depth].setdefault(slot, _Node(parent))
            parent = slot
    return levels


def _pieces(
    nodes: Sequence[tuple[int, _Node]], start: int
) -> Iterator[Sequence[tuple[int, _Node]]]:
    """The nodes of a level some at a time: those of passes before, then the rows of this one."""
    for is_row in (False, True):
        own = [node for node in nodes if (node[0] >= start) == is_row]
        for first in range(0, len(own), AT_A_TIME):
            yield own[first : first + AT_A_TIME]


def _ancestors(segment: Segment, row: int, count: int) -> list[int]:
    """The slots of the last `count` rows of a row's path, itself last; -1 before the first row."""
    if segment.paths is None:
        stop, own = segment.start + row + 1, list[int]()
    else:
        stop, own = segment.paths.prefix, segment.paths.row(row)[-count:].tolist()
    missing = count - len(own)
    return [max(-1, slot) for slot in range(stop - missing, stop)] + own


def _index(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """Rows as an index of tensors on a device; of one row nothing has to be copied there."""
    if len(rows) == 1:
        return slice(rows[0], rows[0] + 1)
    return torch.tensor(rows).to(device)


def _normalised(heads: Tensor) -> Tensor:
    """Queries or keys [T, heads, key_dim], each divided by its length."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + LEAST)


def _filled(numbers: int) -> int:
    return -(-numbers // COLUMNS) * COLUMNS
