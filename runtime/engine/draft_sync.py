"""What a session's draft has of the token log, and what it is yet to be told.

A draft is opened with a beginning of the log, is fed the features of that part if it reads its
target, and learns with each order what has been committed since the last one. Rounds may go by in
which nothing is drafted: what they commit is kept for the next order. Pure; looks into no features.
"""

from dataclasses import dataclass, field

from dovetail.protocol.arrays import Array, stack
from dovetail.protocol.messages import Reads
from dovetail.runtime.fleet.prefix_cache import Base


@dataclass(frozen=True)
class Joining:
    """A draft that a session takes in its midst: what it reads of its target, and what it goes on
    from."""

    reads: Reads | None = None
    base: Base | None = None


@dataclass
class Briefing:
    """Of one draft, from its Open on."""

    tokens: int
    """Of the log, with which it was opened."""
    round: int = 0
    """Of its Open."""
    reads: Reads | None = None
    """What it reads of its target."""
    base: Base | None = None
    """What it goes on from; where it reads its target, the features of these tokens do not come
    again."""
    bonus: int = 0
    """The token behind the `accepted` nodes of its last proposal, or behind the log that it was
    opened with."""
    accepted: tuple[int, ...] = ()
    more: list[int] = field(default_factory=list)
    """What was committed behind that in rounds without an order."""
    features: list[Array] = field(default_factory=list)
    """Of the verdicts since the last order."""
    held_bytes: int = 0
    """Size of `features`."""
    rows: int = 0
    """What it had of the log when it made its last proposal; 0: it has made none."""
    fed: int = field(init=False)
    """Positions whose features it has been fed, or has from its base."""

    def __post_init__(self) -> None:
        self.fed = self.base.tokens if self.base is not None and self.reads is not None else 0

    @property
    def complete(self) -> bool:
        """Whether it has been fed all that it was opened with."""
        return self.reads is None or self.fed == self.tokens

    def fits(self, features: Array | None, rows: int) -> bool:
        """Whether these are so many rows of what it reads. What one that reads nothing is sent, a
        draft before it has asked for."""
        if self.reads is None:
            return True
        return features is not None and (features.dtype, features.shape) == (
            self.reads.dtype,
            (rows, self.reads.row),
        )

    def committed(
        self, accepted: tuple[int, ...], bonus: int, features: Array | None, *, ordered: bool
    ) -> None:
        """A round is over. `ordered`: it was asked for a proposal, whether or not that came in
        time; `features`: of the root and the accepted nodes."""
        if self.reads is not None and features is not None:
            self.features.append(features)
            self.held_bytes += len(features.data)
        if ordered:
            self.accepted, self.bonus = accepted, bonus
        else:
            self.more.append(bonus)

    def take_more(self) -> tuple[tuple[int, ...], Array | None]:
        """For an order: what was committed behind the bonus, and the features of all of it; it has
        them from now on."""
        taken = tuple(self.more), stack(self.features) if self.features else None
        self.more, self.features, self.held_bytes = [], [], 0
        return taken
