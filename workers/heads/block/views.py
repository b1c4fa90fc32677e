"""What the rows of a block see: the committed rows, and each other as far as a layer allows."""

from dataclasses import dataclass

import numpy as np

from dovetail.workers.models.segment import Paths, Segment


@dataclass(frozen=True)
class View:
    """The attention of a layer over a block."""

    causal: bool  # False: every row sees the whole block
    window: int = 0  # positions that a row sees back to, itself included; 0: all

    def of(self, segment: Segment) -> Segment:
        """Return the segment of a block, whose rows follow the committed ones, with the slots that
        each row sees."""
        start, count = segment.start, segment.count
        firsts = [
            max(0, start + row - self.window + 1) if self.window else 0 for row in range(count)
        ]
        stops = [start + row + 1 if self.causal else start + count for row in range(count)]
        prefix = 0 if any(firsts) else start
        paths = [
            np.arange(max(first, prefix), stop, dtype=np.int32)
            for first, stop in zip(firsts, stops, strict=True)
        ]
        offsets = np.cumsum([0, *map(len, paths)], dtype=np.int32)
        return Segment(segment.cache, start, count, Paths(prefix, offsets, np.concatenate(paths)))
