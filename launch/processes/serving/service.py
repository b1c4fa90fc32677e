"""The processes of `dovetail serve`, started, restarted and drained as `watch.py` decides.
Coordinator and HTTP API are ready when they print a line, a worker when it is registered. Their
stderr goes to the log once all are ready; before that, only the last lines of a failed one."""

import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

from dovetail.launch.console.terminal import Intervals, loading_text
from dovetail.launch.files.directory import announced
from dovetail.launch.processes.serving.watch import (
    Action,
    GiveUp,
    Leave,
    Part,
    Replace,
    Start,
    Stop,
    Tell,
    Watch,
)
from dovetail.launch.processes.stack import LOADING_POLL_S, POLL_S, Played
from dovetail.launch.processes.supervise import GRACE_S, Ending
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.codec import REPLY, encode
from dovetail.protocol.errors import DecodeError, DovetailError, LinkClosed, LinkError
from dovetail.protocol.links import Link, open_link
from dovetail.protocol.links.addresses import SILENT_S
from dovetail.protocol.messages import (
    Fault,
    Hello,
    Message,
    Reported,
    Role,
    Status,
    Supervised,
    Welcome,
    WorkerState,
)

log = logging.getLogger("dovetail.serve")

DRAIN_S = 4.0
"""Added to a process's grace for requests; the HTTP API answers clients in 2 s of it."""
ENDING = "ending: running requests have a few seconds to finish; a second signal ends them at once"
ASK_EVERY_S = 1.0  # seconds between two polls of the coordinator once all workers are registered
LEAST_S = 2.0  # the least time without progress that counts as stuck; parts report every second
CONNECT_S = 0.5
MAX_WHY = 500  # the most characters of a fault's reason


COORDINATOR, HTTP = "coordinator", "http"


class SiteLost(DovetailError):
    """The site is lost, and no part can be restarted."""


class Running(Protocol):
    """A started process of a part."""

    @property
    def pid(self) -> int:
        """Return its pid on its machine; 0 if it has none yet."""

    @property
    def host(self) -> str:
        """Return the name of its machine."""

    @property
    def ended(self) -> bool:
        """Return whether it has ended."""

    def heard(self) -> str:
        """Return the line that it has printed on stdout; empty if it has not yet."""

    def beats(self) -> bool:
        """Return whether it has sent a heartbeat since the last call."""

    def cpu_s(self) -> float:
        """Return the CPU time that it has used in seconds."""

    def tell(self, line: str) -> bool:
        """Write a line to its stdin; False if it cannot take it now."""

    def listen(self) -> list[str]:
        """Return the lines of its stderr since the last call, also once it has ended."""

    def ending(self) -> Ending:
        """Return how it ended."""

    def failure(self) -> DovetailError:
        """Return its error."""


class Site(Protocol):
    """Starts parts by name."""

    @property
    def workers(self) -> Mapping[str, Played]:
        """Return the names of the workers, with their roles."""

    @property
    def keys(self) -> Path | None:
        """Return the folder of the keys of a client; None: the coordinator is not reached by
        tcp."""

    def begin(self) -> None:
        """Start the slowest parts ahead."""

    def start(self, name: str, address: str, url: str) -> Running:
        """Start a part. `address`, `url`: those of the coordinator and of the HTTP API, if these
        have listened before."""

    def misfit(self, name: str, loading: Mapping[str, Running]) -> str:
        """Return why a worker cannot be started while others are loading; empty if it can."""

    def owns(self, address: str) -> None:
        """Keep this address of the coordinator."""

    def stuck(self, running: Running) -> None:
        """End a stuck process after it has dumped its stacks."""

    def end(self, running: Sequence[Running], grace_s: float) -> None:
        """End these, with some seconds to exit by themselves."""

    def kill(self) -> None:
        """End everything at once."""

    def mind(self) -> None:
        """Called from time to time: keep the clean-up in case of our death working; raise
        `SiteLost` if the site is lost."""


class Service:
    """A coordinator, its workers and the HTTP API; use it within the block of the owner of its
    site's processes."""

    def __init__(self, site: Site, configuration: Configuration, *, name: str = "") -> None:
        """`name`: of one of several services, for the log."""
        self._site = site
        self._settings = configuration.settings
        self.name, self._called = name, f"{name}: " if name else ""
        self._workers = site.workers
        before = (COORDINATOR, HTTP)
        workers = (
            Part(name, before, known=True, needed=role != "draft")
            for name, role in self._workers.items()
        )
        parts = (Part(COORDINATOR), Part(HTTP, (COORDINATOR,), beats=True), *workers)
        self._watch = Watch(
            parts, time.monotonic(), stuck_s=max(LEAST_S, self._settings.coordinator.stuck_s)
        )
        self._running: dict[str, Running] = {}
        self._announcement = ExitStack()
        self._inquiry: Inquiry | None = None
        self._left = False
        self._told: object = None
        """The last faults sent to the coordinator, and its process at that time."""
        self._begun: set[str] = set()  # the parts that have been started at least once
        self.address = self.url = ""
        self._look_s = 0.0  # time of the next reading of CPU times
        self._intervals = Intervals(self._log)
        self.state: Reported | None = None  # the last state that the coordinator reported

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *_: object) -> None:
        if self._inquiry is not None:
            self._inquiry.close()
        self._announcement.close()

    @property
    def serving(self) -> bool:
        return self._watch.serving

    @property
    def left(self) -> bool:
        return self._left

    @property
    def missing(self) -> tuple[str, ...]:
        return self._watch.missing

    @property
    def pids(self) -> dict[str, int]:
        return {name: running.pid for name, running in self._running.items()}

    def begin(self) -> None:
        """Start the slowest parts early; a process without threads can fork them."""
        self._site.begin()
        self.step()

    def run_until_ready(self, say: Callable[[str], None]) -> None:
        """Start everything else, and wait; the error of the first process that ends is raised.
        `say` is called with the missing parts."""
        # a terminal shows what `say` gets; otherwise it is logged when only models are missing
        told = sys.stderr.isatty()
        while not self._watch.serving:
            self.step()
            if HTTP in self._begun:  # a spinner is a thread
                say(
                    f"starting {' and '.join(self._watch.missing)}"
                    + (loading_text(self.state.loading) if self.state is not None else "")
                )
            if not told and (told := set(self._watch.missing) <= self._workers.keys()):
                self._log(
                    f"not ready yet, loading models: {' and '.join(self._watch.missing)}; requests "
                    f"to {self.url} are refused until then"
                )
            time.sleep(LOADING_POLL_S)

    def run(self) -> None:
        """Keep everything running until the coordinator receives a Stop; raise the error of a
        process that cannot be kept running."""
        while not self._left:
            self.step()
            time.sleep(POLL_S)

    def faults(self, now_s: float) -> tuple[Fault, ...]:
        return tuple(
            Fault(
                part=outage.part,
                why=outage.why[:MAX_WHY],
                restarts=True,
                since_s=max(0.0, now_s - outage.since_s),
                retry_s=None if outage.retry_s is None else max(0.0, outage.retry_s - now_s),
            )
            for outage in self._watch.outages
        )

    def drain(self) -> None:
        """End the HTTP API, then the coordinator, then the workers; another signal ends all of them
        at once."""
        try:
            self._log(ENDING)
            for names in ([HTTP], [COORDINATOR], self._workers):
                self._end(names, GRACE_S + DRAIN_S)
        except (KeyboardInterrupt, SystemExit):
            self._site.kill()

    # -- events ------------------------------------------------------------------------------------

    def step(self) -> None:
        """Handle events; raise the error of a process that cannot be kept running."""
        now_s = time.monotonic()
        self._site.mind()
        # The coordinator is polled last and handled first, so that processes that end because of
        # its loss do not count as failed.
        ended = [
            name
            for name in sorted(self._running, key=lambda name: name == COORDINATOR)
            if self._running[name].ended
        ]
        for name in reversed(ended):
            gone = self._running.pop(name)
            self._perform(self._watch.ended(name, gone.ending(), now_s), gone)
            self._site.end([gone], GRACE_S)
            self._pass_on({name: gone})
        for name in self._watch.waiting:
            if name not in self._workers and self._says_ready(name, self._running[name]):
                self._perform(self._watch.ready(name, now_s))
        forked = HTTP in self._begun  # a link has threads: no fork after it
        if self._inquiry is not None and forked and COORDINATOR not in self._watch.missing:
            self._ask(self._inquiry, now_s)
        self._look_after(now_s)
        self._perform(self._watch.due(now_s))
        self._tell_coordinator(now_s)
        if self._watch.serving:
            self._pass_on(self._running)

    def _look_after(self, now_s: float) -> None:
        if (
            HTTP in self._running
            and HTTP not in self._watch.missing
            and self._running[HTTP].beats()
        ):
            self._watch.heartbeat(HTTP, now_s)
        if now_s >= self._look_s:
            self._look_s = now_s + ASK_EVERY_S
            for name, running in self._running.items():
                self._watch.computes(name, running.cpu_s() if running.pid else None, now_s)

    def _perform(self, actions: list[Action], ended: Running | None = None) -> None:
        for action in actions:
            match action:
                case Tell(text):
                    self._log(text)
                case Start(name):
                    self._start(name)
                case Replace(name):
                    self._site.stuck(self._running[name])
                case Stop(name):
                    self._end([name], GRACE_S)
                case Leave():
                    self._left = True
                case GiveUp(name, why):
                    assert ended is not None
                    if not self._watch.serving:
                        # its output may explain why it does not answer
                        hub = self._running.get(COORDINATOR)
                        self._pass_on({COORDINATOR: hub} if hub is not None else {})
                        raise ended.failure()
                    self._give_up(f"the {name} {why}", ended)

    def _give_up(self, why: str, ended: Running) -> NoReturn:
        last = ended.ending()
        failure = f"{why}; most recently it {': '.join(filter(None, (last.words, last.last_line)))}"
        log.error(
            "%sgiving up: %s; running requests may finish, unless a signal ends them",
            self._called,
            failure,
        )
        self._tell_coordinator(time.monotonic(), ending=why)
        coordinator = self._running.get(COORDINATOR)
        end_s = time.monotonic() + self._settings.http.deadline_s
        with suppress(KeyboardInterrupt, SystemExit):
            while coordinator is not None and not coordinator.ended and time.monotonic() < end_s:
                self._pass_on(self._running)
                time.sleep(POLL_S)
        self.drain()
        raise DovetailError(failure)

    def _tell_coordinator(self, now_s: float, *, ending: str = "") -> None:
        """Send the coordinator the state of the other parts, if that has changed; `ending`: why the
        service ends."""
        hub = self._running.get(COORDINATOR)
        drained = tuple(self._played(name) for name in self._watch.drained)
        told = (hub, self._watch.outages, drained, ending)
        if hub is None or COORDINATOR in self._watch.missing or told == self._told:
            return
        words = Supervised(
            faults=self.faults(now_s), ending=ending[:MAX_WHY], drained=drained
        ).model_dump_json()
        if hub.tell(words):
            self._told = told

    def _start(self, name: str) -> None:
        """Start a part; the coordinator and the HTTP API print their address on stdout. A worker is
        restarted only if it fits into memory."""
        if name in self._begun and name in self._workers and (why := self._misfit(name)):
            self._perform(self._watch.refused(name, why, time.monotonic()))
            return
        self._begun.add(name)
        running = self._running[name] = self._site.start(name, self.address, self.url)
        if self._watch.serving:
            self._log(f"the {name} starts" + (f", pid {running.pid}" if running.pid else ""))

    def _misfit(self, name: str) -> str:
        loading = {
            other: self._running[other]
            for other in self._watch.waiting
            if other in self._workers and other in self._running
        }
        return self._site.misfit(name, loading)

    def _end(self, names: Iterable[str], grace_s: float) -> None:
        gone = {name: self._running.pop(name) for name in names if name in self._running}
        self._site.end([*gone.values()], grace_s)
        self._pass_on(gone)

    # -- ready parts -------------------------------------------------------------------------------

    def _says_ready(self, name: str, running: Running) -> bool:
        place = running.heard()
        if not place:
            return False
        if name == COORDINATOR:
            if not self.address:
                self._site.owns(place)
            self.address = place
            if self._inquiry is None:
                keys = self._site.keys
                reach = partial(open_link, place, keys=keys, role="client", timeout_s=CONNECT_S)
                self._inquiry = Inquiry(reach)
        elif place != self.url:  # a restarted one keeps its URL
            self.url = place
            self._announcement.enter_context(
                announced(self.address, keys=str(self._site.keys or ""), url=place)
            )
        return True

    def _ask(self, inquiry: "Inquiry", now_s: float) -> None:
        state = inquiry.news(now_s, ASK_EVERY_S if not self._watch.missing else 0.0)
        if state is not None:
            self.state = state
            if self._watch.serving or not sys.stderr.isatty():
                self._intervals.tell(state.loading)
            ours = {
                name: (running.host, running.pid)
                for name, running in self._running.items()
                if name in self._workers
            }
            others = [
                worker
                for worker in state.workers
                if not (
                    worker.standby or worker.leaving or (worker.host, worker.pid) in ours.values()
                )
            ]
            filled, given = (
                {
                    name
                    for name in self._workers
                    if any(self._played(name) in worker.roles for worker in there)
                }
                for there in (others, [worker for worker in others if worker.swapped_in])
            )
            if state.totals.waiting:  # perhaps only the lost target can continue these
                given = {name for name in given if self._played(name) == "draft"}
            drained = [name for name in self._workers if self._played(name) in state.drained]
            known = registered(ours, state.workers)
            why = {name: loss_of(place, state.decisions) for name, place in ours.items()}
            self._perform(self._watch.answered(known, now_s, filled, given, drained, why))

    def _played(self, name: str) -> Role:
        return "draft" if self._workers[name] == "draft" else "target"

    def _pass_on(self, parts: Mapping[str, "Running"]) -> None:
        """Log the new output of these parts."""
        for name, running in parts.items():
            for line in running.listen():
                self._log(f"{name}: {line}")

    def _log(self, words: str) -> None:
        log.info("%s%s", self._called, words)


def registered(ours: Mapping[str, tuple[str, int]], workers: Iterable[WorkerState]) -> set[str]:
    """Return which of our processes, given by machine and pid, are registered as workers, since
    pids of different machines may be equal."""
    there = {(worker.host, worker.pid) for worker in workers}
    return {name for name, at in ours.items() if at in there}


def loss_of(place: tuple[str, int], decisions: Sequence[str]) -> str:
    """Return why the coordinator lost the worker at this machine and pid, by its last decision
    about it; empty if there is none, as when it let the worker go."""
    host, pid = place
    found = [line.partition(f" (pid {pid} on {host}) ")[2] for line in decisions]
    why = next(filter(None, reversed(found)), "")
    return f"{why} or sent no heartbeat for {SILENT_S:g} s" if why == "disconnected" else why


RETRY_S = 0.2  # between two attempts to connect


class Inquiry:
    """A client of a coordinator; it connects on the first poll, and reconnects when the coordinator
    is lost."""

    def __init__(self, connect: Callable[[], Link]) -> None:
        """`connect` may take a moment, and raises `LinkError` without an answer."""
        self._connect = connect
        self._epoch = secrets.randbits(62)
        self._link: Link | None = None
        self._ask_s = 0.0
        self._registered = self._asked = False

    def news(self, now_s: float, every_s: float) -> Reported | None:
        """Return the coordinator's answer since the last call, or None. It is polled every
        `every_s` seconds."""
        try:
            if self._link is None and not self._open(now_s):
                return None
            found = self._take()
            if self._registered and not self._asked and now_s >= self._ask_s:
                self._send(Status(epoch=self._epoch))
                self._asked, self._ask_s = True, now_s + every_s
        except LinkError:
            self.close()
            return None
        return found

    def close(self) -> None:
        """Disconnect; the next poll reconnects."""
        if self._link is not None:
            self._link.close()
        self._link, self._registered, self._asked = None, False, False

    def _open(self, now_s: float) -> bool:
        if now_s < self._ask_s:
            return False
        self._ask_s = now_s + RETRY_S
        self._link = self._connect()
        self._send(
            Hello(
                epoch=self._epoch,
                roles=("client",),
                name=f"client-{os.getpid()}",
                host=socket.gethostname()[:512],
                pid=os.getpid(),
            )
        )
        return True

    def _take(self) -> Reported | None:
        assert self._link is not None
        found: Reported | None = None
        while (frames := self._link.receive(0.0)) is not None:
            try:
                reply = REPLY.decode(frames)
            except DecodeError as error:
                raise LinkClosed(f"the coordinator's answer is malformed: {error}") from None
            self._registered |= isinstance(reply, Welcome)
            if isinstance(reply, Reported):
                self._asked, found = False, reply
        return found

    def _send(self, message: Message) -> None:
        assert self._link is not None
        self._link.offer(encode(message))
