"""The processes of `dovetail serve`: started, looked at, started again, replaced and drained as
`watch.py` decides.

A part is ready when it says so: the coordinator and the HTTP API with a line on stdout, a worker by
being registered. The coordinator is asked all the time who is; one that is started again has the
address of the one before, so that everybody comes back to it. What the processes say on stderr is
passed on to the log once the service is ready; before, only the last words of the one that failed
are of interest. Knows which commands there are, and nothing of tokens.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from dovetail.launch.console.terminal import Intervals, loading_text
from dovetail.launch.files.directory import announced
from dovetail.launch.machine.fit import check_memory, nodes_of
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes.child_output import Ear, ending_of, let_speak_and_kill, registered
from dovetail.launch.processes.inquiry import Inquiry
from dovetail.launch.processes.parts import GiveUp, Leave, Part, Replace, Start, Stop, Tell
from dovetail.launch.processes.stack import (
    LOADING_POLL_S,
    POLL_S,
    begin_workers,
    coordinator_arguments,
    http_arguments,
    layout_of,
    processes_of,
    with_room_for_draft,
    worker_arguments,
)
from dovetail.launch.processes.supervise import GRACE_S, Child, Supervisor
from dovetail.launch.processes.watch import Action, Watch
from dovetail.launch.processes.worker import TOLD
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.errors import DovetailError, SettingsError
from dovetail.protocol.links import open_link
from dovetail.protocol.memory import read_room
from dovetail.protocol.messages import Fault, Reported, Role, Supervised

log = logging.getLogger("dovetail.serve")

COORDINATOR, HTTP = "coordinator", "http"
DRAIN_S = 4.0
"""Beyond the grace that a process gives to what it serves; the HTTP API takes two seconds of it to
tell those who still wait."""
ASK_EVERY_S = 1.0
"""The interval at which the coordinator is asked who is registered, once everybody is."""
CONNECT_S = 0.5
MAX_WHY = 500
"""Characters of why a part is not there."""


class Service:
    """A coordinator, its workers and the HTTP API; use it within the block of its supervisor."""

    def __init__(self, supervisor: Supervisor, configuration: Configuration) -> None:
        self._supervisor, self._configuration = supervisor, configuration
        self._settings = configuration.settings
        self._layout = layout_of(configuration.settings)
        self._workers = {f"{role} worker": role for role in processes_of(self._settings)}
        before = (COORDINATOR, HTTP)
        workers = (
            Part(name, before, known=True, needed=role != "draft")
            for name, role in self._workers.items()
        )
        parts = (Part(COORDINATOR), Part(HTTP, (COORDINATOR,)), *workers)
        self._watch = Watch(parts, time.monotonic(), stuck_s=self._settings.coordinator.stuck_s)
        self._running: dict[str, Child] = {}
        self._ears: dict[str, Ear] = {}
        self._announcement = ExitStack()
        self._inquiry: Inquiry | None = None
        self._left = False
        self._told: object = None
        """The last news of the other parts that the coordinator got, and its process at that
        time."""
        self._early: dict[str, Child] = {}
        """Workers that have been started and wait until it is their turn to be told an address."""
        self._begun_early: Callable[[], dict[str, Child]] = dict
        """Returns these workers, once they have imported what they need."""
        self._begun: set[str] = set()
        """The parts that have been started at one time."""
        self.address = self.url = ""
        self._intervals = Intervals(lambda words: log.info("%s", words))
        self.state: Reported | None = None
        """The last state that the coordinator reported."""

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *_: object) -> None:
        if self._inquiry is not None:
            self._inquiry.close()
        self._announcement.close()
        for ear in self._ears.values():
            ear.close()

    @property
    def pids(self) -> dict[str, int]:
        """The number of each process that runs, by its name."""
        return {name: child.process.pid for name, child in self._running.items()}

    def begin(self) -> None:
        """Begin to start what takes the longest; a process that has no threads yet can fork it."""
        commands = {name: self._arguments(name, address=TOLD) for name in self._workers}
        self._begun_early = begin_workers(self._supervisor, self._settings, commands)
        self._step()

    def run_until_ready(self, say: Callable[[str], None]) -> None:
        """Start everything else, and wait; what the first process that ends has to say is raised.
        `say` hears what is waited for."""
        told = sys.stderr.isatty()  # then `say` shows it, else the log has it once models are left
        while not self._watch.serving:
            self._step()
            say(
                f"starting {' and '.join(self._watch.missing)}"
                + (loading_text(self.state.loading) if self.state is not None else "")
            )
            if not told and (told := set(self._watch.missing) <= self._workers.keys()):
                log.info(
                    "not ready yet, loading models: %s; requests to %s are refused until then",
                    " and ".join(self._watch.missing),
                    self.url,
                )
            time.sleep(LOADING_POLL_S)

    def run(self) -> None:
        """Keep everything running until the coordinator was told to stop; what a process says that
        cannot be kept running is raised."""
        while not self._left:
            self._step()
            self._pass_on()
            time.sleep(POLL_S)

    def faults(self, now_s: float) -> tuple[Fault, ...]:
        """The parts that were lost and are not back yet."""
        return tuple(
            Fault(
                part=outage.part,
                why=outage.why[:MAX_WHY],
                since_s=max(0.0, now_s - outage.since_s),
                retry_s=None if outage.retry_s is None else max(0.0, outage.retry_s - now_s),
            )
            for outage in self._watch.outages
        )

    def drain(self) -> None:
        """End who takes requests, then who has them, then who computes; a signal meanwhile ends all
        of them at once."""
        try:
            log.info(
                "ending: running requests may finish for some seconds; a second signal ends them "
                "at once"
            )
            for name in (HTTP, COORDINATOR, *self._workers):
                self._end([name], GRACE_S + DRAIN_S)
        except (KeyboardInterrupt, SystemExit):
            self._supervisor.kill()

    # -- what happens ------------------------------------------------------------------------------

    def _step(self) -> None:
        """Take notice of what has happened, and do what follows."""
        now_s = time.monotonic()
        self._supervisor.mind()
        # The coordinator is looked at last and heard first: a process that ended because of its
        # loss is never taken for one that failed by itself.
        ended = [
            name
            for name in sorted(self._running, key=lambda name: name == COORDINATOR)
            if self._running[name].ended
        ]
        for name in reversed(ended):
            child = self._running.pop(name)
            self._perform(self._watch.ended(name, ending_of(child), now_s), child)
            self._supervisor.end([child])
            self._hear_out(name)
        for name in self._watch.waiting:
            if name not in self._workers and self._says_ready(name, self._running[name]):
                self._perform(self._watch.ready(name, now_s))
        if self._inquiry is not None and COORDINATOR not in self._watch.missing:
            self._ask(self._inquiry, now_s)
        self._perform(self._watch.due(now_s))
        self._tell_coordinator(now_s)

    def _perform(self, actions: list[Action], ended: Child | None = None) -> None:
        for action in actions:
            match action:
                case Tell(text):
                    log.info("%s", text)
                case Start(name):
                    self._start(name)
                case Replace(name):
                    let_speak_and_kill(self._running[name])
                case Stop(name):
                    self._end([name], GRACE_S)
                case Leave():
                    self._left = True
                case GiveUp(name, why):
                    assert ended is not None
                    if not self._watch.serving:
                        raise ended.failure()
                    self._give_up(f"the {name} {why}", ended)

    def _give_up(self, why: str, ended: Child) -> NoReturn:
        """Let the requests end that still can, then everything else; raise why."""
        last = ending_of(ended)
        failure = f"{why}; most recently it {': '.join(filter(None, (last.words, last.last_line)))}"
        log.error("giving up: %s; running requests may finish, unless a signal ends them", failure)
        self._tell_coordinator(time.monotonic(), ending=why)
        coordinator = self._running.get(COORDINATOR)
        end_s = time.monotonic() + self._settings.http.deadline_s
        with suppress(KeyboardInterrupt, SystemExit):
            while coordinator is not None and not coordinator.ended and time.monotonic() < end_s:
                self._pass_on()
                time.sleep(POLL_S)
        self.drain()
        raise DovetailError(failure)

    def _tell_coordinator(self, now_s: float, *, ending: str = "") -> None:
        """Have the coordinator know how the other parts are, if that has changed; `ending`: why the
        service ends."""
        child = self._running.get(COORDINATOR)
        drained = tuple(self._played(name) for name in self._watch.drained)
        told = (child, self._watch.outages, drained, ending)
        if child is None or COORDINATOR in self._watch.missing or told == self._told:
            return
        assert child.process.stdin is not None
        words = Supervised(
            faults=self.faults(now_s), ending=ending[:MAX_WHY], drained=drained
        ).model_dump_json()
        # one that is stuck hears it later, one that has gone is noticed elsewhere
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(child.process.stdin.fileno(), f"{words}\n".encode())
            self._told = told

    def _start(self, name: str) -> None:
        """Start a part; the coordinator and the HTTP API say on stdout where they listen. A worker
        is started again only if it fits into memory."""
        if name in self._begun and name in self._workers and (why := self._misfit(name)):
            self._perform(self._watch.refused(name, why, time.monotonic()))
            return
        self._begun.add(name)
        if name in self._workers:
            self._early, self._begun_early = {**self._early, **self._begun_early()}, dict
        if (early := self._early.pop(name, None)) is not None:
            child = early
            self._supervisor.tell(child, self.address)
        else:
            hub, reads = name == COORDINATOR, name in (COORDINATOR, HTTP)
            child = self._supervisor.start(name, self._arguments(name), reads=reads, asks=hub)
        if name == COORDINATOR:
            assert child.process.stdin is not None
            os.set_blocking(child.process.stdin.fileno(), False)
        self._running[name], self._ears[name] = child, Ear(child)
        if self._watch.serving:
            log.info("the %s starts, pid %d", name, child.process.pid)

    def _misfit(self, name: str) -> str:
        """Return why a worker does not fit into the memory that is there now, beside those that are
        loading; empty if it does."""
        loading = [
            other
            for other in self._watch.waiting
            if other in self._workers and other in self._running
        ]
        room = read_room()
        if room is not None:
            room = replace(
                room, size=room.size + sum(self._running[other].rss_bytes() for other in loading)
            )
        roles = [self._workers[part] for part in (name, *loading)]
        try:
            check_memory(self._settings, roles, nodes=nodes_of(self._layout.target), room=room)
        except SettingsError as misfit:
            return str(misfit)
        return ""

    def _arguments(self, name: str, *, address: str = "") -> list[str]:
        """Return the command of a part; `address`: that of the coordinator, if it is not known
        yet."""
        configuration = self._configuration
        keys = (
            [f"--coordinator.keys={self._settings.coordinator.keys}"]
            if self._settings.coordinator.keys
            else []
        )
        if name == COORDINATOR:
            return [
                "coordinator",
                "--supervised",
                *self._listening(),
                *coordinator_arguments(configuration),
                f"--cores={format_numbers(self._layout.coordinator.cores)}",
                *keys,
            ]
        if name == HTTP:
            return [*http_arguments(configuration, self.address, self.url), *keys]
        role = self._workers[name]
        settings = with_room_for_draft(configuration) if role == "target" else configuration
        where = address or self.address
        return [*worker_arguments(settings, role, where, self._layout), *keys]

    def _listening(self) -> list[str]:
        """Return where the coordinator listens: as the settings say, and once it is known where
        exactly, there for good."""
        listen = self._settings.coordinator.listen
        return [
            f"--coordinator.listen={self.address or listen}",
            *(["--own-folder"] if listen == "ipc" and self.address else []),
        ]

    def _end(self, names: Iterable[str], grace_s: float) -> None:
        children = [self._running[name] for name in names if name in self._running]
        self._supervisor.end(children, grace_s)
        for name in names:
            self._running.pop(name, None)
            self._hear_out(name)

    # -- who is ready ------------------------------------------------------------------------------

    def _says_ready(self, name: str, child: Child) -> bool:
        place = child.heard()
        if not place:
            return False
        if name == COORDINATOR:
            if self._settings.coordinator.listen == "ipc" and not self.address:
                self._supervisor.owns_folder(Path(place.removeprefix("ipc://")).parent)
            self.address = place
            keys = self._settings.coordinator.keys
            self._inquiry = self._inquiry or Inquiry(
                partial(
                    open_link,
                    place,
                    keys=Path(keys) if keys else None,
                    role="client",
                    timeout_s=CONNECT_S,
                )
            )
        else:
            self.url = place
            self._announcement.close()
            self._announcement.enter_context(
                announced(self.address, keys=self._settings.coordinator.keys, url=place)
            )
        return True

    def _ask(self, inquiry: Inquiry, now_s: float) -> None:
        """Hear from the coordinator which of the workers it knows."""
        state = inquiry.news(now_s, ASK_EVERY_S if not self._watch.missing else 0.0)
        if state is not None:
            self.state = state
            if self._watch.serving or not sys.stderr.isatty():
                self._intervals.tell(state.loading)
            workers = {name: pid for name, pid in self.pids.items() if name in self._workers}
            host = socket.gethostname()
            others = [
                w
                for w in state.workers
                if not (w.standby or w.leaving or (w.host == host and w.pid in workers.values()))
            ]
            filled, given = (
                {
                    name
                    for name in self._workers
                    if any(self._played(name) in worker.roles for worker in there)
                }
                for there in (others, [worker for worker in others if worker.swapped_in])
            )
            drained = [name for name in self._workers if self._played(name) in state.drained]
            known = registered(workers, state.workers, host)
            self._perform(self._watch.answered(known, now_s, filled, given, drained))

    def _played(self, name: str) -> Role:
        """Return the role that a worker plays, the first one of one that plays both."""
        return "draft" if self._workers[name] == "draft" else "target"

    # -- what they say -----------------------------------------------------------------------------

    def _pass_on(self) -> None:
        """Pass on what the processes have said."""
        for name, ear in self._ears.items():
            for line in ear.listen():
                log.info("%s: %s", name, line)

    def _hear_out(self, name: str) -> None:
        """Pass on the last words of a process that has ended."""
        if (ear := self._ears.pop(name, None)) is not None:
            for line in ear.listen():
                log.info("%s: %s", name, line)
            ear.close()
