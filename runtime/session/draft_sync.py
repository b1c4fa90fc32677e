"""Draft sync: which part of the token log a session's draft has, and what must be sent. A draft is
opened with the beginning of the log and, if it reads its target, gets the features of that part;
each command brings the tokens committed since the last one, including those of rounds without a
draft. Pure; features are opaque."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from dovetail.protocol.arrays import ITEM_BYTES, Array, stack
from dovetail.protocol.errors import ProtocolError, StaleError
from dovetail.protocol.messages import Draft, Prefilled, Reads, Verified
from dovetail.runtime.control.rounds import Plan
from dovetail.runtime.session.request import Base, Request


@dataclass(frozen=True)
class Joining:
    """A draft that joins a running session: the features that it reads, and its base."""

    reads: Reads | None = None
    base: Base | None = None


@dataclass
class DraftSync:
    """The sync of one draft, from its Open on."""

    tokens: int  # tokens of the log that it was opened with
    round: int = 0  # the round of its Open
    reads: Reads | None = None  # the features that it reads of its target
    base: Base | None = None
    """The ended session that it reuses; if it reads its target, the features of these tokens are
    not sent again."""
    bonus: int = 0
    """The token after the `accepted` nodes of its last proposal, or after its opening log."""
    accepted: tuple[int, ...] = ()
    more: list[int] = field(default_factory=list)
    """Tokens committed after that in rounds without an order."""
    features: list[Array] = field(default_factory=list)
    """Features of the verdicts since the last order."""
    held_bytes: int = 0  # size of `features` and of those that the target holds
    held: int = 0  # rows of features that the target has kept from its last verdicts
    rows: int = 0  # tokens of the log at its last proposal; 0: there was none
    fed: int = field(init=False)  # positions whose features it was sent or has from its base

    def __post_init__(self) -> None:
        self.fed = self.base.tokens if self.base is not None and self.reads is not None else 0

    @property
    def complete(self) -> bool:
        """Whether it has the features of everything that it was opened with."""
        return self.reads is None or self.fed == self.tokens

    @property
    def row_bytes(self) -> int:
        """The size of the features of one position; 0 if it reads none."""
        return 0 if self.reads is None else self.reads.row * ITEM_BYTES[self.reads.dtype]

    def fits(self, features: Array | None, rows: int) -> bool:
        """Return whether these are this many rows of the features that it reads; always True if it
        reads none."""
        if self.reads is None:
            return True
        return features is not None and (features.dtype, features.shape) == (
            self.reads.dtype,
            (rows, self.reads.row),
        )

    def committed(
        self, accepted: tuple[int, ...], bonus: int, features: Array | None, *, ordered: bool
    ) -> None:
        """Note the tokens of a round. `ordered`: the draft got a command, whether or not its
        proposal came in time; `features`: those of the root and the accepted nodes; None if the
        target has kept them."""
        if self.reads is not None and features is None:
            self.held += 1 + len(accepted)
            self.held_bytes += (1 + len(accepted)) * self.row_bytes
        elif self.reads is not None and features is not None:
            self.features.append(features)
            self.held_bytes += len(features.data) - self.held * self.row_bytes
            self.held = 0
        if ordered:
            self.accepted, self.bonus = accepted, bonus
        else:
            self.more.append(bonus)

    def order(
        self, request: Request, plan: Plan, *, epoch: int, session: int, round: int, prefix: int
    ) -> Draft:
        """Return the Draft of a round, with everything committed since the last one. `prefix`:
        tokens of the log."""
        more, features = tuple(self.more), stack(self.features) if self.features else None
        self.more, self.features, self.held_bytes = [], [], 0
        room = len(request.prompt) + request.max_tokens - prefix
        most_levels = request.most_levels
        return Draft(
            epoch=epoch,
            session=session,
            round=round,
            prefix=prefix,
            accepted=self.accepted,
            bonus=self.bonus,
            more=more,
            max_nodes=request.most_nodes,
            max_depth=min(most_levels, room - 1, plan.most_depth or most_levels),
            max_width=request.tree.width,
            deadline_ms=plan.deadline_ms,
            rate=plan.rate,
            floor=plan.floor,
            ahead=plan.ahead and not request.rejects,
            recalled=plan.recalled,
            features=features,
        )


class UnreadableFeatures(ProtocolError):
    """The features of a verdict do not fit the draft; the verdict itself may be valid."""


def features_of_items(event: Verified) -> Sequence[Array | None]:
    """Return the rows of features of each verdict of a pass; None for each if their number is
    wrong."""
    stops = [*accumulate(item.held + 1 + len(item.accepted) for item in event.items)]
    features = event.features
    if features is None or features.shape[:1] != (stops[-1],):
        return [None] * len(event.items)
    return [features.rows(start, stop) for start, stop in pairwise([0, *stops])]


class FeatureRows:
    """Tracks the rows of features that a target returns, one for each position of the log."""

    def __init__(self, session: int) -> None:
        self._session = session
        self.next = 0
        """Position of the next row; rows beyond the draft's part of the log belong to the
        verdict."""
        self.recomputing = False
        """True if the target recomputes features, for a draft that has joined."""
        self._root: list[Array] = []

    @property
    def of_root(self) -> Array | None:
        """The rows beyond the draft's part of the log, if any."""
        return stack(self._root) if self._root else None

    def forget_root(self) -> None:
        """Drop the rows beyond the draft's part of the log: they will be sent again."""
        self._root = []

    def take(
        self, event: Prefilled, draft_sync: DraftSync, length: int
    ) -> tuple[int, Array] | None:
        """Return the position and the rows to feed to the draft; None if it was not opened with any
        of them. `length`: tokens of the log. Raises `ProtocolError` if the rows do not fit the
        draft, `StaleError` if they have already arrived."""
        features, start = event.features, event.start
        if start < self.next:
            raise StaleError(
                f"session {self._session} was not waiting for features of position {start}"
            )
        rows, until = (*features.shape, 0)[0], draft_sync.tokens if self.recomputing else length
        read = draft_sync.reads is not None and start == self.next and self.next + rows <= until
        if not read or not draft_sync.fits(features, rows):
            raise ProtocolError(
                f"features {features.dtype} {features.shape} from position {start} on are not "
                "those that the draft reads"
            )
        self.next += rows
        to_feed = min(rows, max(0, draft_sync.tokens - start))
        if to_feed < rows:
            self._root.append(features.rows(to_feed, rows))
        if not to_feed:
            return None
        draft_sync.fed += to_feed
        return start, features if to_feed == rows else features.rows(0, to_feed)
