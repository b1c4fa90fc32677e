"""The substitute of a target whose layers a GPU computes: its own matrices in codes, everything
else the target's.

Products go over the codes, by our own over the kernels' layout, or by torch's int4 products: fewer
bits are laid into 4, and 8 are the sum of two products of 4. The layers are `device/layer.py`'s,
over the target's own keys and values; where the target keeps a layer on the device, that is
computed from. A level of a tree is computed in fixed shapes, its rows padded to a power of two, and
captured once for a cache and number of rows. Knows layers, rows and slots; nothing of drafts or
sessions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from dovetail.protocol.errors import SettingsError
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.layer_plan import LayerPlan
from dovetail.workers.models.assembly import assemble
from dovetail.workers.models.backends.device.choice import Product
from dovetail.workers.models.backends.device.layer import DeviceLayer
from dovetail.workers.models.backends.device.own import OwnCodes
from dovetail.workers.models.backends.device.products import rounded_product
from dovetail.workers.models.backends.device.rows import FixedRows
from dovetail.workers.models.backends.fused import Kernels
from dovetail.workers.models.backends.layer_parts import why_not_coded_apart
from dovetail.workers.models.backends.staged import DeviceHead, Staged
from dovetail.workers.models.backends.stages.engines import SettledLayer, TorchEngine
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.checkpoints.context import context_of
from dovetail.workers.models.checkpoints.inflate import inflated_digest
from dovetail.workers.models.checkpoints.loader import open_skeleton
from dovetail.workers.models.families.description import LayerSpec
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Segment
from dovetail.workers.models.states import LAST, Kept
from dovetail.workers.models.substitutes.coded import coded_product
from dovetail.workers.models.substitutes.kept import Substitutes, Tell
from dovetail.workers.models.substitutes.quantize import BITS, Codes

Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""A function of fixed shapes -> one that does the same again, into the same tensor."""
CodesOf = Callable[[nn.Module, int, int], Mapping[nn.Linear, Codes]]
"""The codes of every linear of a layer that has its numbers, and is one of so many."""

TORCHS, OWN = "torch-int4", "own-codes"
"""The names of those who compute products of codes."""
MOST_FIXED_ROWS = 64
"""Passes of more rows are no levels of a tree, and computed as they come."""
SLOTS = 512
"""Attention in fixed shapes reads slots in multiples of it: a session with SubSpec's tree has one
such number or two, and each is captured once."""


@dataclass(frozen=True)
class CodedLayer:
    """A layer of codes on a device."""

    layer: DeviceLayer
    products: Mapping[str, Product]

    def __call__(self, rows: Any, states: Tensor) -> None:
        self.layer.run(rows, states, lambda name, x: self.products[name](x))


@dataclass(frozen=True)
class SharedLayer:
    """A layer that the target keeps on the device; a draft may round what meets its weights."""

    settled: SettledLayer

    def __call__(self, rows: Any, states: Tensor) -> None:
        self.settled.layer.run(
            rows, states, lambda name, x: rounded_product(self.settled.matrices[name], x)
        )


class _Nothing(PackedMatrix):
    """Stands in for a matrix that lies elsewhere, with its shape."""

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k


@dataclass(frozen=True)
class _Level:
    """The inputs of a pass of fixed shape, and the pass."""

    rows: Tensor
    """The cache's, of which the pass has the addresses."""
    states: Tensor
    positions: Tensor
    slots: Tensor
    masks: Mapping[int, Tensor]
    """[T, S] of 0 and -inf."""
    replay: Callable[[], Tensor]


class DeviceSubstitute(Kernels):
    """The layers of a target in codes on the target's device. A `BackEnd`, whose caches are those
    of the target's own stage."""

    backend = "library"
    kernels = TORCHS
    _computes_here = False

    def __init__(
        self,
        model: Any,
        *,
        context: int,
        target: Staged,
        codes_of: CodesOf,
        capture: Capture | None,
    ) -> None:
        """`capture`: what makes a pass of fixed shapes faster; None: nothing does here, and all
        passes are computed as they come."""
        if not target.in_one_stage or not isinstance(target.engine, TorchEngine):
            raise SettingsError(
                "a substitute on a GPU shares with a target of which that GPU computes all "
                "layers: set target.device to it, without target.split"
            )
        if not target.direct:
            raise SettingsError(
                "draft.share = true on a GPU is for models that are embedding, layers, norm "
                "and head, and this one is more: set it to false"
            )
        super().__init__(model, Kind.FP32, context=context)
        self.device = target.engine.device
        self._target, self._engine, self._codes_of, self._capture = (
            target,
            target.engine,
            codes_of,
            capture,
        )
        self._embed = target._model.get_input_embeddings()
        self._codes: Mapping[nn.Linear, Codes] = {}
        self._products: list[Product] = []
        self._coded: list[CodedLayer | SharedLayer] = []
        self._plans: list[LayerPlan] = []
        self._levels: WeakKeyDictionary[KVCache, dict[tuple[int, int], _Level]] = (
            WeakKeyDictionary()
        )

    @property
    def shared(self) -> int:
        """Return how many layers are the target's own."""
        return sum(isinstance(layer, SharedLayer) for layer in self._coded)

    @property
    def captured(self) -> int:
        """Caches for which levels are captured."""
        return len(self._levels)

    def _lacking(self, spec: LayerSpec) -> str:
        return why_not_coded_apart(spec)

    def take_layer(self, layer: nn.Module, index: int) -> nn.Module:
        self._codes = (
            {}
            if index in self._target.settled
            else self._codes_of(layer, index, self._model.config.num_hidden_layers)
        )
        taken = super().take_layer(layer, index)
        self._codes = {}
        return taken

    def finish(self, model: Any) -> None:
        """Embedding, norm and head are the target's."""
        model.set_input_embeddings(self._embed)
        self._norm, self._head = self._target._norm, self._target._head

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for `capacity` rows."""
        cache = self._engine.new_cache(self._plans, capacity, self._target._cache)
        assert isinstance(cache, KVCache)
        return cache

    def compute(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Sequence[Segment],
        rows: Tensor | None,
        kept: Kept,
    ) -> Tensor:
        """Logits [R, V] of a pass, on the device."""
        states = self._embed(tokens).float().to(self.device)
        if (
            self._capture is not None
            and len(segments) == 1
            and segments[0].paths is not None
            and len(tokens) <= MOST_FIXED_ROWS
            and not kept.wanted
        ):
            logits = self._level(states, positions, segments[0])
            return logits if rows is None else logits[rows.to(self.device)]
        seen = self._engine.see(positions, segments)
        for index, layer in enumerate(self._coded):
            kept.keep(index, states)
            layer(seen, states)
        if LAST in kept.wanted:
            kept.keep_last(self._norm(states))
        return self._logits(states if rows is None else states[rows.to(self.device)])

    def _logits(self, states: Tensor) -> Tensor:
        head, states = self._head, self._norm(states)
        logits: Tensor = head.roughly(states) if isinstance(head, DeviceHead) else head(states)
        return logits

    def _pack_layer(self, kind: Kind, linears: Sequence[nn.Linear]) -> PackedMatrix:
        outputs, inputs = sum(part.out_features for part in linears), linears[0].in_features
        if self._codes:
            made = coded_product(
                [self._codes[part] for part in linears],
                [part.bias for part in linears],
                self.device,
                self._engine.products,
            )
            self.kernels = OWN if isinstance(made, OwnCodes) else TORCHS
            self._products.append(made)
        for part in linears:
            part.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        return _Nothing(outputs, inputs)

    def _take(self, plan: LayerPlan) -> None:
        """The layer whose matrices have just been laid out, in the order of a plan."""
        if plan.index in self._target.settled:
            self._coded.append(SharedLayer(self._target.settled[plan.index]))
        else:
            self._engine.take(plan)
            products = dict(zip(("qkv", "output", "gate_up", "down"), self._products, strict=True))
            self._coded.append(CodedLayer(DeviceLayer(plan, self.device), products))
        self._plans.append(plan)
        self._products.clear()

    def _level(self, states: Tensor, positions: Tensor, segment: Segment) -> Tensor:
        """A pass in fixed shapes. Rows of padding are the last one once more: they write the same
        to the same slot."""
        cache, paths, count = segment.cache, segment.paths, segment.count
        assert isinstance(cache, KVCache)
        assert paths is not None
        rows = 1 << (count - 1).bit_length()
        stop = max(segment.start + count, int(paths.slots.max()) + 1)
        level = self._opened(cache, rows, min(-(-stop // SLOTS) * SLOTS, cache.rows.shape[3]))
        lengths = np.diff(paths.offsets)
        which = torch.from_numpy(np.repeat(np.arange(count), lengths))
        slots = torch.from_numpy(paths.slots.astype(np.int64))
        at = torch.from_numpy(
            np.concatenate([paths.prefix + np.arange(length) for length in lengths])
        )
        level.states[:count] = states
        level.positions[:count] = positions.to(self.device)
        level.slots[:count] = torch.arange(segment.start, segment.start + count, device=self.device)
        for tensor in (level.states, level.positions, level.slots):
            tensor[count:] = tensor[count - 1]
        for window, mask in level.masks.items():
            mask.fill_(float("-inf"))
            oldest = positions - window + 1 if window else torch.zeros_like(positions)
            mask[:count, : paths.prefix] = _seen_before(paths.prefix, oldest, self.device)
            inside = at >= oldest[which]
            mask[which[inside].to(self.device), slots[inside].to(self.device)] = 0.0
            mask[count:] = mask[count - 1]
        return level.replay()[:count].clone()

    def _opened(self, cache: KVCache, rows: int, slots: int) -> _Level:
        """The pass of so many rows over so many slots of a cache, captured where it has not been
        since the cache moved."""
        levels = self._levels.setdefault(cache, {})
        if (rows, slots) not in levels or levels[rows, slots].rows is not cache.rows:
            levels[rows, slots] = self._open(cache, rows, slots)
        return levels[rows, slots]

    def _open(self, cache: KVCache, rows: int, slots: int) -> _Level:
        device, plan = self.device, self._plans[0]
        states = torch.zeros(rows, self._model.config.hidden_size, device=device)
        positions = torch.zeros(rows, dtype=torch.long, device=device)
        # until it is filled, all rows write the last slot, which nobody else writes while this is
        # captured, and see it alone
        free = torch.full((rows,), slots - 1, device=device)
        masks = {
            window: torch.full((rows, slots), float("-inf"), device=device)
            for window in {plan.window for plan in self._plans}
        }
        for mask in masks.values():
            mask[:, -1] = 0.0
        written = cache.rows
        held = written[:, :, :, slots - 1].clone()
        groups = plan.heads // plan.kv_heads

        def run() -> Tensor:
            seen = FixedRows(
                self._engine.turn(positions),
                written,
                free,
                {window: mask.repeat(groups, 1) for window, mask in masks.items()},
                by=self._engine.by,
            )
            passing = states.clone()
            for layer in self._coded:
                layer(seen, passing)
            return self._logits(passing)

        assert self._capture is not None
        replay = self._capture(run)
        written[:, :, :, slots - 1] = held
        return _Level(written, states, positions, free, masks, replay)


def _seen_before(prefix: int, oldest: Tensor, device: torch.device) -> Tensor:
    """[T, prefix], or [1, prefix] where all is seen: 0 where a row sees a slot of the prefix, -inf
    where that lies before the oldest that it sees."""
    if not int(oldest.max()) > 0:
        return torch.zeros(1, prefix, device=device)
    before = torch.arange(prefix, device=device) < oldest.to(device).unsqueeze(1)
    return torch.zeros(len(oldest), prefix, device=device).masked_fill_(before, float("-inf"))


def load_device_substitute(
    target: LanguageModel,
    capture: Capture | None,
    *,
    weights: str,
    inflate_bytes: int = 0,
    folder: Path | None = None,
    tell: Tell = lambda _done, _all: None,
) -> tuple[LanguageModel, Substitutes, int]:
    """The substitute of a target, on the device that computes that and with all but its codes
    shared, what was quantised for it, and how many layers are the target's own.

    `capture`: see `DeviceSubstitute`. `folder`: of the caches of codes.
    """
    whole, checkpoint = target.back_end, target.checkpoint
    if not isinstance(whole, Staged):
        raise SettingsError(
            "draft.share = true on a GPU needs a target that is made of the kernels' layers, "
            f"and {target.choice}: set draft.share to false"
        )
    device = whole.engine.device
    digest = inflated_digest(checkpoint.digest, inflate_bytes)
    substitutes = Substitutes(digest, BITS[weights], folder, tell, device)

    def open_back_end(model: Any, _plan: Any) -> DeviceSubstitute:
        return DeviceSubstitute(
            model,
            context=context_of(model.config),
            target=whole,
            codes_of=substitutes.of_layer,
            capture=capture,
        )

    model = assemble(
        open_skeleton(checkpoint),
        checkpoint,
        weights=weights,
        choice=f"torch computes it on {device}",
        inflate_bytes=inflate_bytes,
        open_back_end=open_back_end,
    )
    model.device = device
    assert isinstance(model.back_end, DeviceSubstitute)
    return model, substitutes, model.back_end.shared
