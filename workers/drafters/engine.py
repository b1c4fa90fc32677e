"""The interface of a draft worker to its engine, with defaults for what an engine does without."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from dovetail.protocol.arrays import Array
from dovetail.protocol.errors import RequestError, StaleError
from dovetail.protocol.messages import Open, Reads
from dovetail.workers.sessions.prefix_cache import Left
from dovetail.workers.speculation.proposal import Order, Proposal

if TYPE_CHECKING:
    from dovetail.protocol.grammar import GrammarVocabulary
    from dovetail.workers.models.segment import Cache
    from dovetail.workers.speculation.constrained import Constrained


class EngineSession(Protocol):
    """One sequence of an engine."""

    log: list[int]  # the prompt and every committed token

    @property
    def readable(self) -> bool:
        """Whether the engine can read the whole log; if not, it proposes nothing."""


SessionT = TypeVar("SessionT", bound=EngineSession)


class Engine(ABC, Generic[SessionT]):
    """Opens sessions and drafts for them."""

    reads: Reads | None = None  # the features of its target that it reads
    levels: int = 1  # of a tree that a pass predicts
    looks_up: bool = False  # True if it proposes nothing but what `protocol/lookup.py` finds
    prompt_rows: int = 0
    """Rows of a chunk of a prompt while no other session waits: `open` reads the first `Open.read`
    rows only. 0: it reads prompts whole."""

    vocabulary: "Callable[[], GrammarVocabulary] | None" = None
    """Returns the target's vocabulary for grammars, made when it is first needed; None: it is not
    known, and proposals are not masked."""

    def constrained(self, order: Open) -> "Constrained | None":
        """Return the grammar of a session at the beginning of its reply; None: it has none, or
        proposals are not masked."""
        if order.constraint is None or self.vocabulary is None:
            return None
        from dovetail.workers.speculation.constrained import Constrained

        return Constrained(self.vocabulary().follow(order.constraint), drafts=True)

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raise `RequestError` if the engine cannot read one of `tokens`."""

    @abstractmethod
    def open(self, order: Open, base: Any = None) -> SessionT:
        """Open a session and prefill its prompt. `base`: the rows of another session, of which the
        first `kept` tokens are reused; it must not be used any more."""

    @abstractmethod
    def draft_all(
        self, orders: Sequence[Order[SessionT]]
    ) -> Iterator[tuple[int, Proposal | Exception]]:
        """Carry out orders for different sessions: move each root and propose. Yield each order's
        place with its proposal, or with the exception that it failed with, as soon as it is
        done."""

    def prepare(self, session: SessionT) -> bool:
        """Precompute a little that the next proposals always need; return False if there is nothing
        to do."""
        return False

    def learn(self) -> bool:
        """Take a step of learning from verdicts; return False if there is nothing to learn from."""
        return False

    def grow_all_ahead(self, sessions: Sequence[SessionT]) -> Sequence[int]:
        """Grow the trees of these sessions' last proposals in one pass, for the first ones that fit
        into it, and return their places. Empty: nothing is worth a pass."""
        return ()

    def feed(self, session: SessionT, start: int, features: Array) -> None:
        """Read features of the prompt from position `start` on. Raises `StaleError` if they were
        read before, `RequestError` if they leave a gap."""
        raise RequestError("role", "this draft reads no features of its target")

    def check_features(self, session: SessionT, committed: int, features: Array | None) -> None:
        """Raise `RequestError` unless, with `features`, those of the log and of the next
        `committed` tokens (except the new root) have arrived."""
        if features is not None:
            raise RequestError("protocol", "features came, but this draft reads none")

    def take_features(self, session: SessionT, features: Array) -> None:
        """Take the features of a verdict, from which the next proposal starts."""

    def read(self, session: SessionT, rows: int) -> None:
        """Prefill at most `rows` more rows of the log."""

    def rows(self, session: SessionT) -> tuple[int, int]:
        """Return the numbers of prefilled and of missing rows of the log."""
        return 0, 0


class Keeper(Engine[SessionT]):
    """An engine that can keep the rows of a session for others."""

    @abstractmethod
    def keep(self, session: SessionT) -> Left:
        """Return the rows of a session that has ended, for another one to start from. The session
        must not be used any more."""

    @abstractmethod
    def left(self, session: SessionT) -> Left:
        """Return the log and rows of an open session."""

    @abstractmethod
    def restored(self, log: list[int], cache: "Cache") -> Left:
        """Return stored rows of the first tokens of a log, for a session to start from."""

    @property
    @abstractmethod
    def shares(self) -> bool:
        """Whether sessions may start from rows of others that are still open."""


class FedSession(EngineSession, Protocol):
    """One sequence of an engine that reads features."""

    @property
    def fed(self) -> int:
        """The number of positions whose features have arrived."""


FedT = TypeVar("FedT", bound=FedSession)


class FeatureReader(Engine[FedT]):
    """The engine of a head, which reads features of its target and checks them."""

    reads: Reads

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raise `RequestError` of code "vocabulary" if one of `tokens` is outside the target's
        vocabulary."""
        if (largest := max(tokens)) >= (size := self.reads.vocabulary_size):
            text = f"token {largest} is beyond the vocabulary of {size} of this head's target"
            raise RequestError("vocabulary", text)

    def check_features(self, session: FedT, committed: int, features: Array | None) -> None:
        if features is not None:
            self._check_rows(features)
        needed = len(session.log) + committed
        if (there := session.fed + (0 if features is None else features.shape[0])) != needed:
            text = f"features of {there} positions have arrived, but this round needs {needed}"
            raise RequestError("prefix", f"{text}; open the session again")

    def _check_feed(self, session: FedT, start: int, features: Array) -> None:
        """Raise `StaleError` or `RequestError` unless these are the features of the next positions
        of the log, from `start` on."""
        self._check_rows(features)
        if start + features.shape[0] <= session.fed:
            raise StaleError(f"features from position {start} on were received before")
        if start != session.fed:
            text = f"features from position {start} on came after {session.fed} positions"
            raise RequestError("prefix", f"{text}; open the session again")
        if (fed := session.fed + features.shape[0]) > (tokens := len(session.log)):
            text = f"features of {fed} positions were received for a log of {tokens} tokens"
            raise RequestError("prefix", text)

    def _check_rows(self, features: Array) -> None:
        reads = self.reads
        if (features.dtype, features.shape[1:]) != (reads.dtype, (reads.row,)):
            found = f"features of type {features.dtype} and shape {list(features.shape)}"
            text = f"received {found}, but this head reads {reads.dtype} in rows of {reads.row}"
            raise RequestError("protocol", text)
