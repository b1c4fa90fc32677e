"""The state of a session of a head: its true rows, the rows of its tree, and the features not read
yet."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from dovetail.protocol.errors import RequestError
from dovetail.workers.drafters.head_levels import TRUE, Kind, Level, Levels
from dovetail.workers.drafters.passes import Rows
from dovetail.workers.drafters.session import MOST_TRUE, THE_ROOT, GrowingSession
from dovetail.workers.heads.reduced.recent import RecentRows
from dovetail.workers.models.segment import Paths, Segment
from dovetail.workers.sessions.prefix_cache import Left

SLACK_SHARE = 8
"""A full window drops this fraction of its rows at once, so that rows are rarely moved."""
LEAST_WINDOW_SHARE = 2
"""A session may reuse a window that has lost rows if at least this fraction of it is left: dropped
rows cannot be recomputed."""


@dataclass(kw_only=True)
class HeadSession(GrowingSession):
    """One sequence. The cache holds the true rows from `dropped` on, at most `window` of them,
    followed by the tree's."""

    levels: Levels
    window: int
    survives: bool = False  # True if the tree below the root was kept when the root moved
    contrasts: dict[int, Tensor] = field(default_factory=dict)
    """Pool node (-1: the root) -> logits [V] of the tokens after its children."""
    waiting: list[Tensor] = field(default_factory=list)
    """Features [n, W] of the positions behind the true rows."""
    dropped: int = 0
    recent: RecentRows | None = None  # the log's own tokens, for a reduced output head

    @property
    def states(self) -> Tensor:
        """[1 + rows, H]: the state of the root's row, then of each row of the tree."""
        return self.levels.states

    @property
    def rows(self) -> int:
        """The number of true rows so far, including those that have left the window."""
        return self.dropped + self.cache.length

    @property
    def missing_rows(self) -> int:
        return len(self.log) - 1 - self.rows

    @property
    def fed(self) -> int:
        """The number of positions whose features have arrived."""
        return self.rows + sum(len(features) for features in self.waiting)

    @property
    def free_rows(self) -> int:
        return self.states.shape[0] - 1 - self.tree.rows_used

    def next_features(self, count: int) -> Tensor:
        """Return the first `count` unread features."""
        self.waiting = [torch.cat(self.waiting)]
        return self.waiting[0][:count]

    def true_rows(self, count: int, *, predicted: bool, contrast: bool) -> Rows:
        """Return the next `count` true rows as part of a pass. `predicted`: also return the last
        one's prediction."""
        first, cache, features = self.rows, self.cache, self.next_features(count)
        tokens = torch.tensor(self.log[first + 1 : first + 1 + count])
        positions = torch.arange(first, first + count)
        if not (predicted and count <= MOST_TRUE and self.levels.ranks):
            segment, kind = Segment(cache, cache.length, count), Kind(true=True, contrast=contrast)
            return Rows(
                *(tokens, positions, segment, int(predicted)),
                kind=kind,
                features=features,
                recent=self.recent,
            )
        return Level(
            tokens,
            positions,
            Segment(cache, cache.length, count, Paths.growing(cache.length, count)),
            wanted=1,
            kind=TRUE,
            levels=self.levels,
            above=THE_ROOT,
            into=0,
            contrast=contrast,
            ranking=self.ranking_of(THE_ROOT),
            features=features,
            recent=self.recent,
        )

    def commit(self, count: int) -> None:
        """Turn the next `count` rows into true rows, and drop their features."""
        (features,) = self.waiting
        self.cache.keep(range(self.cache.length, self.cache.length + count), count)
        self.waiting = [features[count:]] if len(features) > count else []

    def make_room(self, count: int) -> None:
        """Drop the oldest rows if the window has no room for `count` more. Rows of the tree lie
        behind the missing rows of the log."""
        length = self.cache.length
        if length + count > self.window:
            kept = max(0, self.window - self.window // SLACK_SHARE - count)
            behind = self.missing_rows + self.tree.rows_used if self.tree.rows_used else 0
            self.cache.length = 0
            self.cache.keep(range(length - kept, length + behind), kept)
            self.dropped += length - kept


@dataclass(frozen=True, kw_only=True)
class HeadLeft(Left):
    """A log with its true rows from `dropped` on, at most `window` of them."""

    dropped: int
    window: int
    waiting: Tensor  # features [n, W] of the positions behind the true rows

    @property
    def rows(self) -> int:
        """The number of true rows, including those that have left the window."""
        return self.dropped + self.cache.length

    @property
    def there(self) -> int:
        return self.rows + len(self.waiting)

    @property
    def whole(self) -> int:
        return 0 if self.dropped else self.cache.length

    def check(self, prompt: Sequence[int], kept: int) -> None:
        """Raise `RequestError` unless a session with this prompt, whose features are sent from
        position `kept` on, can get all features and rows before it from here."""
        super().check(prompt, kept)
        if 0 < kept <= self.rows and prompt[kept] != self.log[kept]:
            raise RequestError(
                "prefix",
                f"row {kept - 1} was computed with token {self.log[kept]}, and the prompt "
                f"continues with {prompt[kept]}; take one fewer",
            )
        if self.dropped and kept - self.dropped < self.window // LEAST_WINDOW_SHARE:
            whose = f"a session whose first {self.dropped} rows were dropped"
            raise RequestError("prefix", f"cannot reuse {kept} tokens of {whose}; open it without")

    def branch(self, kept: int) -> Self:
        return super().branch(kept - self.dropped)
