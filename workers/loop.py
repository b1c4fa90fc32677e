"""The loop of every kind of worker: register; receive a command, execute it, answer; register again
when the coordinator is lost. It is plain and blocking, counts late and broken messages, and
survives failures of single commands and of coordinators: the model stays loaded, and rows of
sessions are kept until the next coordinator has chosen the sessions that it continues."""

import os
import secrets
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import psutil

from dovetail.protocol.codec import COMMAND, encode
from dovetail.protocol.errors import (
    DecodeError,
    DovetailError,
    LinkClosed,
    LinkRefused,
    UserError,
    printable,
)
from dovetail.protocol.links import Link
from dovetail.protocol.messages import (
    MAX_SPANS,
    MAX_STRIKES,
    Command,
    Drain,
    Engage,
    Event,
    Failed,
    Observe,
    Open,
    Probe,
    Probed,
    Welcome,
)
from dovetail.protocol.settings import ANSWER_S
from dovetail.workers.progress import Abandoned, Watchdog, heard
from dovetail.workers.serving.failures import as_request_error, failed, failed_events, subject
from dovetail.workers.serving.registration import (
    EPOCH_BITS,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Listener,
    Reconnecting,
    Standing,
    Worker,
    welcome,
)

MAX_WAITING = 64  # the most messages taken from the link during a computation
PROBE_BYTES = 128  # longer messages cannot be probes
BUSY_AFTER_S = 2.0  # during longer commands, probes are answered out of order
LOOK_EVERY_S = 0.25
"""How often a worker that computes checks the connection to its coordinator."""


def serve(
    link: Link,
    worker: Worker,
    *,
    binding: str = "",
    standby: bool = False,
    load_s: float = 0.0,
    answer_s: float = ANSWER_S,
    reconnecting: Reconnecting | None = None,
    watchdog: Watchdog | None = None,
    listener: Listener | None = None,
) -> Drain | None:
    """Register with the coordinator and work until it dismisses this worker, and return the Drain;
    or until it is lost and not found again. Closes the links that it used. Raises `UserError` if
    the coordinator refuses this worker, `LinkClosed` if it is lost before answering and
    `reconnecting` is not set. `binding`: the cores and memory of this process; on `standby` it gets
    no sessions until the coordinator promotes it; `load_s`: the loading time of its model;
    `listener` receives its progress."""
    loop: _Loop | None
    standing = Standing(binding, standby, load_s, listener, answer_s=answer_s)
    try:
        loop = _register(link, worker, standing, watchdog)
    except LinkClosed as lost:
        link.close()
        if reconnecting is None:
            raise
        loop = _register_again(reconnecting, str(lost), worker, standing, watchdog)
    while loop is not None:
        try:
            return loop.run()
        except LinkClosed as lost:
            standing.suspend(worker, loop.coordinator_epoch)
            loop = (
                None
                if reconnecting is None
                else _register_again(reconnecting, str(lost), worker, standing, watchdog)
            )
    return None


def _register(link: Link, worker: Worker, standing: Standing, watchdog: Watchdog | None) -> "_Loop":
    """Register the worker, each time as a new incarnation."""
    epoch = secrets.randbits(EPOCH_BITS)
    link.send(encode(standing.introduce(worker, epoch)))
    welcomed = welcome(link, standing.answer_s)
    standing.welcomed(welcomed)
    return _Loop(link, worker, standing, epoch, welcomed.epoch, watchdog)


def _register_again(
    reconnecting: Reconnecting,
    why: str,
    worker: Worker,
    standing: Standing,
    watchdog: Watchdog | None,
) -> "_Loop | None":
    """Try to reach the coordinator. Return None if that takes too long; raise `LinkRefused` if it
    was reachable but refused connections."""
    reconnecting.say(f"{why}; reconnecting for up to {reconnecting.most_s:g} s")
    end, pause_s = time.monotonic() + reconnecting.most_s, FIRST_PAUSE_S
    refusal: LinkRefused | None = None
    while (left := end - time.monotonic()) > 0:
        standing.gets_on()
        try:
            link = reconnecting.connect()
            try:
                loop = _register(link, worker, standing, watchdog)
            except BaseException:
                link.close()
                raise
        except LinkClosed as lost:
            if isinstance(lost, LinkRefused):
                if str(lost) != str(refusal):
                    reconnecting.say(str(lost))
                refusal = lost
            time.sleep(min(pause_s, left))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        else:
            reconnecting.say(f"registered again at {link.address}")
            return loop
    if refusal is not None:
        raise refusal
    return None


class _Loop:
    """One incarnation of a worker: the state of `serve` from a registration until the coordinator
    is lost."""

    def __init__(
        self,
        link: Link,
        worker: Worker,
        standing: Standing,
        epoch: int,
        coordinator_epoch: int,
        watchdog: Watchdog | None,
    ) -> None:
        self._link, self._worker, self._standing, self._watchdog = link, worker, standing, watchdog
        self._epoch, self.coordinator_epoch = epoch, coordinator_epoch
        self._stale, self._strikes, self._busy_ns = 0, 0, 0
        self._look_s = 0.0
        self._began_s: float | None = None  # start of the command in progress
        self._waiting: deque[list[bytes]] = deque()  # messages that arrived during a computation
        self._process = psutil.Process(os.getpid())

    def run(self) -> Drain:
        """Carry out commands until Drain, and return it. Raises `LinkClosed` when the coordinator
        is lost or no longer has this worker registered."""
        try:
            with heard(self._beat):
                while True:
                    for event in self._worker.news():
                        self._send(event)
                    if isinstance(command := self._next(), Drain):
                        break
                    if isinstance(command, Failed):
                        self._turned_away(command)
                    for event in self._do(command):
                        self._send(event)
                return command
        except (LinkClosed, Abandoned) as lost:
            if (drain := self._last_drain()) is None:
                raise LinkClosed(str(lost)) from None
            return drain
        finally:
            self._link.close()

    def _send(self, event: Event) -> None:
        spans, began_ns = self._worker.spans, time.monotonic_ns()
        frames = encode(event)
        encoded_ns = time.monotonic_ns()
        self._link.send(frames)
        if spans.fine:
            about = subject(event)
            spans.add_beside("encode", began_ns, encoded_ns, **about)
            spans.add_beside("send", encoded_ns, time.monotonic_ns(), **about)

    def _turned_away(self, refusal: Failed) -> None:
        """Handle a Failed that answers no command: the coordinator either considered this worker
        lost, so that it registers again, or refuses it."""
        if refusal.code == "session":
            raise LinkClosed(printable(refusal.text))
        text = f"the coordinator refused this worker: {printable(refusal.text)}"
        # an error in our message is a bug, not a user error
        raise DovetailError(text) if refusal.code == "protocol" else UserError(text)

    def _last_drain(self) -> Drain | None:
        """Return the Drain that the coordinator sent before it disconnected, if any."""
        try:
            while (frames := self._receive(0.0)) is not None:
                if isinstance(command := self._decode(frames), Drain):
                    return command
        except LinkClosed:
            pass
        return None

    def _next(self) -> Command:
        """Return the coordinator's next command, doing background work until it arrives."""
        while True:
            frames = self._receive(0.0)
            while frames is None and self._idle():
                frames = self._receive(0.0)
            if frames is None:
                frames = self._receive(None)
            if frames is not None and (command := self._decode(frames)) is not None:
                self._standing.gets_on()
                return command

    def _receive(self, timeout_s: float | None) -> list[bytes] | None:
        return self._waiting.popleft() if self._waiting else self._link.receive(timeout_s)

    def _idle(self) -> bool:
        """Do background work. It only precomputes, so failures are ignored here: a command that
        needs the result fails again."""
        start = time.monotonic_ns()
        try:
            with self._at_work():
                worked = self._worker.idle()
        except Exception as error:
            self._send(failed(self._epoch, as_request_error(error)))
            return False
        if worked:
            self._beat()
            self._busy_ns += time.monotonic_ns() - start
        return worked

    def _decode(self, frames: list[bytes]) -> Command | None:
        began_ns = time.monotonic_ns()
        try:
            command = COMMAND.decode(frames)
        except DecodeError as error:
            self._stale += 1
            self._strikes += 1
            if self._strikes >= MAX_STRIKES:
                raise LinkClosed(
                    f"{self._strikes} messages of the coordinator broke the protocol: {error}"
                ) from None
            return None
        if command.epoch != self.coordinator_epoch or isinstance(
            command, Welcome
        ):  # a second Welcome has no meaning
            self._stale += 1
            return None
        if self._worker.spans.fine:
            self._worker.spans.add_beside(
                "decode", began_ns, time.monotonic_ns(), **subject(command)
            )
        return command

    def _do(self, command: Command) -> Iterator[Event]:
        if isinstance(command, Probe):
            yield self._probed(command)
            return
        if isinstance(command, Engage):
            self._standing.serves()
            return
        if isinstance(command, Observe):
            self._worker.spans.fine = command.fine
            return
        if isinstance(command, Open):
            self._standing.opens(command)
        self._began_s = time.monotonic()
        try:
            yield from self._answers(command)
        except Exception as error:  # must not end the other sessions
            yield from failed_events(command, self._epoch, as_request_error(error))
        finally:
            self._began_s = None

    def _answers(self, command: Command) -> Iterator[Event]:
        """Yield the worker's answers to a command, measuring the time between answers but not that
        of sending them."""
        events: Iterator[Event] | None = None
        while True:
            start = time.monotonic_ns()
            self._beat()
            try:
                with self._at_work():
                    events = iter(self._worker.handle(command)) if events is None else events
                    event = next(events, None)
            finally:
                self._busy_ns += time.monotonic_ns() - start
            if event is None:
                return
            yield event

    def _at_work(self) -> AbstractContextManager[None]:
        return nullcontext() if self._watchdog is None else self._watchdog.work()

    def _beat(self) -> None:
        """Note that the computation makes progress. From time to time, check whether the
        coordinator is still connected, and drop commands that a leaving coordinator withdraws."""
        if self._watchdog is not None:
            self._watchdog.beat()
        self._standing.gets_on()
        now_s = time.monotonic()
        if now_s >= self._look_s:
            self._look_s = now_s + LOOK_EVERY_S
            while len(self._waiting) < MAX_WAITING and (frames := self._link.take()) is not None:
                self._waiting.append(frames)
            if self._began_s is not None and now_s - self._began_s > BUSY_AFTER_S:
                self._say_busy()
            try:
                self._link.check()
            except LinkClosed as lost:
                raise Abandoned(str(lost)) from None

    def _say_busy(self) -> None:
        """Answer the waiting probes: this worker is busy and makes progress."""
        waiting, self._waiting = self._waiting, deque()
        for frames in waiting:
            if (probe := self._as_probe(frames)) is not None:
                self._send(self._probed(probe, busy=True))
            else:
                self._waiting.append(frames)

    def _as_probe(self, frames: list[bytes]) -> Probe | None:
        """Return a probe of this coordinator; None for any other message."""
        if len(frames) > 1 or len(frames[0]) > PROBE_BYTES:
            return None
        try:
            command = COMMAND.decode(frames)
        except DecodeError:
            return None
        return (
            command
            if isinstance(command, Probe) and command.epoch == self.coordinator_epoch
            else None
        )

    def _probed(self, probe: Probe, *, busy: bool = False) -> Probed:
        return Probed(
            epoch=self._epoch,
            sent_ns=probe.sent_ns,
            clock_ns=time.monotonic_ns(),
            busy_ns=self._busy_ns,
            stale=self._stale + self._worker.stale,
            sessions=self._worker.sessions,
            rss_bytes=self._process.memory_info().rss,
            busy=busy,
            beside=self._worker.spans.take_beside(MAX_SPANS),
        )
