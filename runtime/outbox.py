"""What one client is told, in order: text that comes quickly waits a little, and what a full queue does not take waits longer.

Text that waits is told in one piece. Knows neither sockets nor a clock: times and the way out are handed in.
"""

from collections import deque
from collections.abc import Callable

from dovetail.protocol.errors import PeerBusy
from dovetail.protocol.messages import Emitted, Message, Recorded

EMIT_EVERY_NS = 2_000_000
"""A client is not woken more often for text: nobody reads faster, and where cores are few it would take one from a worker."""


class Outbox:
    """The messages that wait for one client."""

    def __init__(self) -> None:
        self._waiting: deque[Message] = deque()
        self._sent_ns = 0
        self._reminded = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: Message) -> None:
        last = self._waiting[-1] if self._waiting else None
        if isinstance(last, Emitted) and isinstance(message, Emitted) and last.request == message.request:
            self._waiting[-1] = _joined(last, message)
        else:
            self._waiting.append(message)

    def due(self, now_ns: int) -> bool:
        """Whether to send now: text and records can wait, anything else cannot."""
        return now_ns - self._sent_ns >= EMIT_EVERY_NS or not all(isinstance(message, Emitted | Recorded) for message in self._waiting)

    def remind(self) -> bool:
        """Whether somebody has to come back for what waits; once until it is sent."""
        first, self._reminded = not self._reminded, True
        return first

    def send(self, send: Callable[[Message], None], now_ns: int) -> None:
        """Send what waits, until the queue is full; whatever else `send` raises passes."""
        self._sent_ns, self._reminded = now_ns, False
        while self._waiting:
            try:
                send(self._waiting[0])
            except PeerBusy:
                return
            self._waiting.popleft()


def _joined(first: Emitted, second: Emitted) -> Emitted:
    """One message that says what both say."""
    tokens, drafted, text = first.tokens + second.tokens, first.drafted + second.drafted, first.text + second.text
    logprobs = first.logprobs + second.logprobs
    return Emitted(epoch=first.epoch, request=first.request, tokens=tokens, drafted=drafted, text=text, logprobs=logprobs)
