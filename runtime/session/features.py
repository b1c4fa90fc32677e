"""Features that a target returns while it prefills the token log, and the draft that reads them.
Pure; features are opaque."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from dovetail.protocol.arrays import Array, stack
from dovetail.protocol.errors import ProtocolError, StaleError
from dovetail.protocol.messages import Prefilled, Verified
from dovetail.runtime.session.draft_sync import DraftSync


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
