"""A mixer with a state computed by torch: the function of the kernels (`kernels/native/scan.inl`)
up to rounding, over the same states and factors. The state advances row by row, and a tree level by
level: a row depends on its path alone. Chunked algorithms would add rows in an order that depends
on the start of a chunk."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

from dovetail.workers.kernels.states import COLUMNS, ScanPlan, ScanRule, StateRows
from dovetail.workers.models.segment import Segment


@dataclass(frozen=True)
class Factors:
    """How rows change a state (decay state + key added); keys and queries repeated for value
    heads."""

    decay: Tensor  # [T, value_heads, 1 or key_dim, 1]
    key: Tensor  # [T, value_heads, key_dim, 1]
    added: Tensor  # [T, value_heads, 1, value_dim], without the part that depends on the state


class StatePlace:
    """The state and the factors of a layer, as a part of a session's."""

    def __init__(self, plan: ScanPlan, states: StateRows) -> None:
        self._plan, self._states = plan, states
        shape, ring = plan.shape, states.ring
        first = plan.row_before * ring
        self._rows = states.factors[first : first + shape.row * ring].view(ring, shape.row)
        self._lent: Tensor | None = None
        if states.lent is not None:
            room = states.lent_room
            lent = states.lent[plan.row_before * room :][: shape.row * room]
            self._lent = lent.view(room, shape.row)
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
            rows[:, decay][:, : plan.decays].view(len(rows), plan.value_heads, -1, 1),
            by_value(plan, keys.reshape(-1, plan.key_heads, plan.key_dim)),
            rows[:, added].view(-1, plan.value_heads, 1, columns)[..., : plan.value_dim],
        )

    def keep_inputs(self, first: int, inputs: Tensor) -> None:
        """Store the convolution's inputs at the slots from `first` on."""
        rows, places = self._room(range(first, first + len(inputs)))
        rows[places, : inputs.shape[1]] = inputs

    def keep(self, first: int, rows: Factors, added: Tensor) -> None:
        """Store the factors with which the slots from `first` on update a state."""
        (own, places), plan = self._room(range(first, first + len(added))), self._plan
        of_key, of_added, of_decay = self._parts
        key = rows.key[:, :: plan.value_heads // plan.key_heads].flatten(1)
        own[places, of_key.start : of_key.start + key.shape[1]] = key
        wide = own.new_zeros(len(key), of_added.stop - of_added.start)
        wide.view(*added.shape[:3], -1)[..., : added.shape[3]] = added
        own[places, of_added] = wide
        own[places, of_decay.start : of_decay.start + plan.decays] = rows.decay.flatten(1)

    @property
    def _parts(self) -> tuple[slice, slice, slice]:
        """The places of keys, additions and decays in a row."""
        plan = self._plan
        key = _filled(plan.taps.shape[1])
        added = key + _filled(plan.key_heads * plan.key_dim)
        decay = added + plan.value_heads * _filled(plan.value_dim)
        return slice(key, added), slice(added, decay), slice(decay, plan.shape.row)

    def _of(self, slots: Sequence[int]) -> Tensor:
        """Return the rows of ascending slots."""
        if self._lent is None:
            rows, places = self._room(slots)
            return rows[places]
        count = bisect_left(slots, self._states.lent_first)
        parts = (self._room(part) for part in (slots[:count], slots[count:]))
        return torch.cat([rows[places] for rows, places in parts])

    def _room(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the memory of slots, all of them lent or none, and their places in it."""
        rows, first = self._rows, 0
        if self._lent is not None and slots and slots[0] >= self._states.lent_first:
            rows, first = self._lent, self._states.lent_first
        places = torch.tensor([(slot - first) % len(rows) for slot in slots], dtype=torch.int64)
        return rows, places.to(rows.device)


def by_value(plan: ScanPlan, heads: Tensor) -> Tensor:
    """Return [T, value_heads, key_dim, 1] of queries or keys [T, key_heads, key_dim]."""
    return heads.repeat_interleave(plan.value_heads // plan.key_heads, dim=1).unsqueeze(-1)


def _filled(numbers: int) -> int:
    return -(-numbers // COLUMNS) * COLUMNS


AT_A_TIME = 16  # rows of a prompt, or of a level, whose states are in memory at a time
LEAST = 1e-6  # added to the squared length of queries and keys before the division


@dataclass(frozen=True)
class StatefulRows:
    """The rows of one session in a pass, and its states."""

    segment: Segment
    first: int  # the first row in the pass
    states: StateRows


@dataclass(frozen=True)
class _Given(Factors):
    query: Tensor  # [T, value_heads, key_dim, 1]
    looking: Tensor  # [T, value_heads, key_dim, 1]: reads the old value from a state
    value: Tensor  # [T, value_heads, value_dim]
    taken: Tensor | None  # [T, value_heads, 1, 1], times what a key reads of the state


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
        """Return the mixer's output, given its matrix's outputs [T, ...]."""
        if self._given_factors is not None:
            given = given * self._given_factors
        parts = (given[part.first : part.first + part.segment.count] for part in rows)
        return torch.cat([self._segment(*both) for both in zip(rows, parts, strict=True)])

    def _segment(self, rows: StatefulRows, given: Tensor) -> Tensor:
        plan, channels = self._plan, self._taps.shape[1]
        place, segment = StatePlace(plan, rows.states), rows.segment
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
            first = channels + (plan.value_heads + 2 * plan.low if plan.low else 0)
            gates = given[:, first : first + plan.value_heads * plan.value_dim]
            read = self._walk(place, segment, factors, folded, fold)
            out = self._finish(read.flatten(1), gates)
        first = max(0, segment.count - plan.shape.taps + 1) if whole else 0
        place.keep_inputs(segment.start + first, inputs[first:])
        rows.states.folded[plan.index] = fold
        return out

    def _convolve(self, place: StatePlace, segment: Segment, inputs: Tensor) -> Tensor:
        """The convolution of rows and those before them on their paths, the oldest first."""
        taps, start, nothing = self._plan.shape.taps, segment.start, inputs.new_zeros(1, 1)
        if segment.paths is None:
            before = place.inputs(range(max(0, start - taps + 1), start))
            missing = nothing.expand(taps - 1 - len(before), inputs.shape[1])
            source = torch.cat([missing, before, inputs])
            seen = [source[tap : tap + len(inputs)] for tap in range(taps)]
        else:
            paths = [_ancestors(segment, row, taps) for row in range(segment.count)]
            old = sorted({slot for path in paths for slot in path if 0 <= slot < start})
            where = {slot: 1 + index for index, slot in enumerate(old)} | {-1: 0}
            where |= {start + row: 1 + len(old) + row for row in range(segment.count)}
            at = torch.tensor([[where[slot] for slot in path] for path in paths])
            none = nothing.expand(1, inputs.shape[1])
            source = torch.cat([none, place.inputs(old), inputs])
            seen = [source[index] for index in at.to(inputs.device).unbind(1)]
        mixed = seen[0] * self._taps[0]
        for tap in range(1, taps):
            mixed = torch.addcmul(mixed, seen[tap], self._taps[tap])
        if self._bias is not None:
            mixed = mixed + self._bias
        return mixed if self._plan.rule is ScanRule.SHORT_CONVOLUTION else silu(mixed)

    def _factors(self, mixed: Tensor, given: Tensor) -> _Given:
        plan = self._plan
        each = plan.rule is ScanRule.CHANNEL_DELTA
        delta, keys = each or plan.rule is ScanRule.GATED_DELTA, plan.key_heads * plan.key_dim
        values = plan.value_heads * plan.value_dim
        query, key, value = torch.split(mixed, [keys, keys, values], dim=1)
        query, key = (part.reshape(-1, plan.key_heads, plan.key_dim) for part in (query, key))
        if delta:
            query, key = _normalised(query) * plan.query_scale, _normalised(key)
        raw = given[:, mixed.shape[1] + (0 if each else values) :]
        assert self._decay is not None
        assert self._step_bias is not None
        step = softplus(raw[:, -plan.decays :] + self._step_bias, threshold=80.0)
        step = step.view(len(raw), plan.value_heads, -1, 1)
        decay = torch.exp(self._decay[:, None, None] * step)
        if delta:
            step = plan.step_factor * torch.sigmoid(raw[:, : plan.value_heads])[..., None, None]
        value, key = value.reshape(-1, plan.value_heads, plan.value_dim), by_value(plan, key)
        return _Given(
            decay,
            key,
            value.unsqueeze(-2) * step,
            by_value(plan, query),
            key * decay if each else key,
            value,
            (-step if each else -step * decay) if delta else None,
        )

    def _walk(
        self, place: StatePlace, segment: Segment, rows: _Given, folded: int, fold: int
    ) -> Tensor:
        """Return the rows' outputs from the state, which then includes slots up to `fold`."""
        start = segment.start
        state = _through(place.state(), place, range(folded, min(fold, start)))
        if fold == start + segment.count:
            read = []
            for at, states in self._chain(state, rows):
                read.append(self._read(rows, at, states))
                state = states[-1:]
            place.hold(state)
            return torch.cat(read)
        if fold > folded:
            place.hold(state)
        prefix = start if segment.paths is None else segment.paths.prefix
        state = _through(state, place, range(fold, prefix))
        return self._walk_tree(place, segment, rows, state, prefix)

    def _chain(self, state: Tensor, rows: _Given) -> Iterator[tuple[slice, Tensor]]:
        """Yield chunks of consecutive rows, and the states after each."""
        if rows.taken is None:
            first = 0
            for states in _known(state, rows):
                yield slice(first, first + len(states)), states
                first += len(states)
            return
        for first in range(0, len(rows.key), AT_A_TIME):
            at, behind = slice(first, min(first + AT_A_TIME, len(rows.key))), list[Tensor]()
            for row in range(at.start, at.stop):
                state, _ = self._behind(rows, slice(row, row + 1), state)
                behind.append(state)
            yield at, torch.cat(behind)

    def _walk_tree(
        self, place: StatePlace, segment: Segment, rows: _Given, state: Tensor, prefix: int
    ) -> Tensor:
        """Return the inputs of rows that do not enter the state; `state`: after the first `prefix`
        slots."""
        start = segment.start
        levels, below = _levels(segment, prefix), {prefix - 1: state}
        old = sorted({slot for level in levels for slot in level if slot < start})
        kept, where = place.kept(old) if old else None, {slot: i for i, slot in enumerate(old)}
        out, added = torch.empty_like(rows.value), torch.empty_like(rows.added)
        for level in levels:
            below_next = dict[int, Tensor]()
            for own in _pieces(list(level.items()), start):
                parents = [below[node.parent] for _, node in own]
                states = parents[0] if len(own) == 1 else torch.cat(parents)
                if own[0][0] < start:
                    assert kept is not None
                    at = _index([where[slot] for slot, _ in own], states.device)
                    states = _after(kept.key[at] * kept.added[at], states, kept.decay[at])
                else:
                    at = _index([slot - start for slot, _ in own], states.device)
                    states, added[at] = self._behind(rows, at, states)
                    out[at] = self._read(rows, at, states)
                for index, (slot, node) in enumerate(own):
                    if node.inner:
                        below_next[slot] = states[index : index + 1]
            below = below_next
        place.keep(start, rows, added)
        return out

    def _behind(self, rows: _Given, at: slice | Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states [T, value_heads, key_dim, value_dim] after rows, and their
        additions."""
        key, added = rows.key[at], rows.added[at]
        if rows.taken is not None:
            read = (states * rows.looking[at]).sum(-2, keepdim=True)
            added = torch.addcmul(added, read, rows.taken[at])
        return _after(key * added, states, rows.decay[at]), added

    def _read(self, rows: _Given, at: slice | Tensor, states: Tensor) -> Tensor:
        """Return the rows' outputs [T, value_heads, value_dim] from the states after them."""
        read = (states * rows.query[at]).sum(-2)
        if self._skip is None:
            return read
        return torch.addcmul(read, rows.value[at], self._skip.unsqueeze(-1))

    def _finish(self, read: Tensor, gates: Tensor) -> Tensor:
        plan = self._plan
        gates = torch.sigmoid(gates) if plan.rule is ScanRule.CHANNEL_DELTA else silu(gates)
        if plan.gate_first:
            read = read * gates
        if self._norm is not None:
            parts = read.view(len(read), -1, plan.norm_width)
            weight = self._norm.view(-1, plan.norm_width)
            read = (rms_norm(parts, (plan.norm_width,), None, plan.epsilon) * weight).flatten(1)
        return read if plan.gate_first else read * gates


@dataclass
class _Ancestor:
    parent: int
    inner: bool = False  # True if it has children


def _levels(segment: Segment, prefix: int) -> list[dict[int, _Ancestor]]:
    """Return the slots from `prefix` on that rows see, by depth."""
    levels: list[dict[int, _Ancestor]] = []
    start, paths = segment.start, segment.paths
    for row in range(segment.count):
        own = range(start, start + row + 1) if paths is None else paths.row(row).tolist()
        parent = prefix - 1
        for depth, slot in enumerate(own):
            if depth == len(levels):
                levels.append({})
            if depth:
                levels[depth - 1][parent].inner = True
            levels[depth].setdefault(slot, _Ancestor(parent))
            parent = slot
    return levels


def _pieces(
    nodes: Sequence[tuple[int, _Ancestor]], start: int
) -> Iterator[Sequence[tuple[int, _Ancestor]]]:
    """The nodes of a level, some at a time: those of earlier passes, then the rows of this one."""
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
    """An index of rows for tensors on a device; a single row needs no copy to it."""
    if len(rows) == 1:
        return slice(rows[0], rows[0] + 1)
    return torch.tensor(rows).to(device)


def _normalised(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + LEAST)


def _after(outer: Tensor, states: Tensor, decay: Tensor) -> Tensor:
    """Return states [T, value_heads, key_dim, value_dim] after rows that add `outer`."""
    return torch.addcmul(outer, states, decay)


def _through(state: Tensor, place: StatePlace, slots: range) -> Tensor:
    for states in _known(state, place.kept(slots)) if slots else ():
        state = states[-1:]
    return state


def _known(state: Tensor, rows: Factors) -> Iterator[Tensor]:
    """Yield the states after consecutive rows whose additions are known."""
    for first in range(0, len(rows.key), AT_A_TIME):
        at = slice(first, min(first + AT_A_TIME, len(rows.key)))
        outer, decay, states = rows.key[at] * rows.added[at], rows.decay[at], list[Tensor]()
        for row in range(len(outer)):
            state = _after(outer[row : row + 1], state, decay[row : row + 1])
            states.append(state)
        yield torch.cat(states)
