"""A worker's life: introduce yourself, then take a command, do it, answer.

One plain blocking loop for every kind of worker. It counts what is late or broken, answers what fails, and keeps the worker alive through failures of
single commands. Knows links and messages; what a command means is the worker's business.
"""

import os
import secrets
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import Protocol

import psutil

from dovetail.protocol.codec import COMMAND, encode
from dovetail.protocol.errors import DecodeError, LinkClosed, RequestError, UserError
from dovetail.protocol.links import Link
from dovetail.protocol.messages import Close, Command, Draft, Drain, Event, Failed, Feed, Hello, Open, Probe, Probed, Verify, Welcome
from dovetail.workers.failures import as_request_error

EPOCH_BITS = 62
REGISTRATION_S = 30.0


class Worker(Protocol):
    """What the loop drives: sessions of one or both roles."""

    stale: int
    """Late, duplicate and stale commands that this worker has dropped."""

    @property
    def sessions(self) -> int:
        """How many are open."""

    def hello(self, epoch: int) -> Hello:
        """The introduction; `epoch` is this worker's own and goes into every event."""

    def handle(self, command: Command) -> Iterable[Event]:
        """Do a command and answer it: with several events if it has parts, each sent as it comes; with none if it was stale."""

    def idle(self) -> bool:
        """Do one bit of background work, about a millisecond; False: nothing is left to do."""


def serve(link: Link, worker: Worker, *, binding: str = "") -> None:
    """Register with the coordinator and work until Drain or until it has gone; `UserError` if it refuses this worker, `LinkClosed` if it goes before.

    `binding` says to which cores and memory this process is bound; the worker does not know.
    """
    epoch = secrets.randbits(EPOCH_BITS)
    link.send(encode(worker.hello(epoch).model_copy(update={"binding": binding})))
    _Loop(link, worker, epoch, _welcome(link).epoch).run()


def _welcome(link: Link) -> Welcome:
    """The coordinator's answer to Hello; whatever else arrives before it is not for this worker."""
    deadline = time.monotonic() + REGISTRATION_S
    while (left := deadline - time.monotonic()) > 0:
        frames = link.receive(left)
        if frames is None:
            break
        try:
            answer = COMMAND.decode(frames)
        except DecodeError:
            continue
        if isinstance(answer, Failed):
            raise UserError(f"the coordinator refused this worker: {answer.text}")
        if isinstance(answer, Welcome):
            return answer
    raise UserError(f"the coordinator did not answer within {REGISTRATION_S:.0f} s; check that the address is a dovetail coordinator's")


class _Loop:
    """The state of `serve` after registration."""

    def __init__(self, link: Link, worker: Worker, epoch: int, coordinator_epoch: int) -> None:
        self._link, self._worker = link, worker
        self._epoch, self._coordinator_epoch = epoch, coordinator_epoch
        self._stale, self._busy_ns = 0, 0
        self._process = psutil.Process(os.getpid())

    def run(self) -> None:
        try:
            while not isinstance(command := self._next(), Drain):
                if isinstance(command, Failed):
                    raise UserError(f"the coordinator turned this worker away: {command.text}")
                for event in self._do(command):
                    self._link.send(encode(event))
        except LinkClosed:
            return

    def _next(self) -> Command:
        """The next command of this coordinator; background work while there is none."""
        while True:
            frames = self._link.receive(0.0)
            while frames is None and self._idle():
                frames = self._link.receive(0.0)
            if frames is None:
                frames = self._link.receive(None)
            if frames is not None and (command := self._decode(frames)) is not None:
                return command

    def _idle(self) -> bool:
        """Background work; it is only ahead of time, so a worker lives without it, and what fails here fails again where a command needs it."""
        start = time.monotonic_ns()
        try:
            worked = self._worker.idle()
        except Exception:
            traceback.print_exc(file=sys.stderr)
            return False
        if worked:
            self._busy_ns += time.monotonic_ns() - start
        return worked

    def _decode(self, frames: list[bytes]) -> Command | None:
        try:
            command = COMMAND.decode(frames)
        except DecodeError:
            self._stale += 1
            return None
        if command.epoch != self._coordinator_epoch or isinstance(command, Welcome):  # Welcome answers a Hello, and that is done
            self._stale += 1
            return None
        return command

    def _do(self, command: Command) -> Iterator[Event]:
        if isinstance(command, Probe):
            yield self._probed(command)
            return
        start = time.monotonic_ns()
        try:
            yield from self._worker.handle(command)
        except Exception as error:  # one command's failure must not end the other sessions
            yield from failures(command, self._epoch, as_request_error(error))
        finally:
            self._busy_ns += time.monotonic_ns() - start

    def _probed(self, probe: Probe) -> Probed:
        return Probed(
            epoch=self._epoch,
            sent_ns=probe.sent_ns,
            clock_ns=time.monotonic_ns(),
            busy_ns=self._busy_ns,
            stale=self._stale + self._worker.stale,
            sessions=self._worker.sessions,
            rss_bytes=self._process.memory_info().rss,
        )


def failures(command: Command, epoch: int, error: RequestError) -> list[Event]:
    """A Failed for every session that a command is about, or a single one if it is about none."""
    subjects: list[tuple[int | None, int | None]] = [(None, None)]
    match command:
        case Verify():
            subjects = [(item.session, item.round) for item in command.items]
        case Open() | Feed() | Draft():
            subjects = [(command.session, command.round)]
        case Close():
            subjects = [(command.session, None)]
    return [Failed(epoch=epoch, session=s, round=r, code=error.code, text=str(error)) for s, r in subjects]  # type: ignore[arg-type]
