"""The rows of a session in a pass: which slots they are written to, and which they see. A row sees
the first `prefix` slots, then its own path; attention sums in this order, wherever the rows of a
tree lie."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

PROMPT_ROWS = 256  # rows of a prompt at a time: bound by arithmetic, with small activations
SLACK = 2  # a cache keeps memory for up to this many times the requested rows, rather than move


class Cache(Protocol):
    """A session's keys and values; each back end has its own layout."""

    length: int  # committed rows: slots 0..length-1, the tokens in order
    capacity: int

    def keep(self, slots: Sequence[int], committed: int) -> None:
        """Move `slots` (distinct, uncommitted) to length, length + 1, ... and commit the first
        `committed`."""

    def truncate(self, length: int) -> None:
        """Drop the committed rows from slot `length` on; `length` has to be `restorable`."""

    def restorable(self, length: int) -> int:
        """Return the greatest length, at most this one, to which `truncate` can go back."""

    def checkpoint(self) -> None:
        """Make the length `restorable`, or nearly: states need a copy for that."""

    def resize(self, capacity: int) -> None:
        """Make room for `capacity` rows; committed ones move only if memory is too small or too
        large."""

    def branch(self, length: int, *, used: int = 0) -> "Cache":
        """Return another session's cache with the first `length` committed rows. `used`: rows after
        them that this cache keeps. Only if it `branches`."""

    @property
    def branches(self) -> bool:
        """Return whether other sessions may begin with rows of this cache while it is in use."""

    @property
    def row_bytes(self) -> int:
        """Memory of one row."""

    @property
    def base_bytes(self) -> int:
        """Memory of a session in addition to that of its rows."""


@dataclass(frozen=True)
class Paths:
    """The slots that rows see: 0..prefix-1, and row i slots[offsets[i] : offsets[i + 1]], itself
    last."""

    prefix: int
    offsets: NDArray[np.int32]
    slots: NDArray[np.int32]

    @classmethod
    def of(cls, prefix: int, paths: Sequence[Sequence[int]]) -> "Paths":
        """The paths of the rows, one list of slots each."""
        offsets = np.zeros(len(paths) + 1, dtype=np.int32)
        np.cumsum([len(path) for path in paths], out=offsets[1:])
        return cls(
            prefix, offsets, np.array([slot for path in paths for slot in path], dtype=np.int32)
        )

    @classmethod
    def behind(cls, prefix: int, offsets: NDArray[np.int32], rows: NDArray[np.int32]) -> "Paths":
        """The paths rows[offsets[i] : offsets[i + 1]], counted from the slot `prefix` on."""
        return cls(prefix, offsets, rows + np.int32(prefix))

    @classmethod
    def growing(cls, start: int, count: int) -> "Paths":
        """Return the paths of consecutive rows from slot `start` on."""
        offsets = np.arange(count + 1) * np.arange(1, count + 2) // 2
        lower = np.tril_indices(count)[1]
        return cls(start, offsets.astype(np.int32), (start + lower).astype(np.int32))

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Return how many slots the path of each row has."""
        found: NDArray[np.int32] = self.offsets[1:] - self.offsets[:-1]
        return found

    @property
    def stop(self) -> int:
        """Return the slot after the last one on a path."""
        last: int = max(self.slots.tolist())  # for a few numbers a list is faster than an array
        return last + 1

    def row(self, index: int) -> NDArray[np.int32]:
        """The path of one row."""
        return self.slots[self.offsets[index] : self.offsets[index + 1]]


@dataclass(frozen=True)
class Segment:
    """`count` rows that are written to slots start, start+1, ... of a cache."""

    cache: Cache
    start: int
    count: int
    paths: Paths | None = None  # slots that each row sees; None: every row sees those up to its own
    follows: bool = False  # True if it continues where the one before it ends
