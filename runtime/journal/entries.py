"""Entries of the journal: a request and what was committed for it, and the records that say so.

A record is MessagePack: its kind, then what it says. `apply` reads records one after the other;
what it makes of them is what the coordinator that wrote them had. Pure.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from dovetail.protocol.codec import REPLY, REQUEST, encode
from dovetail.protocol.errors import DecodeError
from dovetail.protocol.messages import Finished, Submit, TokenLogprobs
from dovetail.runtime.fleet.outbox import OBJECT_BYTES, TOKEN_BYTES, scores_size, size_of
from dovetail.runtime.session.actions import Emit
from dovetail.runtime.session.kept import pack

PIECE = 8192
"""Tokens of a record: with their scores they fit into `MAX_RECORD`."""


@dataclass
class Entry:
    """A request with a ticket."""

    submit: Submit
    """The request in tokens, with its seed."""
    key: str
    """The public key of its client; empty over ipc."""
    fingerprint: str = ""
    """The fingerprint of the target that has served it last."""
    load_s: float = 0.0
    """The time that this target took to load."""
    tokens: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    """For each token, True if the draft had proposed it."""
    margins: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    sessions: list[int] = field(default_factory=list)
    """The numbers of the sessions that it has had."""
    left_s: float | None = None
    """When it stopped running, in seconds since 1970; None: it runs."""
    finished: Finished | None = None
    """The words that its client was told at the end; None: it has not ended, or was left."""

    def __post_init__(self) -> None:
        self._asked = size_of(self.submit)

    @property
    def ticket(self) -> str:
        return self.submit.ticket

    @property
    def owner(self) -> str:
        """Return the owner of the request, as `Request.owner` has it."""
        return f"{self.key}/{self.submit.owner}"

    @property
    def log(self) -> bytes:
        """Return its prompt and its tokens, packed."""
        return pack((*(self.submit.tokens or ()), *self.tokens))

    @property
    def size(self) -> int:
        """Return approximately the bytes that it takes, including its session's tokens."""
        return self._asked + TOKEN_BYTES * len(self.tokens) + scores_size(self.logprobs)

    @property
    def depends_on_draft(self) -> bool:
        """Return whether its tokens depend on the draft, so that they cannot be decoded again."""
        return self.submit.sampling.rejects

    def done(self) -> dict[str, Any]:
        """Return what is committed, as the fields of a session."""
        return {
            "tokens": [*self.tokens],
            "margins": [*self.margins],
            "logprobs": [*self.logprobs],
        }

    # -- the records that change it ----------------------------------------------------------------

    def begun(self) -> bytes:
        """Return the record of the request."""
        return _record("begun", encode(self.submit)[0], self.key)

    def serves(self, session: int, fingerprint: str, load_s: float, tokens: int) -> bytes:
        """Note that it goes on behind so many tokens as this session, on this target; the record of
        that."""
        return self._said("serves", session, fingerprint, load_s, tokens)

    def committed(self, emit: Emit, margins: Sequence[float]) -> bytes:
        """Note that tokens were committed; the record of that."""
        logprobs = [(one.logprob, one.top) for one in emit.logprobs]
        return self._said("committed", emit.tokens, emit.drafted, [*margins], logprobs)

    def left(self, now_s: float) -> bytes:
        """Note that it runs no more, though it has not ended; the record of that."""
        return self._said("left", now_s)

    def ended(self, finished: Finished, now_s: float) -> bytes:
        """Note how it ended; the record of that. Spans are told once."""
        self.finished, self.left_s = finished.model_copy(update={"spans": ()}), now_s
        return _record("ended", self.ticket, encode(self.finished)[0], now_s)

    def _said(self, kind: str, *what: Any) -> bytes:
        _CHANGES[kind](self, *what)
        return _record(kind, self.ticket, *what)

    def snapshot(self) -> Iterable[bytes]:
        """Yield records that say all of it anew."""
        yield self.begun()
        for session in self.sessions:
            yield _record("serves", self.ticket, session, self.fingerprint, self.load_s, 0)
        for begin in range(0, len(self.tokens), PIECE):
            piece = slice(begin, begin + PIECE)
            logprobs = [(one.logprob, one.top) for one in self.logprobs[piece]]
            what = (self.tokens[piece], self.drafted[piece], self.margins[piece], logprobs)
            yield _record("committed", self.ticket, *what)
        if self.finished is not None:
            yield _record("ended", self.ticket, encode(self.finished)[0], self.left_s)
        elif self.left_s is not None:
            yield _record("left", self.ticket, self.left_s)


def coordinated(epoch: int, sessions: int) -> bytes:
    """Return the record of a coordinator that has begun, with its epoch; `sessions`: the highest
    number that a session has had."""
    return _record("coordinated", epoch, sessions)


@dataclass(frozen=True, slots=True)
class EndedReply:
    """The packed entry of a finished reply: thousands are kept, few are requested again."""

    sessions: tuple[int, ...]
    left_s: float
    records: tuple[bytes, ...]
    """The records of which the entry can be rebuilt."""

    @classmethod
    def of(cls, entry: Entry) -> "EndedReply":
        assert entry.left_s is not None
        return cls((*entry.sessions,), entry.left_s, (*entry.snapshot(),))

    @property
    def size(self) -> int:
        """Return approximately the bytes that it takes in memory."""
        return OBJECT_BYTES + sum(map(len, self.records))

    def entry(self) -> Entry:
        """Return the entry, unpacked."""
        begun, *later = self.records
        kind, *what = msgpack.unpackb(begun, use_list=False)
        assert kind == "begun"
        entry = _begun(*what)
        for record in later:
            kind, _ticket, *what = msgpack.unpackb(record, use_list=False)
            _CHANGES[kind](entry, *what)
        return entry


@dataclass
class Entries:
    """The entries by their tickets, and what is known of the coordinators that wrote them."""

    of: dict[str, Entry] = field(default_factory=dict)
    """Entries of replies that have not ended."""
    ended: dict[str, EndedReply] = field(default_factory=dict)
    """Entries of replies that have ended; a ticket is in one of both."""
    ended_bytes: int = 0
    """Approximate bytes of `ended` in memory."""
    epochs: set[int] = field(default_factory=set)
    sessions: int = 0
    """The highest number that a session has had."""
    _doubted: set[str] = field(default_factory=set)
    """The tickets of entries that lack records: what follows is not of them before they are begun
    anew."""

    def doubt(self) -> None:
        """Note that records are missing here. Entries stay as they are, since a token has its place
        from those before; and what workers hold is asked for by numbers of sessions, which may have
        been given again: nothing is known of it any more."""
        self._doubted = {*self.of, *self.ended}
        self.epochs.clear()

    def __contains__(self, ticket: str) -> bool:
        return ticket in self.of or ticket in self.ended

    def find(self, ticket: str) -> Entry | None:
        """Return the entry of a ticket, to be read."""
        if (ended := self.ended.get(ticket)) is not None:
            return ended.entry()
        return self.of.get(ticket)

    @property
    def size(self) -> int:
        """Return approximately the bytes that all entries take in memory."""
        return self.ended_bytes + sum(one.size for one in self.of.values())

    def kept(self) -> Iterator[tuple[str, Entry | EndedReply]]:
        """Yield all entries by their tickets, those that have ended as they are packed."""
        yield from self.of.items()
        yield from self.ended.items()

    def open(self, ticket: str) -> Entry | None:
        """Return the entry of a ticket, to be changed; `settle` it afterwards if it has ended."""
        if (ended := self._take(ticket)) is not None:
            self.of[ticket] = ended.entry()
        return self.of.get(ticket)

    def _take(self, ticket: str) -> EndedReply | None:
        """Remove and return the entry of a finished reply."""
        if (ended := self.ended.pop(ticket, None)) is not None:
            self.ended_bytes -= ended.size
        return ended

    def settle(self, entry: Entry) -> None:
        """Pack an entry, if it has ended."""
        if entry.finished is not None and self.of.pop(entry.ticket, None) is not None:
            ended = self.ended[entry.ticket] = EndedReply.of(entry)
            self.ended_bytes += ended.size

    def forget(self, ticket: str) -> None:
        """Let the entry of a ticket go."""
        self.of.pop(ticket, None)
        self._take(ticket)

    def of_session(self, number: int) -> Entry | None:
        """Return the entry that a session of this number was of."""
        tickets = (ticket for ticket, one in self.kept() if number in one.sessions)
        ticket = next(tickets, None)
        return None if ticket is None else self.find(ticket)

    def known(self) -> Iterator[bytes]:
        """Yield records that say what is known of coordinators."""
        for epoch in self.epochs:
            yield coordinated(epoch, self.sessions)

    def apply(self, record: bytes) -> str:
        """Take in a record; return the ticket that it is about, empty if it is about none.
        `DecodeError` if it is none of ours."""
        try:
            kind, *what = msgpack.unpackb(record, use_list=False)
            if kind == "coordinated":
                epoch, sessions = what
                self.epochs.add(int(epoch))
                self.sessions = max(self.sessions, int(sessions))
                return ""
            if kind == "term":  # of an older release, whose coordinators had a standby
                return ""
            if kind == "begun":
                entry = _begun(*what)
                self._take(entry.ticket)
                self.of[entry.ticket] = entry
                self._doubted.discard(entry.ticket)
                return entry.ticket
            ticket, *rest = what
            if ticket in self._doubted:
                return str(ticket)
            if (changed := self.open(ticket)) is not None:
                try:
                    _CHANGES[kind](changed, *rest)
                finally:
                    self.settle(changed)
                self.sessions = max(self.sessions, *changed.sessions, 0)
            return str(ticket)
        except (DecodeError, KeyError, TypeError, ValueError) as error:
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
