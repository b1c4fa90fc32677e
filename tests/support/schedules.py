"""Schedules of requests and faults, played in virtual time against the real coordinator, and what
must be true of every one of them:

(a) each reply is the undisturbed one: tokens, text, log-probabilities; (b) nothing of it is told
twice or left out, at any moment; (c) each request ends exactly once, and with an error only where
there was no target for as long as a session waits, or where the coordinator failed at this very
request; (d) after the last fault all is as before: everybody is registered, a request is served
with a draft, and nobody holds anything of requests that have ended.

A schedule is a value: what a failing one prints can be played again.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, get_args

from hypothesis import strategies as st

from dovetail.protocol.codec import REPLY, encode
from dovetail.protocol.messages import (
    Cancel,
    Dismiss,
    Dismissed,
    Emitted,
    Failed,
    Finished,
    Hello,
    Message,
    Progressed,
    PromptScored,
    Submit,
    Swap,
    Swapped,
    TokenLogprobs,
    Welcome,
)
from dovetail.protocol.settings import CoordinatorSettings, Sampling, TreeSettings
from dovetail.runtime.engine.coordinator import Coordinator
from dovetail.runtime.engine.running import MOST_LOSSES
from support.faulty import (
    LOAD_NS,
    MS,
    CarefulDraft,
    CarefulTarget,
    Costs,
    FaultyHub,
    Process,
    S,
    Time,
)
from support.scripted import READS, ROOMY, ScriptedDraft, ScriptedWorker

TICK_NS = S // 2
READ_NS = MS
"""A prompt is read elsewhere for so long."""
RECOVERY_S = 6.0
STUCK_S = 3.0
READY_NS = 30 * S
"""After the last fault everybody is back within it: the longest pause between two attempts to
connect, a load, a restart, and a draft that is stuck."""
PATIENCE_NS = 300 * S
CHANGES = 1_000_000
"""The numbers of requests for a change of workers begin here."""

Kind = Literal[
    "kill",
    "stop",
    "stick",
    "cut",
    "silence",
    "silence up",
    "silence down",
    "slow",
    "twice",
    "asked twice",
    "late",
    "babble",
    "refuse",
    "forget",
    "drop",
    "fault",
    "join",
    "swap",
    "drain",
    "cancel",
    "leave",
    "crash",
]


Kinds = Mapping[str, type[ScriptedWorker]]
CAREFUL: Kinds = {"target": CarefulTarget, "draft": CarefulDraft}
"""The workers of each role."""


@dataclass(frozen=True)
class Wish:
    """A request."""

    prompt: tuple[int, ...] = (5, 6, 7)
    tokens: int = 24
    policy: str = "dynamic"
    speculate: bool = True
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    scored: bool = False


LAST = Wish(tokens=9)
"""After the last fault."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong with a worker, `who` counted around, for some time; or with a
    client or the coordinator."""

    kind: Kind
    who: int = 0
    for_ms: int = 1000


@dataclass(frozen=True)
class Schedule:
    """Workers, and what happens after how many other events."""

    targets: int = 1
    drafts: int = 1
    reads: bool = False
    """True if drafts read features of their target."""
    part: int = 0
    """Rows of a log that workers read at a time; 0: they read it whole."""
    sessions: int = 64
    """The most sessions that a worker holds; further requests wait."""
    row_ms: float = 0.2
    """Milliseconds that each row adds to a target's pass. With much more, sessions move."""
    kept: int = ROOMY.kept
    """Tokens of ended sessions that a worker keeps."""
    room: int | None = None
    """Tokens of all its sessions that a worker has room for."""
    shares: bool = False
    """True if sessions begin with rows of others that stay."""
    steps: tuple[tuple[int, Wish | Fault], ...] = ()


@dataclass(frozen=True)
class Reply:
    """The reply that a request must have."""

    tokens: tuple[int, ...]
    text: str
    reason: str
    logprobs: tuple[TokenLogprobs, ...]
    scored: tuple[TokenLogprobs, ...]


@dataclass
class Told:
    """A request and all that its client has been told of it."""

    wish: Wish
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scored: list[TokenLogprobs] = field(default_factory=list)
    end: Finished | Failed | None = None
    heard_ns: list[int] = field(default_factory=list)
    """When it was told tokens."""
    cancelled: bool = False
    losses: int = 0
    """Targets that were lost before the request came."""
    void: bool = False
    """Nobody waits for it any more: the client has left, or its coordinator has gone."""
    sabotaged: bool = False
    """Something that the coordinator does about it raises."""

    @property
    def open(self) -> bool:
        return self.end is None and not self.void

    @property
    def longest_pause_ms(self) -> float:
        """Between two times that it was told tokens."""
        return max(after - before for before, after in pairwise(self.heard_ns)) / MS

    def reply(self) -> Reply:
        assert isinstance(self.end, Finished)
        return Reply(
            tuple(self.tokens),
            self.text,
            self.end.result.finish_reason,
            tuple(self.logprobs),
            tuple(self.scored),
        )


class Reader:
    """A client that checks what it is told, as it is told."""

    def __init__(
        self, world: "World", number: int, expect: "Callable[[Wish], Reply] | None"
    ) -> None:
        """`expect`: what a reply is to be; None: who asks is about to find out."""
        self.told: dict[int, Told] = {}
        self._world, self._hub, self._expect = world, world.hub, expect
        self.peer, self._epoch, self._changes = b"client %d" % number, 1000 + number, 0
        self._hub.join(self.peer, self._hear)
        self._say(
            Hello(epoch=self._epoch, roles=("client",), name="client", host="here", pid=number)
        )

    def submit(self, wish: Wish) -> Told:
        request = len(self.told) + 1
        self.told[request] = told = Told(wish, losses=self._world.losses)
        self._say(
            Submit(
                epoch=self._epoch,
                request=request,
                tokens=wish.prompt,
                sampling=Sampling(),
                max_tokens=wish.tokens,
                seed=1,
                tree=TreeSettings(
                    policy=wish.policy, insist=wish.policy != "goodput", gamma=6, depth=4, width=2
                ),
                speculate=wish.speculate,
                stop=wish.stop,
                logprobs=wish.logprobs,
                scored=wish.scored,
            )
        )
        return told

    def cancel(self, which: int) -> None:
        """One of the requests that run."""
        running = [request for request, told in self.told.items() if told.open]
        if running:
            request = running[which % len(running)]
            self.told[request].cancelled = True
            self._say(Cancel(epoch=self._epoch, request=request))

    def swap(self, newcomer: int, old: int | None) -> None:
        """Have a worker on standby take the place of another; both by their epochs."""
        self._changes += 1
        self._say(
            Swap(epoch=self._epoch, request=CHANGES + self._changes, newcomer=newcomer, old=old)
        )

    def dismiss(self, worker: int) -> None:
        """Let a worker go."""
        self._changes += 1
        self._say(
            Dismiss(epoch=self._epoch, request=CHANGES + self._changes, worker=worker, last=True)
        )

    def leave(self) -> None:
        """From now on nobody listens."""
        for told in self.told.values():
            told.void = True
        self._hub.leave(self.peer)

    def _say(self, message: Message) -> None:
        self._hub.take(self.peer, encode(message))

    def _hear(self, frames: list[bytes]) -> None:
        match reply := REPLY.decode(frames):
            case Emitted():
                self._check_emitted(self._running(reply.request), reply)
            case PromptScored():
                told = self._running(reply.request)
                assert reply.start == 1 + len(told.scored), (
                    "log-probabilities of the prompt twice, or left out"
                )
                told.scored += reply.logprobs
            case Finished():
                told = self._running(reply.request)
                told.end = reply
                self._check_finished(told, reply)
            case Progressed() | Swapped() | Dismissed():
                self._world.note(reply)
            case Failed():
                assert reply.session is not None, reply.text
                if reply.session > CHANGES:
                    assert reply.code in ("swap", "no_target"), reply.text
                    self._world.note(reply.text)
                    return
                told = self._running(reply.session)
                told.end = reply
                self._world.check_failed(told, reply)
            case _:
                assert isinstance(reply, Welcome), reply

    def _running(self, request: int) -> Told:
        told = self.told[request]
        assert told.end is None, f"request {request} has ended, and more is told of it"
        return told

    def _check_emitted(self, told: Told, reply: Emitted) -> None:
        told.tokens += reply.tokens
        told.text += reply.text
        told.logprobs += reply.logprobs
        told.heard_ns.append(self._world.time.now_ns)
        if self._expect is None:
            return
        expected = self._expect(told.wish)
        assert tuple(told.tokens) == expected.tokens[: len(told.tokens)], (
            f"told {told.tokens}, undisturbed {expected.tokens}"
        )
        assert expected.text.startswith(told.text), (
            f"told {told.text!r}, undisturbed {expected.text!r}"
        )
        assert tuple(told.logprobs) == expected.logprobs[: len(told.logprobs)]

    def _check_finished(self, told: Told, reply: Finished) -> None:
        result = reply.result
        assert list(result.token_ids) == told.tokens, (
            f"the result has {result.token_ids}, told was {told.tokens}"
        )
        assert result.text == told.text
        assert len(reply.margins) == len(told.tokens)
        if self._expect is not None and not (
            told.cancelled and result.finish_reason == "cancelled"
        ):
            expected = self._expect(told.wish)
            assert told.reply() == expected, f"{told.reply()}, undisturbed {expected}"


class World:
    """A coordinator, workers and a client in virtual time."""

    def __init__(
        self, schedule: Schedule, expect: Callable[[Wish], Reply] | None, kinds: Kinds = CAREFUL
    ) -> None:
        self.time = Time()
        self.loud = Loud()
        self._schedule, self._expect, self._kinds = schedule, expect, kinds
        self._clients = self._workers = 0
        self.history: list[tuple[float, object]] = []
        self.over_ns = 0
        """When the last fault that has begun is over."""
        self._bare_since_ns: int | None = self.time.now_ns
        """Since when there has been no target; None: there is one."""
        self.losses = 0
        """Targets that were lost so far."""
        self._targets: set[bytes] = set()
        self.past: list[Reader] = []
        self.processes: list[Process] = []
        self.hub = FaultyHub(self.time)
        self._start_coordinator()
        for role, count in (("target", schedule.targets), ("draft", schedule.drafts)):
            for _ in range(count):
                self.add(role)

    # -- who is there ------------------------------------------------------------------------------

    def _start_coordinator(self) -> None:
        self.hub = hub = FaultyHub(self.time)
        self.coordinator = coordinator = open_coordinator(hub, self.time)

        def do(action: Callable[[], object]) -> Callable[[], None]:
            def act() -> None:
                if not hub.closed:
                    action()
                    self._look()

            return act

        hub.pump = do(coordinator.pump)
        hub.look_around = do(lambda: (coordinator.look_around(), coordinator.pump()))

        def tick() -> None:
            if not hub.closed:
                coordinator.tick()
                hub.look_around()
                self.time.later(TICK_NS, tick)

        tick()
        self.reader = self._new_reader()

    def _new_reader(self) -> Reader:
        self._clients += 1
        return Reader(self, self._clients, self._expect)

    def _look(self) -> None:
        """Take notice of which targets there are."""
        targets = {
            peer: worker
            for peer, worker in self.coordinator.registry.workers.items()
            if worker.plays("target")
        }
        self.losses += len(self._targets - targets.keys())
        self._targets = set(targets)
        if any(target.serves for target in targets.values()):
            self._bare_since_ns = None
        elif self._bare_since_ns is None:
            self._bare_since_ns = self.time.now_ns

    def add(self, role: str, *, standby: bool = False, load_ns: int = LOAD_NS) -> Process:
        """A worker joins."""
        self._workers += 1
        number, reads = self._workers, self._schedule.reads

        def make(life: int) -> ScriptedWorker:
            worker = self._kinds[role](None, role, epoch=10_000 * number + life)  # type: ignore[arg-type]
            if isinstance(worker, ScriptedDraft) and reads:
                worker.reads = READS
            return worker

        head = {"reads": READS, "vocabulary": None} if role == "draft" and reads else {}
        about = {
            "name": f"{role}-{number}",
            "host": f"machine-{number}",
            "limits": ROOMY.model_copy(
                update={
                    "prompt_rows": self._schedule.part,
                    "sessions": self._schedule.sessions,
                    "kept": self._schedule.kept,
                    "room": self._schedule.room,
                    "shares": self._schedule.shares,
                }
            ),
            "standby": standby,
            **head,
        }
        process = Process(
            self.time,
            role,
            make,
            costs=Costs(row_ms=self._schedule.row_ms),
            about=about,
            stuck_ns=round(STUCK_S * S),
            load_ns=load_ns,
            hub=lambda: self.hub,
        )
        self.processes.append(process)
        process.start()
        return process

    # -- what happens ------------------------------------------------------------------------------

    def do(self, step: Wish | Fault) -> None:
        self.note(step)
        if isinstance(step, Wish):
            self.reader.submit(step)
            return
        for_ns = step.for_ms * MS
        self.over_ns = max(self.over_ns, self.time.now_ns + for_ns)
        match step.kind:
            case "cancel":
                self.reader.cancel(step.who)
            case "fault":
                self._sabotage(step)
            case "leave" | "crash":
                self.reader.leave()
                self.past.append(self.reader)
                if step.kind == "leave":
                    self.reader = self._new_reader()
                elif not self.hub.closed:
                    self.hub.close()
                    self._bare_since_ns = self._bare_since_ns or self.time.now_ns
                    self._start_coordinator()
            case "join":
                self.add(("target", "draft")[step.who % 2])
            case "swap":
                newcomer = self.add(("target", "draft")[step.who % 2], standby=True, load_ns=MS)
                self.time.later(2 * MS, lambda: self._swap(newcomer, step.who))
            case "drain":
                if (worker := self.processes[step.who % len(self.processes)].worker) is not None:
                    self.reader.dismiss(worker.epoch)
            case _:
                self._harm(self.processes[step.who % len(self.processes)], step, for_ns)

    def _sabotage(self, fault: Fault) -> None:
        """Have the coordinator fail at one of the sessions that run, the next time that it does
        something with it."""
        lives = [live for live in self.coordinator._running.values() if not live.trial]
        if not lives:
            return
        live = lives[fault.who % len(lives)]
        owner, name = SABOTAGED[fault.for_ms % len(SABOTAGED)]
        about: Any = {
            "session": live.session,
            "live": live,
            "controller": live.controller,
            "detokenizer": live.session.reply.detokenizer,
        }[owner]
        error = (Sabotage, Panic)[fault.for_ms % 2](f"{owner}.{name}")

        def fail(*_: object, **__: object) -> None:
            raise error

        fail.__name__ = name
        setattr(about, name, fail)
        if live.client.peer == self.reader.peer:
            self.reader.told[live.request].sabotaged = True

    def _swap(self, newcomer: Process, who: int) -> None:
        """Have it take the place of one of its role, if it has registered, or come beside it."""
        if newcomer.worker is not None:
            olds = [
                process.worker.epoch
                for process in self.processes
                if process.role == newcomer.role and process is not newcomer and process.worker
            ]
            self.reader.swap(
                newcomer.worker.epoch, olds[who % len(olds)] if olds and who < 4 else None
            )

    def _harm(self, process: Process, fault: Fault, for_ns: int) -> None:
        match fault.kind:
            case "kill":
                process.restart_ns = for_ns
                process.kill()
            case "stop":
                process.stop(for_ns)
            case "stick":
                process.sticks = process.alive
            case "cut":
                if process.wire is not None:
                    process.wire.hub_closes()
            case "silence" | "silence up" | "silence down":
                process.silence(
                    up=fault.kind != "silence down", down=fault.kind != "silence up", for_ns=for_ns
                )
            case "slow":
                process.slow_down(1 + fault.for_ms % 200)
                self.time.later(for_ns, lambda: process.slow_down(0))
            case "twice":
                process.again += 1 + fault.for_ms % 8
            case "asked twice":
                process.asked_again += 1 + fault.for_ms % 8
            case "late":
                process.repeat_late(fault.for_ms)
            case "babble":
                process.babble(1 + fault.for_ms % 9)
            case "drop":
                process.drops += 1
            case "refuse":
                process.refuses = process.role == "draft"
            case _:
                process.forget()

    # -- how it goes on ----------------------------------------------------------------------------

    def run(self, events: int) -> None:
        for _ in range(events):
            self.time.step()

    def run_until(self, condition: Callable[[], bool], within_ns: int, what: str) -> None:
        end_ns = self.time.now_ns + within_ns
        while not condition():
            assert self.time.now_ns < end_ns, f"{what}, in {within_ns / S:g} s"
            self.time.step()

    def settle(self) -> None:
        """Let everything come to its end, and see that all is as before."""
        self.run_until(
            lambda: not any(told.open for told in self.reader.told.values()),
            PATIENCE_NS,
            "a request did not end",
        )
        self.run_until(
            lambda: self.time.now_ns >= self.over_ns, PATIENCE_NS, "the faults did not end"
        )
        for (
            process
        ) in self.processes:  # what was planned for the next command, and never came to it
            process.sticks, process.refuses, process.again, process.asked_again = (
                process.sticks and process.busy,
                False,
                0,
                0,
            )
            process.drops = 0
        self.run_until(
            lambda: self.ready() and not self._owed(), READY_NS, "not everybody came back"
        )
        drafts = sum(
            process.role == "draft" and not process.about["standby"] for process in self.processes
        )
        told = self.reader.submit(LAST)
        self.run_until(lambda: not told.open, READY_NS, "a request after the faults did not end")
        assert isinstance(told.end, Finished), told.end
        assert bool(told.end.result.drafted_tokens) == bool(drafts), (
            "a request after the faults was decoded without a draft"
        )
        assert len(self._failing()) < max(1, drafts), (
            "a draft that works again is still said to fail"
        )
        self.run_until(self._clean, READY_NS, "something is left of requests that have ended")
        assert not self.loud.said, self.loud.said

    def ready(self) -> bool:
        report = self.coordinator.report()
        well = all(process.registered and not process.sticks for process in self.processes)
        return (
            well
            and len(report.workers) == len(self.processes)
            and {*report.reasons} <= self._failing()
        )

    def _owed(self) -> bool:
        """Return whether an answer is still waited for, such as one to a command that was dropped:
        whoever owes it is about to be taken for lost."""
        return any(worker.turns.owed for worker in self.coordinator.registry.workers.values())

    def _failing(self) -> set[str]:
        """Return what is said of drafts that have failed at a request and have not drafted for
        another one since."""
        return {fault.words for fault in self.coordinator._failing.faults(self.time.now_ns)}

    def _clean(self) -> bool:
        workers = self.coordinator.registry.workers.values()
        idle = all(
            not worker.sessions and not worker.turns.owed and not worker.turns.waiting
            for worker in workers
        )
        return (
            idle
            and self.coordinator.idle
            and all(
                process.worker is not None and not process.worker.logs for process in self.processes
            )
        )

    def note(self, what: object) -> None:
        self.history.append(((self.time.now_ns - S) / S, what))

    # -- what may not be ---------------------------------------------------------------------------

    def check_failed(self, told: Told, reply: Failed) -> None:
        """A request may fail where there is no target; one that has begun, where there was none for
        as long as it waits, or one after the other was lost, or where those that are there are
        full."""
        self._look()
        if told.sabotaged and reply.code == "internal":
            return
        if told.cancelled and reply.code == "capacity" and not told.tokens:
            return  # while it waited for room
        bare_s = (
            (self.time.now_ns - self._bare_since_ns) / S if self._bare_since_ns is not None else 0.0
        )
        if reply.code == "no_target" and not told.tokens:
            assert self._bare_since_ns is not None, f"refused, and there is a target: {reply.text}"
        elif self.losses - told.losses < MOST_LOSSES:
            assert reply.code == "worker_lost", f"{reply.code}: {reply.text}"
            assert bare_s >= RECOVERY_S - TICK_NS / S or not self._has_place(), (
                f"it failed after {bare_s:g} s without a target: {reply.text}"
            )

    def _has_place(self) -> bool:
        """Return whether a target that is there may be given one session more."""
        return any(
            worker.plays("target") and worker.available and worker.sessions < worker.limits.sessions
            for worker in self.coordinator.registry.workers.values()
        )


class Sabotage(Exception):
    """A fault of the coordinator's that was meant to be."""


class Panic(BaseException):
    """A fault of the coordinator's that was meant to be and, like a panic of a library, is no
    `Exception`."""


SABOTAGED = (
    *(
        ("session", name)
        for name in (
            "verified",
            "drafted",
            "opened",
            "prefilled",
            "sent",
            "draft_lost",
            "target_lost",
            "recovered",
            "cancel",
            "result",
        )
    ),
    *(
        ("session", name)
        for name in (
            "next_round",
            "_commit",
            "_decided",
            "_verify",
            "_join",
            "_finish",
            "_open_target",
            "_open_draft",
        )
    ),
    *(
        ("live", name)
        for name in (
            "answered",
            "left",
            "waits",
            "awaits",
            "tell_round",
            "round_ended",
            "interrupted",
            "over",
        )
    ),
    *(("controller", name) for name in ("learn", "plan", "sends", "rate", "leave", "work_with")),
    ("detokenizer", "push"),
    ("detokenizer", "flush"),
)
"""Methods of the coordinator about one session that a fault may be planted in."""


class Loud(logging.Handler):
    """Records that say that the coordinator is at fault."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []
        self.contained = 0
        """Faults that were meant to be."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], Sabotage | Panic):
            self.contained += 1
            return
        self.said.append(logging.Formatter().format(record))


def open_coordinator(hub: FaultyHub, time: Time) -> Coordinator:
    """A coordinator in virtual time."""

    def live(action: Callable[[], object]) -> Callable[[], None]:
        return lambda: None if hub.closed else (action(), None)[1]

    return Coordinator(
        hub,
        clock_ns=time.clock,
        defer=lambda work, done: time.later(READ_NS, live(lambda: done(work()))),
        later=lambda seconds, action: time.later(round(seconds * S), live(action)),
        settings=CoordinatorSettings(recovery_s=RECOVERY_S, stuck_s=STUCK_S),
    )


@contextmanager
def hushed(handler: logging.Handler) -> Iterator[None]:
    """The coordinator's log goes to this handler alone."""
    log = logging.getLogger("dovetail.coordinator")
    before = log.handlers, log.propagate, log.level
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.handlers, log.propagate = before[:2]
        log.setLevel(before[2])


def play(schedule: Schedule, kinds: Kinds = CAREFUL) -> World:
    """The world after all has happened and been checked; an AssertionError says what was wrong, and
    when."""
    world = World(schedule, undisturbed, kinds)
    with hushed(world.loud):
        try:
            world.run_until(world.ready, READY_NS, "not everybody registered")
            for after, step in schedule.steps:
                world.run(after)
                world.do(step)
            world.settle()
        except Exception as error:
            lines = [f"{at_s:9.4f} s  {what}" for at_s, what in world.history]
            error.add_note(
                "\n".join(
                    (
                        f"{(world.time.now_ns - S) / S:.4f} s after the beginning; before it:",
                        *lines,
                        *world.loud.said,
                    )
                )
            )
            raise
    return world


@lru_cache(maxsize=4096)
def undisturbed(wish: Wish) -> Reply:
    """Return the reply of the target alone when nothing happens."""
    world = World(Schedule(drafts=0), None)
    world.run_until(world.ready, READY_NS, "not everybody registered")
    told = world.reader.submit(wish)
    world.run_until(lambda: not told.open, PATIENCE_NS, "an undisturbed request did not end")
    return told.reply()


# -- drawing them ----------------------------------------------------------------------------------

KINDS: tuple[Kind, ...] = get_args(Kind)
LOSSES: tuple[Kind, ...] = ("kill", "stop", "stick", "cut", "silence", "silence up", "silence down")
"""Drawn twice as often."""
PAUSES = (25, 0, 1, 2, 3, 5, 8, 12, 18, 40, 60)
"""Between two steps: other events."""
PROMPTS = ((5, 6, 7), (9,), tuple(range(3, 25)), tuple(range(3, 40)))
"""Two of them so long, and so much alike, that one goes on from what is kept of the other."""
WISHES = st.builds(
    Wish,
    prompt=st.sampled_from(PROMPTS),
    tokens=st.sampled_from((120, 40, 24, 120, 9, 2, 1)),
    policy=st.sampled_from(("dynamic", "goodput")),
    speculate=st.sampled_from((True, True, True, False)),
    stop=st.sampled_from(((), (), ("w7",))),
    logprobs=st.sampled_from((None, None, 2)),
)
SCORED = st.builds(
    Wish,
    prompt=st.sampled_from(PROMPTS),
    tokens=st.sampled_from((0, 9, 24)),
    logprobs=st.just(2),
    scored=st.just(True),
)


def schedules(
    kinds: tuple[Kind, ...] = (*KINDS, *LOSSES), most: int = 14
) -> st.SearchStrategy[Schedule]:
    """Schedules that begin with a request and have these kinds of faults, `most` steps at most."""
    faults = st.builds(
        Fault,
        kind=st.sampled_from(kinds),
        who=st.integers(0, 5),
        for_ms=st.sampled_from((1, 40, 300, 1400, 1600, 4000, 9000)),
    )
    step = st.tuples(st.sampled_from(PAUSES), faults | faults | faults | WISHES | WISHES | SCORED)
    steps = st.builds(
        lambda first, rest: ((0, first), *rest),
        WISHES,
        st.lists(step, min_size=most // 2, max_size=most),
    )
    return st.builds(
        Schedule,
        targets=st.sampled_from((1, 2, 2, 3)),
        drafts=st.sampled_from((1, 0, 2, 1)),
        reads=st.booleans(),
        part=st.sampled_from((3, 0, 3)),
        sessions=st.sampled_from((64, 2, 64)),
        steps=steps,
    )


COMING: tuple[Kind, ...] = ("kill", "kill", "join", "drain", "swap", "cut", "stop")
"""Targets come and go."""


def crowds(most: int = 10) -> st.SearchStrategy[Schedule]:
    """Schedules in which several long requests run while targets come and go, so that sessions move
    to those that are emptier."""
    long = st.builds(
        Wish,
        prompt=st.sampled_from(PROMPTS),
        tokens=st.sampled_from((120, 200)),
        policy=st.sampled_from(("dynamic", "goodput")),
        speculate=st.sampled_from((True, False)),
        logprobs=st.sampled_from((None, None, 2)),
    )
    come = st.builds(
        Fault,
        kind=st.sampled_from(COMING),
        who=st.sampled_from((0, 2, 4, 1)),
        for_ms=st.sampled_from((40, 300, 1400)),
    )
    other = st.builds(
        Fault,
        kind=st.sampled_from(KINDS),
        who=st.integers(0, 5),
        for_ms=st.sampled_from((40, 300, 1400, 4000)),
    )
    step = st.tuples(st.sampled_from((40, 90, 200, 20)), come | come | long | other | WISHES)
    return st.builds(
        lambda wishes, rest, **about: Schedule(
            steps=(*((0, wish) for wish in wishes), *rest), **about
        ),
        wishes=st.lists(long, min_size=3, max_size=7),
        rest=st.lists(step, min_size=most // 2, max_size=most),
        targets=st.sampled_from((1, 2, 3)),
        drafts=st.sampled_from((0, 1, 2)),
        reads=st.booleans(),
        part=st.sampled_from((3, 0, 3)),
        row_ms=st.sampled_from((4.0, 12.0)),
        kept=st.sampled_from((ROOMY.kept, ROOMY.kept, 0, 150)),
        room=st.sampled_from((None, None, 700)),
        shares=st.booleans(),
    )
