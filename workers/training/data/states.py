"""Computes the target's hidden states that draft heads are trained on, for whole sequences, several
in a pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dovetail.protocol.errors import CheckpointError, UserError
from dovetail.workers.devices.opening import open_device
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from dovetail.workers.models.states import LAST
from dovetail.workers.sessions.wire import narrowed

HalfType = Literal["float16", "bfloat16"]
DTYPES: dict[HalfType, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16}
PASS_ROWS = 512
"""Tokens of a pass: enough to be compute-bound, few enough that activations stay small."""


@dataclass(frozen=True)
class Origin:
    """The origin of states: their target and layers."""

    target: str  # a folder or a hub id
    digest: str  # the digest of its checkpoint
    width: int
    layers: int
    vocabulary_size: int
    context: int  # tokens of the longest sequence
    taps: tuple[int, ...]
    """Layers whose input residual streams follow the last hidden state, in this order."""
    dtype: HalfType
    weights: str = "unknown"  # the type of the target's weights; earlier versions did not store it

    @property
    def row(self) -> int:
        """Numbers of a token's states: the last hidden state after the final norm, then the
        taps."""
        return self.width * (1 + len(self.taps))


def choose_taps(asked: str, layers: int) -> tuple[int, ...]:
    """Return the layers that `auto` (EAGLE-3's low, middle and high), `none` or a list such as
    `2,4,5` means for a target with this many layers."""
    if asked == "none":
        return ()
    if asked == "auto":
        if not 2 < layers // 2 < layers - 3:
            raise UserError(
                f"taps auto are layers 2, {layers // 2} and {layers - 3} of {layers}, which are "
                "not ascending; name them, such as --taps 0,1"
            )
        return 2, layers // 2, layers - 3
    try:
        taps = tuple(int(part) for part in asked.split(","))
    except ValueError:
        raise UserError(
            f"--taps {asked} is neither auto nor none nor a list of layers such as 2,4,5"
        ) from None
    if any(not 0 <= tap <= layers for tap in taps) or len(set(taps)) < len(taps):
        raise UserError(f"--taps {asked} must be different numbers from 0 to {layers}")
    return taps


def ready_device(name: str) -> str:
    """Return the name of a device, set up for this process with torch's number of threads. Raises
    `UserError` if it does not exist."""
    return open_device(name, torch.get_num_threads()).name


def open_states(
    target: str,
    *,
    taps: str = "auto",
    context: int | None = None,
    dtype: HalfType | None = None,
    weights: str = "fp32",
    device: str = "cpu",
) -> "TargetStates":
    """Load a target to compute states: `taps` as in `choose_taps`, `context` the tokens of the
    longest sequence (None: the target's own). `dtype` None: bfloat16 if the checkpoint's matrices
    are, else float16."""
    model = load_language_model(target, weights=weights, device=device, proof="auto")
    if context is not None and not 2 <= context <= model.context:
        raise UserError(f"--context {context} must lie between 2 and the target's {model.context}")
    kinds = {stored.kind for stored in model.checkpoint.tensors.values() if len(stored.shape) == 2}
    origin = Origin(
        target=str(Path(target).resolve()) if Path(target).exists() else target,
        digest=model.checkpoint.digest,
        width=model.hidden_size,
        layers=model.layers,
        vocabulary_size=model.vocabulary_size,
        context=context or model.context,
        taps=choose_taps(taps, model.layers),
        dtype=dtype or ("bfloat16" if kinds == {"BF16"} else "float16"),
        weights=model.weights,
    )
    return TargetStates(model, origin)


class TargetStates:
    """A target that computes states."""

    def __init__(self, model: LanguageModel, origin: Origin) -> None:
        self.model, self.origin = model, origin

    def read(self, rows: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield for each sequence of ids [n] its states [n, origin.row] in the origin's type, on
        the CPU. Short sequences share a pass, a long one takes several."""
        for batch in _batches(rows):
            yield from (
                self._read_long(batch[0])
                if len(batch) == 1
                else self._pass(
                    batch, [Segment(self.model.new_cache(len(row)), 0, len(row)) for row in batch]
                )
            )

    def _read_long(self, row: Tensor) -> Iterator[Tensor]:
        """Compute one sequence, PASS_ROWS of it at a time."""
        cache, parts = self.model.new_cache(len(row)), list[Tensor]()
        for part in torch.split(row, PASS_ROWS):
            start = cache.length
            parts += self._pass([part], [Segment(cache, start, len(part))])
            cache.keep(range(start, start + len(part)), len(part))
        yield torch.cat(parts)

    def _pass(self, parts: Sequence[Tensor], segments: Sequence[Segment]) -> Sequence[Tensor]:
        """Compute the states of these tokens, placed by the segments."""
        positions = torch.cat(
            [torch.arange(segment.start, segment.start + segment.count) for segment in segments]
        )
        none = torch.tensor([], dtype=torch.int64)
        places = (LAST, *self.origin.taps)
        _, states = self.model.forward_with_states(
            torch.cat(list(parts)), positions, segments, wanted=places, rows=none
        )
        side_by_side = torch.cat([states[place] for place in places], -1)
        if not bool(side_by_side.isfinite().all()):
            raise CheckpointError(
                f"{self.origin.target} computes hidden states that are NaN; its weights are damaged"
            )
        return torch.split(
            narrowed(side_by_side, self.origin.dtype).cpu().clone(), [len(part) for part in parts]
        )


def _batches(rows: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group the rows in order into passes of at most PASS_ROWS tokens; a longer row has a pass of
    its own."""
    batch, size = list[Tensor](), 0
    for row in rows:
        if batch and size + len(row) > PASS_ROWS:
            yield batch
            batch, size = [], 0
        batch.append(row)
        size += len(row)
    if batch:
        yield batch
