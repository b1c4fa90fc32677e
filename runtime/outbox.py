"""What one client is told, in order: text that comes quickly waits a little, and what a full queue
does not take waits longer.

Text of a request that waits is told in one piece. Knows neither sockets nor a clock: times and the
way out are handed in.
"""

from collections import deque
from collections.abc import Callable

from dovetail.protocol.errors import PeerBusy
from dovetail.protocol.messages import Emitted, Failed, Finished, Message, Recorded

EMIT_EVERY_NS = 20_000_000
"""A client is not woken more often for text: nobody reads faster, and where cores are few it would
take one from a worker. To be woken and to say something over HTTP takes some 300 us of a core."""
MAX_JOINED = 8192
"""Tokens that are told in one piece, so that every message can be sent."""
RECORD_EVERY_NS = 2_000_000
"""The same for records, which somebody measures by."""


class Outbox:
    """The messages that wait for one client."""

    def __init__(self) -> None:
        self._waiting: deque[Message] = deque()
        self._begun: set[int] = set()
        """Requests that have been told some text and not their end."""
        self.tokens = 0
        """That wait."""
        self._patience_ns = EMIT_EVERY_NS
        self._sent_ns = 0
        self._reminded_ns: int | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: Message) -> None:
        """Text and records can wait, but for the first text of a request; anything else cannot."""
        if not isinstance(message, Emitted):
            self._waiting.append(message)
            if isinstance(message, Finished | Failed):
                self._begun.discard(_subject(message))
            self._patience_ns = min(
                self._patience_ns, RECORD_EVERY_NS if isinstance(message, Recorded) else 0
            )
            return
        self.tokens += len(message.tokens)
        if message.request not in self._begun:
            self._begun.add(message.request)
            self._patience_ns = 0
        # what waits for a client that reads is short: a message or two of each of its requests
        place = next(
            (
                place
                for place in reversed(range(len(self._waiting)))
                if _subject(self._waiting[place]) == message.request
            ),
            None,
        )
        before = self._waiting[place] if place is not None else None
        if place is not None and isinstance(before, Emitted) and len(before.tokens) < MAX_JOINED:
            self._waiting[place] = _joined(before, message)
        else:
            self._waiting.append(message)

    def due(self, now_ns: int) -> bool:
        """Whether to send now."""
        return now_ns - self._sent_ns >= self._patience_ns

    @property
    def patience_ns(self) -> int:
        """After so long what waits is due."""
        return self._patience_ns

    def remind(self) -> bool:
        """Whether somebody has to come back for what waits, in `patience_ns`; once until it is
        sent, or sooner than was said."""
        sooner = self._reminded_ns is None or self._patience_ns < self._reminded_ns
        if sooner:
            self._reminded_ns = self._patience_ns
        return sooner

    def send(self, send: Callable[[Message], None], now_ns: int) -> None:
        """Send what waits, until the queue is full; whatever else `send` raises passes."""
        self._sent_ns, self._reminded_ns, self._patience_ns = now_ns, None, EMIT_EVERY_NS
        while self._waiting:
            try:
                send(self._waiting[0])
            except PeerBusy:
                return
            self._count_out(self._waiting.popleft())

    def drop(self) -> int | None:
        """Forget what would be sent next, and all else that is about its request: which that is,
        None if it is about none."""
        request = _subject(first := self._waiting.popleft())
        self._begun.discard(request)
        self._count_out(first)
        if request < 0:
            return None
        kept = [message for message in self._waiting if _subject(message) != request]
        self.tokens = sum(len(message.tokens) for message in kept if isinstance(message, Emitted))
        self._waiting = deque(kept)
        return request

    @property
    def requests(self) -> set[int]:
        """Those that something waits to be said of."""
        return {request for message in self._waiting if (request := _subject(message)) >= 0}

    def _count_out(self, message: Message) -> None:
        self.tokens -= len(message.tokens) if isinstance(message, Emitted) else 0


def _subject(message: Message) -> int:
    """The request that a message is about; -1 where it is about none."""
    if isinstance(message, Failed):
        return -1 if message.session is None else message.session
    return getattr(message, "request", -1)


def _joined(first: Emitted, second: Emitted) -> Emitted:
    """One message that says what both say."""
    tokens, drafted, text = (
        first.tokens + second.tokens,
        first.drafted + second.drafted,
        first.text + second.text,
    )
    logprobs = first.logprobs + second.logprobs
    return Emitted(
        epoch=first.epoch,
        request=first.request,
        tokens=tokens,
        drafted=drafted,
        text=text,
        logprobs=logprobs,
    )
