"""One HTTP request while it is decoded: an ordered queue of the coordinator's messages about its
replies, read by the writer of the response. It ends with the last reply, with an error, or when the
client disconnects, which cancels the running replies at once. If the coordinator's queue has room
for none of the replies, the request is refused; otherwise further replies are submitted as earlier
ones end."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from dovetail.protocol.messages import Emitted, Failed, PromptRead, PromptScored
from dovetail.runtime.http.asked import Told
from dovetail.runtime.http.errors import RETRY_AFTER_S, ApiError, of_failure, unavailable
from dovetail.runtime.http.gateway import Gateway
from dovetail.runtime.http.orders import Order

AT_ONCE = 16  # replies of one request that are decoded at a time, to leave room for other requests


class Gone(Exception):
    """The client has disconnected."""


class WrongVocabulary(Exception):
    """The prompt was tokenized with the vocabulary of an earlier target."""


class Run:
    """The replies to one HTTP request."""

    def __init__(self, gateway: Gateway, deadline_s: float = math.inf) -> None:
        """`deadline_s`: how long a reply may take from its first token, and a request without one
        since it came or its prompt made progress."""
        self.began_s = time.monotonic()
        self._deadline_s, self._replying = deadline_s, False
        self._deadline: asyncio.TimerHandle | None = None
        self._gateway = gateway
        self._order: Order | None = None
        self._next = 0  # the number of the first reply that has not been submitted
        self._numbers: dict[int, int] = {}
        """Reply -> its request's number at the coordinator, while it runs."""
        self._refused: deque[int] = deque()
        """Replies for which the queue had no room, although it had for others."""
        self._begun = False  # True once one of the replies has
        self._heard: deque[tuple[int, Told]] = deque()
        self._end: ApiError | Gone | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def begin(self, order: Order, within_s: float | None = None) -> None:
        """Submit the replies and wait for the first message; may raise `WrongVocabulary`."""
        self._order, self._next = order, 0
        self._wait_on()
        self._ask()
        with suppress(TimeoutError):
            await self._wait(within_s)
        first = self._heard[0][1] if self._heard else None
        if isinstance(first, Failed):
            self.close()
            if first.code == "vocabulary":
                self._heard.clear()
                raise WrongVocabulary
            raise of_failure(first)

    async def take(self, within_s: float | None = None) -> list[tuple[int, Told]]:
        """Return the new messages, at least one, each with its reply; empty: all have ended. Raises
        `ApiError` if a reply failed, `Gone` if the client has disconnected, and `TimeoutError` if
        nothing arrived within `within_s` seconds."""
        if not (self._heard or self._numbers or self._refused or self._end):
            return []
        await self._wait(within_s)
        heard, self._heard = [*self._heard], deque()
        return heard

    def fail(self, error: ApiError | Gone) -> None:
        """End the run with this error."""
        self._end = self._end or error
        self.close()
        self._wake()

    def _wait_on(self) -> None:
        """Begin to wait: for progress of the prompt, or for the end of the reply."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self._deadline_s < math.inf:
            late = _late(self._deadline_s, replying=self._replying)
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self._deadline_s, self.fail, late)

    def close(self) -> None:
        """Cancel the running replies."""
        if self._deadline is not None:
            self._deadline.cancel()
        numbers, self._numbers = self._numbers, {}
        self._refused.clear()
        self._next = len(self._order.submits) if self._order is not None else 0
        for number in numbers.values():
            self._gateway.cancel(number)

    def _ask(self) -> None:
        assert self._order is not None
        while self._next < len(self._order.submits) and len(self._numbers) < AT_ONCE:
            self._next += 1
            self._submit(self._order, self._next - 1)

    def _submit(self, order: Order, index: int) -> None:
        self._numbers[index] = self._gateway.submit(order.submits[index], self._teller(index))

    def _teller(self, index: int) -> Callable[[Told], None]:
        def tell(told: Told) -> None:
            if index not in self._numbers:
                return
            if isinstance(told, Failed) and told.code == "capacity" and self._put_off(index):
                return
            self._begun = self._begun or not isinstance(told, Failed)
            self._heard.append((index, told))
            if not self._replying and isinstance(told, Emitted | PromptRead | PromptScored):
                self._replying = isinstance(told, Emitted)
                self._wait_on()
            if told.type in ("finished", "failed"):
                self._numbers.pop(index, None)
                self._ask_more()
            self._wake()

        return tell

    def _put_off(self, index: int) -> bool:
        """Let a reply that found the queue full wait until another one ends; return False if none
        was accepted."""
        del self._numbers[index]
        if not self._numbers:
            if not self._begun:
                self.close()
                return False
            asyncio.get_running_loop().call_later(RETRY_AFTER_S, self._ask_more)
        self._refused.append(index)
        return True

    def _ask_more(self) -> None:
        """Submit the first deferred reply, or further ones."""
        try:
            if self._refused and self._order is not None:
                self._submit(self._order, self._refused.popleft())
            else:
                self._ask()
        except ApiError as error:
            self.fail(error)

    async def _wait(self, within_s: float | None = None) -> None:
        """Wait for a message; raise the error that ended the run, or `TimeoutError`."""
        if not self._heard and self._end is None:  # a third of the cost of asyncio.timeout
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(within_s, self._wake) if within_s is not None else None
            await self._waiter
            if timer is not None:
                timer.cancel()
            if not self._heard and self._end is None:
                raise TimeoutError
        if self._end is not None:
            raise self._end

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _late(seconds: float, *, replying: bool) -> ApiError:
    text = f"the reply has taken longer than {seconds:g} s (http.deadline_s) and was cancelled"
    if not replying:
        text = f"for {seconds:g} s (http.deadline_s) the request made no progress: it was cancelled"
    return ApiError(504, text, code="timeout")


def ended_early() -> ApiError:
    """Return the error for a reply that the coordinator cancelled when it ended."""
    return unavailable("the coordinator has ended: try again once another one is running")
