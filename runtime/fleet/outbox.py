"""Messages to one client, in order. Texts in quick succession are delayed a little and merged;
messages wait while the socket's queue is full. Without sockets and clocks: times and the sending
function are arguments."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from dovetail.protocol.errors import PeerBusy
from dovetail.protocol.messages import (
    Emitted,
    Failed,
    Finished,
    Message,
    PromptScored,
    Recorded,
    Submit,
    TokenLogprobs,
)

EMIT_EVERY_NS = 20_000_000
"""The least time between two texts to a client: people do not read faster, and on few cores the
client would slow down a worker. Waking up and sending over HTTP takes some 300 us of a core."""
MAX_JOINED = 8192  # the most tokens in one message, so that every message can be sent
RECORD_EVERY_NS = 2_000_000  # the least time between two records
OBJECT_BYTES, TOKEN_BYTES, SCORE_BYTES = 512, 48, 144
"""Bytes in memory of an empty message or score, of a token, and of a score's alternative."""


def scores_size(scores: Sequence[TokenLogprobs]) -> int:
    """Return roughly the bytes of scores in memory; those of a reply have one size."""
    return len(scores) * (OBJECT_BYTES + SCORE_BYTES * len(scores[0].top)) if scores else 0


def size_of(message: Message) -> int:
    """Return roughly the bytes of a message in memory."""
    match message:
        case Emitted() | PromptScored():
            tokens = message.tokens if isinstance(message, Emitted) else ()
            size = TOKEN_BYTES * len(tokens) + scores_size(message.logprobs)
        case Submit():
            texts = sum(4 * len(text) for text in (message.text or "", *(message.turns or ())))
            texts += 0 if message.constraint is None else len(message.constraint.grammar)
            size = len(message.memo) + texts + TOKEN_BYTES * len(message.tokens or ())
        case Finished():
            size = TOKEN_BYTES * len(message.result.token_ids) + SCORE_BYTES * len(message.spans)
        case _:
            size = len(repr(message))
    return OBJECT_BYTES + size


@dataclass
class _TextPiece:
    """One message to be sent, or consecutive texts of one request."""

    request: int  # -1: none
    messages: list[Message]
    tokens: int = 0
    bytes: int = 0

    def message(self) -> Message:
        """Return the entries merged into one message."""
        if len(self.messages) == 1:
            return self.messages[0]
        texts = [message for message in self.messages if isinstance(message, Emitted)]
        joined = Emitted(
            epoch=texts[0].epoch,
            request=self.request,
            tokens=tuple(chain.from_iterable(text.tokens for text in texts)),
            drafted=tuple(chain.from_iterable(text.drafted for text in texts)),
            text="".join(text.text for text in texts),
            logprobs=tuple(chain.from_iterable(text.logprobs for text in texts)),
        )
        self.messages = [joined]
        return joined


class Outbox:
    """The messages that wait for one client."""

    def __init__(self) -> None:
        self._waiting: deque[_TextPiece] = deque()
        self._open: dict[int, _TextPiece] = {}
        """By request: the waiting text that can still be added to."""
        self._begun: set[int] = set()  # requests with text sent that have not ended
        self.bytes = 0  # approximate bytes of the waiting messages in memory
        self._patience_ns = EMIT_EVERY_NS
        self._sent_ns = 0
        self._reminded_ns: int | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: Message) -> None:
        """Queue a message. Text and records may be delayed, except the first text of a request;
        other messages are due at once."""
        request, size = _subject(message), size_of(message)
        self.bytes += size
        if not isinstance(message, Emitted):
            self._open.pop(request, None)
            self._waiting.append(_TextPiece(request, [message], bytes=size))
            if isinstance(message, Finished | Failed):
                self._begun.discard(request)
            self._patience_ns = min(
                self._patience_ns, RECORD_EVERY_NS if isinstance(message, Recorded) else 0
            )
            return
        if request not in self._begun:
            self._begun.add(request)
            self._patience_ns = 0
        piece = self._open.get(request)
        if piece is None or piece.tokens >= MAX_JOINED:
            piece = self._open[request] = _TextPiece(request, [])
            self._waiting.append(piece)
        piece.messages.append(message)
        piece.tokens += len(message.tokens)
        piece.bytes += size

    def due(self, now_ns: int) -> bool:
        """Return whether to send now."""
        return now_ns - self._sent_ns >= self._patience_ns

    @property
    def patience_ns(self) -> int:
        """Waiting messages are due after this time."""
        return self._patience_ns

    def remind(self) -> bool:
        """Return whether to call again in `patience_ns`; True once until all are sent."""
        sooner = self._reminded_ns is None or self._patience_ns < self._reminded_ns
        if sooner:
            self._reminded_ns = self._patience_ns
        return sooner

    def send(self, send: Callable[[Message], object], now_ns: int) -> None:
        """Send waiting messages until the queue is full; other exceptions of `send` propagate."""
        self._sent_ns, self._reminded_ns, self._patience_ns = now_ns, None, EMIT_EVERY_NS
        while self._waiting:
            try:
                send(self._waiting[0].message())
            except PeerBusy:
                return
            self._take_first()

    def drop(self) -> int | None:
        """Drop the next message and the others of its request; return that request, or None."""
        request = self._take_first().request
        if request < 0:
            return None
        self.forget(request)
        return request

    def forget(self, request: int) -> None:
        """Drop all waiting messages about a request."""
        self._begun.discard(request)
        self._open.pop(request, None)
        self._waiting = deque(piece for piece in self._waiting if piece.request != request)
        self.bytes = sum(piece.bytes for piece in self._waiting)

    def _take_first(self) -> _TextPiece:
        piece = self._waiting.popleft()
        self.bytes -= piece.bytes
        if self._open.get(piece.request) is piece:
            del self._open[piece.request]
        return piece

    @property
    def requests(self) -> set[int]:
        """Requests with a waiting message."""
        return {piece.request for piece in self._waiting if piece.request >= 0}


def _subject(message: Message) -> int:
    """Return the request that a message is about; -1 if none."""
    if isinstance(message, Failed):
        return -1 if message.session is None else message.session
    return getattr(message, "request", -1)
