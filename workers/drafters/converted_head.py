"""A head whose levels of fixed shape another library computes: the part from the embeddings to the
logits is converted once, compared with torch's, and used in its place. torch computes prompts and
all else.

Knows tensors and shapes; nothing of the library.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.devices.base import Conversion, Device
from dovetail.workers.heads.arithmetic import FixedRows
from dovetail.workers.heads.arithmetic.on_torch import TorchArithmetic, TorchRows
from dovetail.workers.heads.checkpoint import open_head_checkpoint
from dovetail.workers.heads.head import Head, Predicted, geometry_of
from dovetail.workers.heads.parts import Inputs
from dovetail.workers.models.backends.device.arenas import ArenaCache
from dovetail.workers.models.backends.device.fixed import SLOTS
from dovetail.workers.models.backends.device.rows import PlacedRows
from dovetail.workers.models.imports.stand_ins import make_room

ROWS = 16
"""Rows of a level for which a head is converted; no level of the usual trees is wider."""
ROW_INPUTS = 4
"""The inputs, from the first on, that have as many rows as the level: embeddings, features,
positions, slots."""
COMPARED = ("logits", "states", "keys and values", "logits of the contrast")
Compute = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class WrittenRows(TorchRows):
    """The rows of a level that leave the cache as it is, and note what is to be written to it."""

    written: list[Tensor] = field(default_factory=list)
    """[2, kv_heads, T, head_dim] of each layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        assert isinstance(self.rows, FixedRows)
        assert isinstance(self.rows.memory, Tensor)
        self.written.append(torch.stack((key, value)))
        memory = self.rows.memory[layer].index_copy(2, self.rows.slots, self.written[-1])
        return self.attend_fixed(query, memory[0], memory[1], self.rows.mask, scale)


class _Level(nn.Module):
    """A level as a function of tensors alone."""

    def __init__(self, head: Head, *, true: bool, contrast: bool) -> None:
        super().__init__()
        self._head, self._true, self._contrast = head, true, contrast

    def forward(
        self,
        embedded: Tensor,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        mask: Tensor,
        memory: Tensor,
    ) -> tuple[Tensor, ...]:
        """Compute T rows over S slots: what `Head.score` returns of all of them, and what is to be
        written to the cache, [layers, 2, kv_heads, T, head_dim]."""
        arranged = self._head.arrange(positions, FixedRows(memory, slots, mask))
        seen = WrittenRows(arranged.cosines, arranged.sines, arranged.rows)
        inputs = Inputs(embedded, features, seen, None, self._contrast, self._true)
        scored = self._head.score(inputs)
        written = torch.stack(seen.written)
        later = () if scored.contrast is None else (scored.contrast,)
        return scored.logits, scored.states, written, *later


class ConvertedHead(Head):
    """A head with converted levels."""

    def __init__(self, *given: Any, conversion: Conversion, place: str, **options: Any) -> None:
        """`conversion`: that of the device `place`; the rest is `Head`'s. `CheckpointError` where
        the device does not compute what torch does."""
        super().__init__(*given, **options)
        self._conversion, self._place = conversion, place
        self._levels: dict[tuple[bool, bool, tuple[int, int]], Compute] = {}
        self.arithmetic = f"{place}, and torch for prompts"
        self._alike = self.spec.feature_width == self.spec.hidden and all(
            torch.equal(*pair)
            for pair in zip(self._sample(true=False), self._sample(true=True), strict=True)
        )
        """True if the head computes rows that read the target's features as it does those of a
        tree."""
        make_room()
        self._check()

    @torch.inference_mode()
    def step(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        mask: Tensor,
        memory: Tensor | PlacedRows,
        *,
        true: bool = False,
        rows: Tensor | None = None,
        contrast: bool = False,
    ) -> Predicted:
        assert isinstance(memory, Tensor)
        contrast = contrast and self.spec.contrast
        embedded = self.embed(tokens)
        given = (embedded, features, positions, slots, mask, memory)
        logits, states, written, *later = self._level(given, true=true, contrast=contrast)
        memory.index_copy_(3, slots, written[..., : len(slots), :])
        kept = slice(len(tokens)) if rows is None else rows
        spread = [self.spread(part[kept]) for part in (logits, *later)]
        return Predicted(spread[0], states[kept], spread[1] if later else None)

    def _level(self, given: Sequence[Tensor], *, true: bool, contrast: bool) -> Sequence[Tensor]:
        """Compute a level, which is converted at the first call. One conversion serves all shapes,
        unless the device wants them fixed: then each has its own, with rows added up to `ROWS`."""
        grows, count, (*_, memory) = self._conversion.grows, len(given[0]), given
        true = true and not self._alike
        shape = (0, 0) if grows else (max(ROWS, count), memory.shape[3])
        if not grows:
            given = [*_padded(given, shape[0])]
        if (key := (true, contrast, shape)) not in self._levels:
            free: list[list[int]] = [[0]] * ROW_INPUTS + [[0, 1], [3]]
            module = _Level(self, true=true, contrast=contrast)
            convert = self._conversion.convert
            self._levels[key] = convert(module, given, free if grows else [[]] * len(given))
        return self._levels[key](given)

    def _check(self) -> None:
        """Compare levels of every kind with torch's; `CheckpointError` where they differ."""
        allowed, contrasts = self._conversion.tolerance, {False, self.spec.contrast}
        for true, contrast in product({False, not self._alike}, contrasts):
            expected = self._sample(true=true, contrast=contrast)
            found = self._sample(self.step, true=true, contrast=contrast)
            for name, ours, theirs in zip(COMPARED, found, expected, strict=False):
                apart = float((ours - theirs).abs().max() / theirs.abs().max())
                if not apart <= allowed:
                    raise CheckpointError(
                        f"{self._place} does not compute {self.source} as torch does: its {name} "
                        f"differ by {apart:.1e} of the largest, and {allowed:.0e} is "
                        "allowed; use draft.device cpu"
                    )

    def _sample(
        self, step: Callable[..., Predicted] | None = None, *, true: bool, contrast: bool = False
    ) -> Sequence[Tensor]:
        """Return what a level of random rows gives and writes, in the order of `COMPARED`, by
        torch's `step` or another."""
        generator, spec = torch.Generator().manual_seed(1), self.spec
        cache = self.new_cache(SLOTS)
        assert isinstance(cache, ArenaCache)
        memory = torch.randn(cache.rows.shape, generator=generator)
        count, used = ROWS // 2, SLOTS // 2
        slots = torch.arange(used, used + count)
        mask = torch.full((count, SLOTS), -torch.inf)
        mask[:, :used] = 0.0
        mask[torch.arange(count), slots] = 0.0
        found = (step or partial(Head.step, self))(
            torch.randint(0, self.vocabulary_size, (count,), generator=generator),
            torch.randn(count, spec.feature_width if true else spec.hidden, generator=generator),
            slots,
            slots,
            mask,
            memory,
            true=true,
            contrast=contrast,
        )
        known = found.logits[0].isfinite()
        later = [] if found.contrast is None else [found.contrast[:, known]]
        return [found.logits[:, known], found.states, memory, *later]


def _padded(given: Sequence[Tensor], rows: int) -> Iterator[Tensor]:
    """Yield the inputs of a level with its last row repeated, up to so many rows: the repeated rows
    write the same to the same slot."""
    *by_row, memory = given
    for part in by_row:
        more = rows - len(part)
        yield torch.cat([part, part[-1:].expand(more, *part.shape[1:])]) if more else part
    yield memory


def open_converted_head(
    source: str, *, target: str, weights: str, device: Device, allow_bin: bool = False
) -> ConvertedHead:
    """Open a head as `open_head` does, with levels that are converted for a device."""
    assert device.conversion is not None
    if weights in ("int8", "int4"):
        raise CheckpointError(
            f"there are no {weights} weights of a head on {device.name}: use fp32, fp16 or bf16"
        )
    checkpoint = open_head_checkpoint(source, target=target, weights=weights, allow_bin=allow_bin)
    arithmetic = TorchArithmetic(
        geometry_of(checkpoint),
        weights=weights,
        device=device.torch_device,
        cached=torch.float32,
        slots=SLOTS,
    )
    return ConvertedHead(
        checkpoint, arithmetic, weights=weights, conversion=device.conversion, place=device.name
    )
