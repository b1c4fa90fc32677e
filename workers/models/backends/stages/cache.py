"""The cache of a session over all stages, and the rows of a pass as each stage sees them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from dovetail.workers.models.segment import Cache, Segment


@dataclass
class StagedPass:
    """The rows of a pass for all stages."""

    positions: Tensor
    segments: Sequence[Segment]
    apart: bool = False  # True if the reader computes the layers on the CPU
    inputs: Tensor | None = None  # the layers' own inputs [rows, width of all]; None: none

    def use_inputs(self, inputs: Tensor) -> None:
        """Have layers with their own inputs read them from these."""
        self.inputs = inputs

    def inputs_of(self, rows: slice) -> Tensor | None:
        """Return the inputs of some rows."""
        return None if self.inputs is None else self.inputs[rows]

    def parts(self, stage: int, chunk: int) -> Iterator[tuple[slice, Sequence[Segment]]]:
        """Yield the rows of a stage some at a time: which rows, and their segments."""
        segments = [
            replace(segment, cache=part_of(segment.cache, stage)) for segment in self.segments
        ]
        yield from chunks_of(segments, chunk)


def part_of(cache: Cache, stage: int) -> Cache:
    if not isinstance(cache, StagedCache):
        raise TypeError(f"a cache of type {type(cache).__name__} belongs to another back end")
    return cache.parts[stage]


def chunks_of(segments: Sequence[Segment], chunk: int) -> Iterator[tuple[slice, Sequence[Segment]]]:
    """Yield the rows of a pass, `chunk` at a time if they belong to one prompt."""
    if len(segments) > 1 or segments[0].paths is not None:
        yield slice(0, sum(segment.count for segment in segments)), segments
        return
    segment = segments[0]
    for first in range(0, segment.count, chunk):
        count = min(chunk, segment.count - first)
        yield (
            slice(first, first + count),
            [
                replace(
                    segment,
                    start=segment.start + first,
                    count=count,
                    follows=segment.follows or first > 0,
                )
            ],
        )


class StagedCache:
    """A session's keys and values, stored where each stage computes."""

    def __init__(self, parts: Sequence[Cache]) -> None:
        self.parts = parts
        self.length, self.capacity = 0, parts[0].capacity

    def keep(self, slots: Sequence[int], committed: int) -> None:
        for part in self.parts:
            part.keep(slots, committed)
        self.length += committed

    def truncate(self, length: int) -> None:
        for part in self.parts:
            part.truncate(length)
        self.length = length

    def restorable(self, length: int) -> int:
        while (least := min(part.restorable(length) for part in self.parts)) < length:
            length = least
        return length

    def checkpoint(self) -> None:
        for part in self.parts:
            part.checkpoint()

    def resize(self, capacity: int) -> None:
        for part in self.parts:
            part.resize(capacity)
        self.capacity = capacity

    def branch(self, length: int, *, used: int = 0) -> "StagedCache":
        other = StagedCache([part.branch(length, used=used) for part in self.parts])
        other.length = other.capacity = length
        return other

    @property
    def branches(self) -> bool:
        return all(part.branches for part in self.parts)

    @property
    def base_bytes(self) -> int:
        return sum(part.base_bytes for part in self.parts)

    @property
    def row_bytes(self) -> int:
        return sum(part.row_bytes for part in self.parts)
