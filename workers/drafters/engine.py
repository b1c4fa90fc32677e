"""The interfaces between a draft worker and its engine. Engines may also read the target's
features, prefill in chunks, or keep the rows of sessions."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

from dovetail.protocol.arrays import Array
from dovetail.protocol.messages import Open, Reads
from dovetail.workers.sessions.prefix_cache import Left
from dovetail.workers.speculation.proposal import Order, Proposal


class EngineSession(Protocol):
    """One sequence of an engine."""

    log: list[int]  # the prompt and every committed token

    @property
    def readable(self) -> bool:
        """Whether the engine can read the whole log; if not, it proposes nothing."""


SessionT = TypeVar("SessionT", bound=EngineSession)
ReadT = TypeVar("ReadT", bound=EngineSession, contravariant=True)


class Engine(Protocol[SessionT]):
    """A draft engine: it opens sessions and drafts for them."""

    def check_tokens(self, tokens: Sequence[int], /) -> None:
        """Raise `RequestError` if the engine cannot read one of `tokens`."""

    def open(self, order: Open, /) -> SessionT:
        """Open a session and prefill its prompt."""

    def draft_all(
        self, orders: Sequence[Order[SessionT]], /
    ) -> Iterator[tuple[int, Proposal | Exception]]:
        """Carry out orders for different sessions: move each root and propose. Yield each order's
        place with its proposal, or with the exception that it failed with, as soon as it is
        done."""

    def prepare(self, session: SessionT, /) -> bool:
        """Precompute a bit of what the next proposals need in any case; return False if there is
        nothing to do."""

    def learn(self) -> bool:
        """Learn a bit from the verdicts; return False if there is nothing to learn from."""

    def grow_all_ahead(self, sessions: Sequence[SessionT], /) -> Sequence[int]:
        """Grow the trees of these sessions' last proposals in one pass, for the first ones that fit
        into it, and return their places. Empty: nothing is worth a pass."""


class Reader(Protocol[ReadT]):
    """An engine that also reads features of its target."""

    reads: Reads

    def feed(self, session: ReadT, start: int, features: Array, /) -> None:
        """Read features of the prompt from position `start` on. Raises `StaleError` if they were
        read before, `RequestError` if they leave a gap."""

    def check_features(self, session: ReadT, committed: int, features: Array | None, /) -> None:
        """Raise `RequestError` unless, with `features`, those of the log and of the next
        `committed` tokens (except the new root) have arrived."""

    def take_features(self, session: ReadT, features: Array, /) -> None:
        """Take the features that came with a verdict; the next proposal starts from them."""


class PartReader(Protocol[ReadT]):
    """An engine with chunked prefill: `Engine.open` reads the first `Open.read` rows only."""

    prompt_rows: int  # rows of a chunk while no other session waits

    def read(self, session: ReadT, rows: int, /) -> None:
        """Prefill at most `rows` more rows of the log."""

    def rows(self, session: ReadT, /) -> tuple[int, int]:
        """Return the number of rows of the log that are prefilled, and that are not."""


class Keeper(Protocol[SessionT]):
    """An engine that can keep the rows of a session for others."""

    def keep(self, session: SessionT, /) -> Left:
        """Return the rows of a session that has ended, for another one to start from. The session
        must not be used any more."""

    def left(self, session: SessionT, /) -> Left:
        """Return the log and rows of an open session."""

    @property
    def shares(self) -> bool:
        """Whether sessions may start from rows of others that are still open."""

    def open(self, order: Open, /, base: Any) -> SessionT:
        """Open a session as `Engine.open` does, reusing the first `kept` tokens of `base`, which
        must not be used any more."""
