"""Entries of the journal: a request, the tokens committed for it, and the records of both.

A record is MessagePack: its kind, then its fields. `rebuilt` restores the entry of a reply from its
records, as in the coordinator that wrote them. Pure.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from dovetail.protocol.codec import REPLY, REQUEST, encode
from dovetail.protocol.errors import DecodeError
from dovetail.protocol.messages import Finished, Submit, TokenLogprobs
from dovetail.runtime.fleet.outbox import TOKEN_BYTES, scores_size, size_of
from dovetail.runtime.session.actions import Emit
from dovetail.runtime.session.request import pack

PIECE = 8192  # the most tokens in a record
ROW_BYTES = 32  # bytes of a row of the database without its record, approximately


@dataclass
class Entry:
    """A request with a ticket."""

    submit: Submit  # the request in tokens, with its seed
    key: str  # the public key of its client; empty over ipc
    fingerprint: str = ""  # the fingerprint of the last target that served it
    load_s: float = 0.0  # the time that this target took to load
    tokens: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    """For each token, True if the draft had proposed it."""
    margins: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    sessions: list[int] = field(default_factory=list)  # the numbers of its sessions
    left_s: float | None = None  # when it stopped running, in s since 1970; None: it is running
    finished: Finished | None = None
    """The last message to its client; None if the reply has not ended or the client has left."""
    reply: int = field(default=0, compare=False)
    """Its number on disk; below, its records and bytes there."""
    rows: int = field(default=0, compare=False)
    stored: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        self._asked = size_of(self.submit)

    @property
    def ticket(self) -> str:
        return self.submit.ticket

    @property
    def owner(self) -> str:
        """Return the owner of the request, in the form of `Request.owner`."""
        return f"{self.key}/{self.submit.owner}"

    @property
    def log(self) -> bytes:
        """Return its prompt and its tokens, packed."""
        return pack((*(self.submit.tokens or ()), *self.tokens))

    @property
    def size(self) -> int:
        """Return roughly the bytes that it takes, including its session's tokens."""
        return self._asked + TOKEN_BYTES * len(self.tokens) + scores_size(self.logprobs)

    @property
    def depends_on_draft(self) -> bool:
        """Whether its tokens depend on the draft, so that they cannot be decoded again."""
        return self.submit.sampling.rejects

    def done(self) -> dict[str, Any]:
        """Return the committed tokens, as the fields of a session."""
        return {"tokens": [*self.tokens], "margins": [*self.margins], "logprobs": [*self.logprobs]}

    # -- changes and their records -----------------------------------------------------------------

    def begun(self) -> bytes:
        """Return the record of the request."""
        return _record("begun", encode(self.submit)[0], self.key)

    def serves(self, session: int, fingerprint: str, load_s: float, tokens: int) -> bytes:
        """Add the session that continues it after this many tokens; return the record."""
        return self._said("serves", session, fingerprint, load_s, tokens)

    def committed(self, emit: Emit, margins: Sequence[float]) -> bytes:
        """Add committed tokens; return the record."""
        logprobs = [(one.logprob, one.top) for one in emit.logprobs]
        return self._said("committed", emit.tokens, emit.drafted, [*margins], logprobs)

    def left(self, now_s: float) -> bytes:
        """Mark it as no longer running, though it has not ended; return the record."""
        return self._said("left", now_s)

    def ended(self, finished: Finished, now_s: float) -> bytes:
        """Record its end; return the record. Spans are sent only once."""
        self.finished, self.left_s = finished.model_copy(update={"spans": ()}), now_s
        return _record("ended", encode(self.finished)[0], now_s)

    def _said(self, kind: str, *what: Any) -> bytes:
        _CHANGES[kind](self, *what)
        return _record(kind, *what)

    def snapshot(self) -> Iterable[bytes]:
        """Yield records that contain all of it."""
        yield self.begun()
        for session in self.sessions:
            yield _record("serves", session, self.fingerprint, self.load_s, 0)
        for begin in range(0, len(self.tokens), PIECE):
            piece = slice(begin, begin + PIECE)
            logprobs = [(one.logprob, one.top) for one in self.logprobs[piece]]
            what = (self.tokens[piece], self.drafted[piece], self.margins[piece], logprobs)
            yield _record("committed", *what)
        if self.finished is not None:
            yield _record("ended", encode(self.finished)[0], self.left_s)
        elif self.left_s is not None:
            yield _record("left", self.left_s)


@dataclass(frozen=True, slots=True)
class Ended:
    """An ended reply, whose entry is only on disk: few are requested again."""

    sessions: tuple[int, ...]
    left_s: float
    reply: int
    rows: int
    stored: int

    @classmethod
    def of(cls, entry: Entry) -> "Ended":
        assert entry.left_s is not None
        return cls((*entry.sessions,), entry.left_s, entry.reply, entry.rows, entry.stored)


def rebuilt(reply: int, records: Sequence[bytes]) -> Entry:
    """Return the entry of a reply from its records; raise `DecodeError` if they are not valid."""
    try:
        (kind, *what), *later = (msgpack.unpackb(record, use_list=False) for record in records)
        if kind != "begun":
            raise TypeError("it does not begin with a request")
        entry = _begun(*what)
        for kind, *what in later:
            _CHANGES[kind](entry, *what)
    except (DecodeError, KeyError, TypeError, ValueError) as error:
        raise DecodeError(f"a record of the journal cannot be read: {error}") from None
    entry.reply, entry.rows = reply, len(records)
    entry.stored = sum(map(stored_size, records))
    return entry


def stored_size(record: bytes) -> int:
    """Return roughly the bytes that a record takes on disk."""
    return len(record) + ROW_BYTES


def coordinated(epochs: Iterable[int], sessions: int) -> bytes:
    """Return the record of earlier epochs and of the highest session number."""
    return _record("coordinated", [*epochs], sessions)


def coordinators(record: bytes) -> tuple[set[int], int]:
    """Return the arguments of `coordinated`; raise `DecodeError` if the record is not valid."""
    try:
        _kind, epochs, sessions = msgpack.unpackb(record)
        return set(map(int, epochs)), int(sessions)
    except (TypeError, ValueError) as error:
        raise DecodeError(f"a record of the journal cannot be read: {error}") from None


def _record(kind: str, *what: Any) -> bytes:
    record: bytes = msgpack.packb((kind, *what))
    return record


def _begun(frame: bytes, key: str) -> Entry:
    submit = REQUEST.decode([frame])
    if not isinstance(submit, Submit):
        raise TypeError("it does not begin with a request")
    return Entry(submit, key)


def _serves(entry: Entry, session: int, fingerprint: str, load_s: float, tokens: int) -> None:
    for committed in (entry.tokens, entry.drafted, entry.margins, entry.logprobs):
        del committed[tokens:]
    if session not in entry.sessions:
        entry.sessions.append(session)
    entry.fingerprint, entry.load_s = fingerprint, load_s
    entry.left_s = entry.finished = None


def _committed(
    entry: Entry,
    tokens: Sequence[int],
    drafted: int | Sequence[bool],
    margins: Sequence[float],
    logprobs: Sequence[tuple[float, Any]],
) -> None:
    entry.tokens += tokens
    flags = drafted if not isinstance(drafted, int) else [at < drafted for at in range(len(tokens))]
    entry.drafted += flags
    entry.margins += margins
    entry.logprobs += (
        TokenLogprobs(logprob=logprob, top=tuple((int(t), float(p)) for t, p in top))
        for logprob, top in logprobs
    )


def _left(entry: Entry, now_s: float) -> None:
    entry.left_s = now_s


def _ended(entry: Entry, finished: bytes, now_s: float) -> None:
    message = REPLY.decode([finished])
    if not isinstance(message, Finished):
        raise TypeError("it does not end with a result")
    entry.finished, entry.left_s = message, now_s


_CHANGES: Mapping[str, Callable[..., None]] = {
    "serves": _serves,
    "committed": _committed,
    "left": _left,
    "ended": _ended,
}
