"""transformers' eager forward as the oracle of a load: each layer's inputs, results and masks at
positions over the whole context. A few runs of positions stand for it: the beginning, around every
configured number that may be a position, and the end. Masks are built for true lengths, and reduced
to existing rows, so that position 131071 takes two dozen rows. Importing it imports
transformers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.workers.models import attention
from dovetail.workers.models.attention import Masks, Noted, Notes
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.checkpoints.configured import quiet
from dovetail.workers.models.parity.following import (
    EAGER,
    UNFOLLOWED,
    Call,
    Path,
    Recorder,
    UnprovableError,
    cache_name,
    first_of,
    follow,
    foreign,
    implementation,
    runs_of,
)
from dovetail.workers.models.segment import Paths, Segment
from dovetail.workers.models.transformers import DynamicCache


class ClaimedCache(DynamicCache):  # type: ignore[misc]
    """A cache that claims `length` rows, from which transformers builds masks, and stores none."""

    def __init__(self, length: int | Tensor) -> None:
        """`length`: int64 [rows], one for each row, if it is only added to a row's number."""
        super().__init__()
        self._length = length
        self.asked = False  # True if the number of rows was asked for

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        self.asked = True
        return self._length

    def get_query_offset(self, layer_idx: int = 0) -> int | Tensor:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int | Tensor, int]:
        return self._length + query_length, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *unused: Any, **also_unused: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_conv_state(self, *unused: Any, **also_unused: Any) -> None:
        """Return nothing: rows are the first of their states."""

    def update_conv_state(self, states: Tensor, *unused: Any, **also_unused: Any) -> Tensor:
        return states

    def get_recurrent_state(self, *unused: Any, **also_unused: Any) -> None:
        """Return nothing: rows are the first of their states."""

    def update_recurrent_state(self, states: Tensor, *unused: Any, **also_unused: Any) -> Tensor:
        return states


class ProofCache(KVCache):
    """The keys and values of a proof, with whatever heads a layer has."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, key: Tensor, value: Tensor, start: int) -> None:
        if layer not in self._rows:
            self._rows[layer] = tuple(
                part.new_zeros(part.shape[0], self.capacity, part.shape[2]) for part in (key, value)
            )  # type: ignore[assignment]
        for kept, new in zip(self._rows[layer], (key, value), strict=True):
            kept[:, start : start + new.shape[1]] = new

    def view(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        keys, values = self._rows[layer]
        return keys[:, start:stop], values[:, start:stop]


CHANGING = ("dynamic", "longrope")  # rotations that may depend on the longest sequence
SAME = 1e-5  # tolerance of a layer's inputs with other rows in the batch: rounding only


class Comparison:
    """Tensors that layers are given for the same rows in different passes, compared once each."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._same: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """Compared pairs by address, kept so that addresses are not reused."""

    def compare(self, part: Call, whole: Call, count: int, first: int, rows: int) -> None:
        """`UnprovableError` if a layer gets other numbers for the same rows in a larger batch,
        except masks."""
        others = dict(whole.leaves())
        for path, tensor in part.leaves():
            other = others.get(path)
            key = (id(tensor), id(other))
            if other is None or tensor.ndim == 4 or key in self._same:
                continue
            axes = [
                axis
                for axis, size in enumerate(tensor.shape)
                if (size, other.shape[axis : axis + 1]) == (count, (rows,))
            ]
            beside = other.narrow(axes[0], first, count) if axes else other
            if beside.shape != tensor.shape:
                text = f"transformers gives a layer {named_path(path)} {list(tensor.shape)}"
                raise UnprovableError(f"{text}, which is not one row for each token")
            self._same[key] = (tensor, other)
            if tensor.is_floating_point() or tensor.is_complex():
                far = (tensor - beside).abs() > SAME
                if bool(far.any()):
                    raise UnprovableError(self._why(path))
            elif not torch.equal(tensor, beside):
                raise UnprovableError(self._why(path))

    def _why(self, path: Path) -> str:
        kind = self._config.model_type
        if (
            any("position_embeddings" in str(name) or "rot" in str(name) for name in path)
            or "args" in path
        ):
            rope = getattr(self._config, "rope_parameters", None) or {}
            kinds = sorted(
                {
                    str(part["rope_type"])
                    for part in (rope, *rope.values())
                    if isinstance(part, dict) and "rope_type" in part
                }
            )
            changing = [part for part in kinds if part in CHANGING]
            named = f" of type {' and '.join(changing or kinds)}" if kinds else ""
            return (
                f"rotary embeddings{named} ({kind}) are not supported: they depend on the "
                "longest sequence of a pass"
            )
        return (
            f"what transformers gives to the layers of a {kind} model ({named_path(path)}) "
            "depends on the other rows of a pass"
        )


def near(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=SAME, atol=SAME))


def named_path(path: Path) -> str:
    return ".".join(map(str, path))


attention.register()  # transformers' models are imported with this module
HIDDEN = -1e4  # the most that eager attention adds to the score of what a row does not see
LENGTHS = (0, 1, 2)  # in tuples of transformers' layers: states, and attention's weights
LEAST_ADDED = 1e-3  # layers that add less than this share of the states are measured by the states


class Oracle:
    """The layers of one model at the positions of a proof."""

    def __init__(self, model: Any, layers: Iterable[nn.Module], context: int) -> None:
        """`model`: with all numbers but the layers'. `UnprovableError` if a layer's inputs depend
        on other rows of the pass."""
        self._model, self._layers, self.config = model, list(layers), model.config
        self.runs = runs_of(model.config.to_dict(), context)
        self.positions = torch.cat([torch.arange(run.first, run.stop) for run in self.runs])
        self.count = len(self.positions)
        self.dense = self.runs[0].count
        size = model.get_input_embeddings().weight.shape[0]
        self.tokens = torch.randint(size, (self.count,), generator=torch.Generator().manual_seed(1))
        self._assembled: dict[tuple[int, ...], Tensor] = {}
        self._checked: set[tuple[tuple[int, ...], int | None, int]] = set()
        self._comparison = Comparison(model.config)
        with foreign(UnprovableError, UNFOLLOWED):
            self._record()

    @property
    def pass_positions(self) -> Tensor:
        """Return the positions of our own pass: the beginning as another session, then all."""
        return torch.cat([self.positions[: self.dense], self.positions])

    @property
    def pass_tokens(self) -> Tensor:
        """The tokens of the rows of our own pass."""
        return torch.cat([self.tokens[: self.dense], self.tokens])

    def _record(self) -> None:
        """Run the model's forward around its layers: eagerly by run, whole, and for two rows, and
        by ours."""
        offsets = list(accumulate((run.count for run in self.runs), initial=0))
        parts = [
            slice(first, first + run.count) for first, run in zip(offsets, self.runs, strict=False)
        ]
        self.tuples = 0  # the parts of the tuples that its layers give; 0: they give states alone
        with self.eagerly():
            for self.tuples in LENGTHS:
                try:
                    pairs = zip(self.runs, parts, strict=True)
                    self._of_runs = [self._called(p, ClaimedCache(r.first)) for r, p in pairs]
                    break
                except UnprovableError:
                    if self.tuples == LENGTHS[-1]:
                        raise
            self._whole = self._called(slice(0, self.count), ClaimedCache(0))
            shortest = self._called(slice(0, 2), ClaimedCache(0))  # at 0 nothing is rotated
            self._check_positions()
        self.isolated, self.last, self.final = (
            self._whole.isolated,
            self._whole.results[-1],
            self._whole.final,
        )
        ours: dict[str, Any] = {"blocks": (), "notes": None}
        rows = (self.pass_tokens, self.pass_positions)
        with implementation(self._model, attention.IMPLEMENTATION, *self._layers):
            self._ours = self._called_with(*rows, None, **ours)
        for index in range(len(self._layers)):
            self._comparison.compare(
                shortest.calls[index], self._whole.calls[index], 2, 0, self.count
            )
            for run, part, calls in zip(self.runs, parts, self._of_runs, strict=True):
                self._comparison.compare(
                    calls.calls[index], self._whole.calls[index], run.count, part.start, self.count
                )
            self._comparison.compare(
                self._whole.calls[index],
                self._ours.calls[index],
                self.count,
                self.dense,
                self.dense + self.count,
            )

    @contextmanager
    def eagerly(self, *modules: nn.Module) -> Iterator[None]:
        """Use transformers' own attention in the model and other modules, temporarily."""
        with implementation(self._model, EAGER, *self._layers, *modules):
            yield

    def _called(self, part: slice, cache: ClaimedCache) -> Recorder:
        return self._called_with(self.tokens[part], self.positions[part], cache)

    def _called_with(
        self, tokens: Tensor, positions: Tensor | None, cache: ClaimedCache | None, **given: Any
    ) -> Recorder:
        recorder = Recorder(self._layers, tuples=self.tuples)
        follow(self._model, recorder, tokens, positions, cache, **given)
        return recorder

    def _check_positions(self) -> None:
        """`UnprovableError` unless tokens are numbered 0, 1, 2, ..., and positions can be given."""
        tokens, positions = self.tokens[: self.dense], self.positions[: self.dense]
        ways: list[tuple[Tensor, Tensor | None]] = [
            (tokens, positions),
            (tokens, None),
            (tokens.flip(0), positions.flip(0)),
        ]
        given, own, turned = (
            self._called_with(rows, places, None).calls[0] for rows, places in ways
        )
        others = dict(own.leaves())
        same = all(
            path in others and near(tensor, others[path])
            for path, tensor in given.leaves()
            if tensor.is_floating_point()
        )
        if not (same and near(given.states, own.states)):
            raise UnprovableError("it does not number tokens by 0, 1, 2, ..., as sessions do")
        if given.states.dim() != 3:
            shape = [*given.states.shape]
            raise UnprovableError(f"its layers return {shape}, not one row for each token")
        if not near(given.states, turned.states.flip(1)):
            raise UnprovableError("it numbers tokens itself, but branches share positions")

    # what a row sees

    def masks(self, index: int) -> Sequence[Tensor | None]:
        """Return a layer's mask [1, heads or 1, count, stop] for each run."""
        found: list[Tensor | None] = []
        for run, calls in zip(self.runs, self._of_runs, strict=True):
            shape = (run.count, run.stop)
            leaves = [
                leaf
                for _, leaf in calls.calls[index].leaves()
                if leaf.ndim == 4 and tuple(leaf.shape[-2:]) == shape
            ]
            if len(set(map(id, leaves))) > 1:
                raise UnprovableError(f"layer {index} has several masks, which is not supported")
            found.append(leaves[0] if leaves else None)
        return found

    def check_window(self, index: int, window: int | None, chunk: int = 0) -> None:
        """`UnprovableError` unless rows see themselves and the window - 1 before, everywhere; None:
        all before, or back to a multiple of `chunk`."""
        masks = self.masks(index)
        key = (tuple(map(id, masks)), window, chunk)
        if key in self._checked:
            return
        if window is not None and window < 1:
            raise UnprovableError(f"layer {index} has a window of {window} positions")
        for run, mask in zip(self.runs, masks, strict=True):
            if mask is None:
                continue  # the layer masks later rows in its own way, and is compared
            seen = _visible(mask, index)
            row, slot = torch.arange(run.first, run.stop).unsqueeze(1), torch.arange(run.stop)
            expected = (slot <= row) & (slot > row - (run.stop if window is None else window))
            if chunk:
                expected &= slot >= row - row % chunk
            if not torch.equal(seen, expected.expand(seen.shape)):
                wrong = run.first + int(
                    (seen != expected).flatten(0, -3).any(0).any(-1).nonzero()[0]
                )
                which = "without a window" if window is None else f"with a window of {window}"
                layer = f"layer {index} ({type(self._layers[index]).__name__})"
                text = f"the mask of position {wrong} does not match attention {which}"
                raise UnprovableError(f"{layer}: {text}, which is not supported")
        self._checked.add(key)

    def visible(self, index: int) -> list[list[int]]:
        """For each row, in order, which of the existing rows it sees."""
        mask = self._mask(index)
        if mask is None:
            return [list(range(row + 1)) for row in range(self.count)]
        seen = _visible(mask, index).flatten(0, -3)[0]
        return [sorted({*seen[row].nonzero().flatten().tolist(), row}) for row in range(self.count)]

    def _mask(self, index: int) -> Tensor | None:
        """[1, 1, count, count]: of the masks of all runs, the columns of the rows that exist."""
        masks = self.masks(index)
        if any(mask is None for mask in masks):
            return None
        key = tuple(map(id, masks))
        if key not in self._assembled:
            first = masks[0]
            assert first is not None
            hidden = False if first.dtype == torch.bool else torch.finfo(first.dtype).min
            whole = torch.full(
                (*first.shape[:2], self.count, self.count), hidden, dtype=first.dtype
            )
            row = 0
            for run, mask in zip(self.runs, masks, strict=True):
                assert mask is not None
                exist = self.positions[: row + run.count]
                whole[:, :, row : row + run.count, : len(exist)] = mask[..., exist]
                row += run.count
            self._assembled[key] = whole
        return self._assembled[key]

    def segments(self, index: int, cache: Callable[[int], Any]) -> list[Segment]:
        """Return the segments of our own pass: the beginning, and all rows by what they see."""
        first = Segment(cache(self.dense), 0, self.dense)
        return [first, Segment(cache(self.count), 0, self.count, Paths.of(0, self.visible(index)))]

    # a layer's output for it

    def states(self, index: int) -> Tensor:
        """Random states [count, hidden] for a layer, the same every time."""
        width = self.last.shape[-1]
        return torch.randn(self.count, width, generator=torch.Generator().manual_seed(1000 + index))

    def run_eager(
        self, layer: nn.Module, index: int, states: Tensor, *, counts: bool = False
    ) -> Tensor:
        """Return transformers' layer of states [count, hidden]. `counts`: the layer may number rows
        by the cache's length."""
        results: list[Tensor] = []
        for length in (0, int(self.positions[-1]) + 1, ahead_of(self.positions)):
            cache = ClaimedCache(length)
            args, kwargs = self.arranged(index, cache).of(states.unsqueeze(0))
            with self.eagerly(layer):
                results.append(first_of(layer(*args, **kwargs)))
            if not cache.asked or (len(results) == 2 and torch.equal(*results)):
                return results[0]
            if len(results) == 2 and not counts:
                text = f"layer {index} ({type(layer).__name__}) counts the rows of transformers'"
                raise UnprovableError(f"{text} cache, although positions are given")
        return results[-1]

    def arranged(self, index: int, cache: Any) -> Call:
        """The call of a layer for all rows, with the true mask of those there and another cache."""
        call, mask = self._whole.calls[index], self._mask(index)
        shape = (self.count, self.count)

        def change(value: Any) -> Any:
            if isinstance(value, ClaimedCache):
                return cache
            if (
                mask is not None
                and isinstance(value, Tensor)
                and value.ndim == 4
                and tuple(value.shape[-2:]) == shape
            ):
                return mask
            return value

        return Call(
            tuple(map(change, call.args)),
            {name: change(value) for name, value in call.kwargs.items()},
        )

    def run_ours(
        self, layer: nn.Module, index: int, states: Tensor, notes: Notes, *, handed: bool = False
    ) -> Tensor:
        """Return a layer of our own pass [dense + count, hidden] with our attention, whose call
        goes to `notes`; `handed`: past layers that drop arguments."""
        masks = Masks(groups=1, device=torch.device("cpu"), dtype=torch.float32)

        def note(noted: Noted, *given: Tensor) -> None:
            masks.groups = noted.heads // noted.kv_heads
            notes(noted, *given)

        blocks = attention.arrange(self.segments(index, ProofCache), masks)
        rows = torch.cat([states[: self.dense], states]).unsqueeze(0)
        call, changed = self._ours.calls[index], dict[str, Any]()
        if handed and (name := cache_name(self._model)) in call.kwargs:
            changed[name] = ClaimedCache(ahead_of(self.pass_positions))
        args, kwargs = call.of(rows, blocks=blocks, notes=note, **changed)
        past_the_layer = attention.handing(blocks, note) if handed else nullcontext()
        ours = implementation(self._model, attention.IMPLEMENTATION, layer)
        with ours, past_the_layer, quiet():
            return first_of(layer(*args, **kwargs))

    def compare(
        self,
        error: type[Exception],
        what: str,
        expected: Tensor,
        found: Tensor,
        tolerance: float,
        *,
        states: Tensor | None = None,
        compared: Tensor | None = None,
    ) -> None:
        """Raise `error`, "`what` from transformers'", for the first position where [count, n] and
        found (or [dense + count, n], of our own pass) differ by more than `tolerance` of expected
        rows, or of what a layer adds to `states`; `compared`, bool [count]: of these rows. NaN is
        far."""
        measure, of = expected.norm(dim=-1), "(relative)"
        if states is not None:
            measure, of = (expected - states).norm(dim=-1), "of what it adds"
            measure = measure + LEAST_ADDED * states.norm(dim=-1)
        if compared is not None:
            measure = measure.where(compared, torch.inf)
        if len(found) > self.count:
            expected, measure = (
                torch.cat([part[: self.dense], part]) for part in (expected, measure)
            )
        shares = ((found - expected).norm(dim=-1) / (measure + 1e-20)).nan_to_num(nan=float("inf"))
        positions = self.pass_positions[-len(shares) :].tolist()
        both = zip(positions, shares.tolist(), strict=True)
        wrong = min(((place, share) for place, share in both if share > tolerance), default=None)
        if wrong is not None:
            where = f"at position {wrong[0]} by {wrong[1]:.1e} {of}"
            raise error(f"{what} from transformers' {where}")


def ahead_of(positions: Tensor) -> Tensor:
    """Return for each of these positions how many rows precede those of the pass."""
    return positions - torch.arange(len(positions))


def _visible(mask: Tensor, index: int) -> Tensor:
    """Return what an eager mask shows, bool; `UnprovableError` if it does more than hide."""
    if mask.dtype == torch.bool:
        return mask
    if not bool(((mask == 0.0) | (mask <= HIDDEN)).all()):
        raise UnprovableError(f"layer {index} adds to scores, which is not supported")
    return mask == 0.0
