"""The interface between a draft worker and what proposes: every engine, those that read features of
their target, and those that keep the rows of sessions."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

from dovetail.protocol.arrays import Array
from dovetail.protocol.messages import Open, Reads
from dovetail.workers.sessions.prefix_cache import Left
from dovetail.workers.speculation.proposal import Order, Proposal


class EngineSession(Protocol):
    """One sequence of an engine."""

    log: list[int]
    """The prompt and every committed token."""

    @property
    def readable(self) -> bool:
        """Return whether the engine can read the whole log; else it proposes nothing."""


SessionT = TypeVar("SessionT", bound=EngineSession)
ReadT = TypeVar("ReadT", bound=EngineSession, contravariant=True)


class Engine(Protocol[SessionT]):
    """A drafter: sessions are opened, drafted for, and dropped."""

    def check_tokens(self, tokens: Sequence[int], /) -> None:
        """`RequestError` if one of `tokens` cannot be read."""

    def open(self, order: Open, /) -> SessionT:
        """Return a session with the prompt read."""

    def draft_all(
        self, orders: Sequence[Order[SessionT]], /
    ) -> Iterator[tuple[int, Proposal | Exception]]:
        """Carry out orders for different sessions: move each root and propose. Yield the place of
        each order with its proposal, or with the exception that it failed with, as soon as that is
        there."""

    def prepare(self, session: SessionT, /) -> bool:
        """Do a bit of work that the next proposals need whatever comes; False: there is none."""

    def learn(self) -> bool:
        """Learn a bit from the verdicts; False: there is nothing to learn from."""

    def grow_all_ahead(self, sessions: Sequence[SessionT], /) -> Sequence[int]:
        """Grow the trees of the last proposals of the first of these sessions that can grow, in one
        pass, and return their places. Empty: no tree is to grow, or nothing is worth a pass any
        more."""


class Reader(Protocol[ReadT]):
    """An engine that also reads features of its target."""

    reads: Reads

    def feed(self, session: ReadT, start: int, features: Array, /) -> None:
        """Read the features of the prompt's positions from `start` on; `StaleError` if that was
        done, `RequestError` if they do not follow what was."""

    def check_features(self, session: ReadT, committed: int, features: Array | None, /) -> None:
        """`RequestError` unless with `features` those of the log and of the next `committed`
        tokens, all but the new root, are there."""

    def take_features(self, session: ReadT, features: Array, /) -> None:
        """Take the features that came with a verdict; the next proposal starts from them."""


class PartReader(Protocol[ReadT]):
    """An engine with chunked prefill: `Engine.open` reads the first `Open.read` rows only."""

    prompt_rows: int
    """Rows of a chunk while no other session waits."""

    def read(self, session: ReadT, rows: int, /) -> None:
        """Read at most `rows` further rows of the log."""

    def rows(self, session: ReadT, /) -> tuple[int, int]:
        """Return how many rows of the log have been read, and how many have not."""


class Keeper(Protocol[SessionT]):
    """An engine that can also keep the rows of a session."""

    def keep(self, session: SessionT, /) -> Left:
        """Return what is left of a session that has ended; it is used up."""

    def left(self, session: SessionT, /) -> Left:
        """Return the log and the rows of a session that is open."""

    @property
    def shares(self) -> bool:
        """Return whether sessions may begin with rows of others that are open."""

    def open(self, order: Open, /, base: Any) -> SessionT:
        """Return a session as `Engine.open`, from the first `kept` tokens of what is left of
        another one, which is used up."""
