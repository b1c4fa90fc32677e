"""The HTTP process's end of its link to the coordinator: many requests at a time, each with a
receiver of its messages. The event loop reads the link: its descriptors are edge-triggered, so it
is read until empty after each event and after each send. When the coordinator is lost, the gateway
reconnects at growing intervals; requests continue on the new one if the old one had a journal, and
fail otherwise. Independent of HTTP.
"""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from pydantic import ValidationError

from dovetail.protocol.codec import REPLY, encode
from dovetail.protocol.errors import DecodeError, LinkError, PeerBusy, ProtocolError, UserError
from dovetail.protocol.links import Link
from dovetail.protocol.messages import (
    VERSION,
    Cancel,
    Describe,
    Described,
    Emitted,
    Failed,
    Finished,
    Forget,
    Forgotten,
    Hello,
    LoadingState,
    Look,
    Message,
    PromptRead,
    PromptScored,
    Recall,
    Recalled,
    Reply,
    Reported,
    Seen,
    Status,
    Submit,
    Welcome,
)
from dovetail.protocol.settings import ANSWER_S
from dovetail.runtime.client import no_answer
from dovetail.runtime.http.asked import A, Asked, Questions, RequestTarget, Told
from dovetail.runtime.http.errors import ApiError, of_failure, unavailable
from dovetail.runtime.text.tokenizer import TextCodec, codec_of

log = logging.getLogger("dovetail.http")

RETRY_S, MOST_RETRY_S = 0.1, 1.0
"""Seconds between attempts to reach a coordinator: the first interval and the longest."""
FRESH_S = 0.5  # seconds for which the last description of the target is valid
BUSY_S = 0.005
MAX_UNSENT = 4096
AWAY_S = 60.0  # seconds for which requests with a ticket wait for another coordinator
COMES_BACK = (
    "try again in a few seconds; `dovetail serve` restarts its coordinator, one started by "
    "`dovetail coordinator` must be restarted by hand"
)


class Gateway:
    """A client of the coordinator for all requests, kept connected by `run`."""

    def __init__(
        self,
        connect: Callable[[], Link],
        first: Link | None = None,
        answer_s: float = ANSWER_S,
        read: Callable[[], TextCodec | None] = lambda: None,
    ) -> None:
        """`connect` opens a link, blocking, or raises; `first` is open. `answer_s`: how long to
        wait for answers. `read`, if given, loads the first target's tokenizer early."""
        self._read_ahead = read
        self._ahead: asyncio.Future[TextCodec | None] | None = None
        self._answer_s = answer_s
        self._loading: Sequence[LoadingState] = ()
        """The workers that were loading at the last status."""
        self._connect, self._first = connect, first
        self._link: Link | None = None
        self._epoch = secrets.randbits(62)
        self._there = False
        self._why = "the coordinator has not answered yet"
        self._changed = asyncio.Event()  # the coordinator has sent Welcome, or is lost
        self._tried = asyncio.Event()
        self._number = 0
        self._asked: dict[int, Asked] = {}
        self.journal, self._lost_s = False, 0.0
        """True if requests with a ticket outlive the coordinator; when the last one was lost."""
        self._questions = Questions()
        self._unsent: deque[Message] = deque()
        self._due = False
        self._target: RequestTarget | None = None
        self._codec: TextCodec | None = None
        """The last target's, reused if the next target has the same tokenizer."""
        self._target_s = 0.0  # when its existence was last confirmed, on the loop's clock
        self._describing = asyncio.Lock()

    async def run(self) -> None:
        """Connect, and reconnect when the coordinator is lost, until cancelled."""
        wait_s = RETRY_S
        self._ahead = asyncio.get_running_loop().run_in_executor(None, self._read_ahead)
        try:
            while True:
                began_s = time.monotonic()
                there = await self._open()
                self._tried.set()
                if there:
                    wait_s = RETRY_S
                    await self._until_lost()
                    log.warning("%s", self._why)
                self._close()
                await asyncio.sleep(began_s + wait_s - time.monotonic())
                wait_s = min(2 * wait_s, MOST_RETRY_S)
        finally:
            self._close()

    async def first(self) -> str:
        """Wait for the first attempt to register; return why it failed, or ""."""
        await self._tried.wait()
        return self.missing

    @property
    def missing(self) -> str:
        """Why the coordinator cannot be reached; empty if it can."""
        return "" if self._there else self._why

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._asked)

    # -- requests ----------------------------------------------------------------------------------

    def submit(self, submit: Submit, tell: Callable[[Told], None]) -> int:
        """Submit a completion; return its number, for `cancel`. Its messages go to the receiver
        `tell`; the last is a Finished or a Failed. If the coordinator was just lost, a request that
        has a ticket or has begun waits for the next one; otherwise `ApiError` is raised."""
        if not (submit.again and self._comes_back):
            self._check_there()
        self._number += 1
        message = submit.model_copy(update={"epoch": self._epoch, "request": self._number})
        try:
            if self._there:
                self._send(message)
        except ProtocolError as error:
            raise ApiError(413, f"the request is too long for the coordinator: {error}") from None
        self._asked[self._number] = Asked(message, tell, submit.told)
        return self._number

    @property
    def _comes_back(self) -> bool:
        """Whether requests wait for another coordinator."""
        return self.journal and time.monotonic() - self._lost_s < AWAY_S

    async def recall(self, ticket: str, owner: str) -> bytes:
        """Return the memo of a ticket; raise `ApiError` if its owner has none."""
        try:
            question = Recall(epoch=self._epoch, request=0, ticket=ticket, owner=owner)
        except ValidationError:  # longer than any issued one
            text = f"no response {ticket[:80]!r} is known here: send the id unchanged"
            raise ApiError(404, text, code="reply_not_found") from None
        return (await self._ask(question, Recalled)).memo

    async def forget(self, owner: str) -> bool:
        """Make the coordinator forget an owner's earlier texts; return whether there were any.
        Raise `ApiError` without a coordinator."""
        question = Forget(epoch=self._epoch, request=0, owner=owner)
        return (await self._ask(question, Forgotten)).found

    def cancel(self, number: int) -> None:
        """Cancel a request; no effect if it has ended already."""
        if self._asked.pop(number, None) is not None and self._there:
            self._send(Cancel(epoch=self._epoch, request=number))

    async def target(self) -> RequestTarget:
        """Return the target of requests, after a query if it may have changed; raise `ApiError` if
        there is none."""
        self._check_there()
        async with self._describing:
            now_s = asyncio.get_running_loop().time()
            if self._target is not None and now_s - self._target_s > FRESH_S:
                fingerprint = self._target.described.fingerprint
                serving = [
                    worker
                    for worker in (await self.status()).workers
                    if not (worker.standby or worker.leaving)
                ]
                self._target_s = now_s
                if all(worker.fingerprint != fingerprint for worker in serving):
                    self._target = None
            if self._target is None:
                if self._ahead is not None:
                    self._codec, self._ahead = await self._ahead, None
                described = await self._ask(Describe(epoch=self._epoch), Described)
                text = await asyncio.get_running_loop().run_in_executor(
                    None, codec_of, described, self._codec
                )
                self._codec = text
                self._target, self._target_s = RequestTarget(described, text), now_s
            return self._target

    def forget_target(self) -> None:
        """Forget the target, which may have changed."""
        self._target = None

    async def status(self) -> Reported:
        """Return the coordinator's state; raise `ApiError` without a coordinator."""
        state = await self._ask(Status(epoch=self._epoch), Reported)
        self._loading = state.loading
        return state

    async def look(self, after: int) -> Seen:
        """Return the events since a number; raise `ApiError` without a coordinator."""
        return await self._ask(Look(epoch=self._epoch, request=0, after=after), Seen)

    async def _ask(self, question: Describe | Status | Look | Recall | Forget, kind: type[A]) -> A:
        self._check_there()
        answer = self._questions.expect(kind)
        self._send(question)
        try:
            async with asyncio.timeout(self._answer_s):
                return await answer
        except TimeoutError:
            raise unavailable(no_answer(self._answer_s, self._loading)) from None

    def _check_there(self) -> None:
        if not self._there:
            raise unavailable(self._why)

    # -- the link ----------------------------------------------------------------------------------

    async def _open(self) -> bool:
        """Connect and send Hello; return whether there was an answer."""
        loop = asyncio.get_running_loop()
        try:
            link = self._first
            if link is None:
                link = await loop.run_in_executor(None, self._connect)
        except (LinkError, UserError) as error:
            self._why = str(error)
            return False
        self._link, self._first = link, None
        loop.add_reader(link.fileno(), self._pump)
        loop.add_reader(link.monitor_fileno(), self._look)
        self._changed.clear()
        name = f"http-{os.getpid()}"
        self._send(
            Hello(
                epoch=self._epoch,
                roles=("client",),
                name=name,
                host=socket.gethostname()[:512],
                pid=os.getpid(),
                version=VERSION,
            )
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(self._answer_s):
                await self._changed.wait()
        return self._there

    async def _until_lost(self) -> None:
        while self._there:
            self._changed.clear()
            await self._changed.wait()

    def _close(self) -> None:
        """Close the link, and fail everything that depends on it."""
        self._lose(self._why)
        if self._link is not None:
            for descriptor in (self._link.fileno(), self._link.monitor_fileno()):
                asyncio.get_running_loop().remove_reader(descriptor)
            self._link.close()
            self._link = None
        self._unsent.clear()

    def _lose(self, why: str) -> None:
        """Treat the coordinator as lost."""
        if self._there:
            self._lost_s = time.monotonic()
        self._there, self._why, self._target = False, why, None
        self._changed.set()
        while self._questions:
            self._questions.failed(unavailable(why))
        comes_back = self._comes_back
        self._give_up(lambda asked: not (comes_back and asked.submit.ticket))

    def _give_up(self, given_up: Callable[[Asked], bool]) -> None:
        """Fail these requests for lack of a coordinator."""
        gone = {number: asked for number, asked in self._asked.items() if given_up(asked)}
        for number, asked in gone.items():
            del self._asked[number]
            text = "the coordinator was lost during this request: try again"
            asked.tell(Failed(epoch=self._epoch, code="coordinator_lost", text=text))

    def _send(self, message: Message) -> None:
        """Send now or soon; then check for messages: sending may have consumed their signal."""
        frames = encode(message)
        if self._link is None:
            return
        try:
            if self._unsent:
                raise PeerBusy
            self._link.offer(frames)
        except PeerBusy:
            self._unsent.append(message)
        except LinkError as error:
            self._lose(f"{error}: {COMES_BACK}")
            return
        if not self._due:
            self._due = True
            loop = asyncio.get_running_loop()
            loop.call_later(BUSY_S, self._resume) if self._unsent else loop.call_soon(self._resume)

    def _resume(self) -> None:
        """Send waiting messages, and read."""
        self._due = False
        waiting, self._unsent = self._unsent, deque()
        for message in waiting:
            self._send(message)
        if len(self._unsent) > MAX_UNSENT:
            self._lose(
                f"the coordinator reads nothing, and {len(self._unsent)} messages wait for it"
            )
        self._pump()

    def _pump(self) -> None:
        """Handle everything that has arrived."""
        self._read(lambda link: link.take())

    def _look(self) -> None:
        """Handle the last messages of a coordinator, and find out whether it is lost."""
        self._read(lambda link: link.receive(0))

    def _read(self, take: Callable[[Link], list[bytes] | None]) -> None:
        link = self._link
        try:
            while link is not None and link is self._link and (frames := take(link)) is not None:
                self._heard(REPLY.decode(frames))
        except LinkError as error:
            self._lose(f"{error}: {COMES_BACK}")
        except DecodeError as error:
            self._lose(f"the coordinator sent something that is not a message: {error}")

    def _heard(self, reply: Reply) -> None:
        match reply:
            case Emitted() | PromptScored():
                if (asked := self._asked.get(reply.request)) is not None:
                    asked.count(reply)
                    asked.tell(reply)
            case PromptRead():
                if (asked := self._asked.get(reply.request)) is not None:
                    asked.tell(reply)
            case Finished():
                if (
                    self._target is not None
                    and reply.result.fingerprint != self._target.described.fingerprint
                ):
                    self._target = None
                if (asked := self._asked.pop(reply.request, None)) is not None:
                    asked.tell(reply)
            case Failed():
                self._failed(reply)
            case Welcome():
                self._welcomed(reply)
            case Described() | Reported() | Seen() | Recalled() | Forgotten():
                self._questions.answered(reply)

    def _welcomed(self, welcome: Welcome) -> None:
        """Continue the requests of an earlier coordinator."""
        if self._there:  # it only checks that we are still connected
            return
        self._there, self.journal = True, welcome.journal
        self._changed.set()
        for asked in self._asked.values():
            self._send(asked.again)

    def _failed(self, failed: Failed) -> None:
        """Handle the failure of a request, a query or our registration."""
        if failed.code in ("worker_lost", "no_target", "vocabulary", "ending"):
            self._target = None
        if failed.session is not None:
            if (asked := self._asked.pop(failed.session, None)) is not None:
                asked.tell(failed)
        elif failed.code in ("protocol", "session", "version", "role") or not self._questions:
            self._lose(f"the coordinator refused the connection: {failed.text}")
        else:
            self._questions.failed(of_failure(failed))
