"""A schedule played in virtual time against the real coordinator; what must be true of it is in
`invariants.py`."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache

from dovetail.protocol.messages import Failed
from dovetail.runtime.engine.coordinator import Coordinator
from explore import invariants
from explore.clock import S, Time
from explore.coordinators import RECOVERY_S, STUCK_S, TICK_NS, Machine
from explore.faults import happen
from explore.invariants import Broken
from explore.processes import LOAD_NS, Process
from explore.reader import Reader
from explore.sabotage import Loud, Panic, hushed
from explore.schedules import Fault, Reply, Schedule, Step, Swerve, Wish
from explore.told import Told
from explore.wires import FaultyHub
from explore.workers import CarefulDraft, CarefulTarget, Costs
from support.scripted import READS, ROOMY, ScriptedDraft, ScriptedWorker

READY_NS = 30 * S
"""After the last fault everybody is back within it: the longest pause between two attempts to
connect, a load, a restart, and a draft that is stuck."""
TRIAL_NS = 30 * S
"""A change of workers over which the coordinator has failed is given up after so long."""
PATIENCE_NS = 300 * S
Kinds = Mapping[str, type[ScriptedWorker]]
CAREFUL: Kinds = {"target": CarefulTarget, "draft": CarefulDraft}  # the workers of each role
LAST = Wish(tokens=9)  # after the last fault


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
        self.seen: Counter[tuple[str, str]] = Counter()
        """Faults that happened, each with what the sessions were doing; deviations, each with what
        came before what."""
        self.over_ns = 0  # when the last fault that has begun is over
        self.planted: list[Callable[[], object]] = []
        """Functions that remove faults which still wait in the coordinator."""
        self.sabotages = 0  # faults of the coordinator's rooms that have happened
        self.past, self.processes = list[Reader](), list[Process]()
        self.lead = Machine(self, journal=schedule.journal)
        self.lead.start()
        self.reader = self._new_reader()
        for role, count in (("target", schedule.targets), ("draft", schedule.drafts)):
            for _ in range(count):
                self.add(role)

    # -- who is there ------------------------------------------------------------------------------

    @property
    def hub(self) -> FaultyHub:
        return self.lead.hub

    @property
    def coordinator(self) -> Coordinator:
        coordinator = self.lead.coordinator
        assert coordinator is not None
        return coordinator

    def died(self) -> None:
        """The process of the coordinator has died: it is started again in its place at once, over
        the same journal if there is one; then its client comes back."""
        coming = self.reader if self._schedule.journal else None
        if coming is not None and any(told.open for told in self.reader.told.values()):
            self.seen["taken over", "requests"] += 1
        if coming is None:
            self.reader.leave()
            self.past.append(self.reader)
        bare_since_ns = self.lead.bare_since_ns or self.time.now_ns
        self.lead.die()
        self.lead.start()
        self.lead.bare_since_ns = bare_since_ns
        self.reader = coming or self._new_reader()
        if coming is not None:
            coming.come_back()

    def _new_reader(self) -> Reader:
        self._clients += 1
        reader = Reader(self, self._clients, self._expect, tickets=self._schedule.journal)
        return self._new_reader() if reader.refused else reader

    def leave(self) -> None:
        """The client goes, and another one comes. If the coordinator dies over that, there is one
        already."""
        hub, gone = self.hub, self.reader
        gone.leave()
        self.past.append(gone)
        if hub is self.hub:
            came = self._new_reader()
            self.reader = came if hub is self.hub else self.reader

    @property
    def losses(self) -> int:
        """Return how many targets were lost so far."""
        return self.lead.losses

    def add(self, role: str, *, standby: bool = False, load_ns: int = LOAD_NS) -> Process:
        """A worker joins."""
        self._workers += 1
        number, reads, schedule = self._workers, self._schedule.reads, self._schedule

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
                    "prompt_rows": schedule.part,
                    "sessions": schedule.sessions,
                    "kept": schedule.kept,
                    "room": schedule.room,
                    "shares": schedule.shares,
                }
            ),
            "standby": standby,
            **head,
        }
        process = Process(
            self.time,
            role,
            make,
            costs=Costs(row_ms=schedule.row_ms),
            about=about,
            stuck_ns=round(STUCK_S * S),
            load_ns=load_ns,
            hub=lambda: None if self.hub.closed else self.hub,
        )
        self.processes.append(process)
        process.start()
        return process

    # -- how it goes on ----------------------------------------------------------------------------

    def do(self, step: Step) -> None:
        """Have a step of the schedule happen."""
        self.note(step)
        match step:
            case Wish():
                self.reader.submit(step)
            case Fault():
                states = {
                    running.session.state.value for running in self.coordinator._running.values()
                }
                if happen(self, step):
                    self.seen.update((step.kind, state) for state in states or {"idle"})
            case Swerve():
                if self.time.choices() > 1:
                    self.seen["swerve", self.time.overtaking(step.place)] += 1
                self.time.step(step.place)

    def run(self, events: int) -> None:
        for _ in range(events):
            self.time.step()

    def run_until(self, condition: Callable[[], bool], within_ns: int, what: str) -> None:
        end_ns = self.time.now_ns + within_ns
        while not condition():
            if self.time.now_ns >= end_ns:
                raise Broken(what, f"in {within_ns / S:g} s")
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
        self._call_off()
        within_ns = READY_NS + (TRIAL_NS if self.sabotages else 0)
        self.run_until(
            lambda: self.ready() and not self._owed(), within_ns, "not everybody came back"
        )
        drafts = sum(
            worker.plays("draft") and worker.serves
            for worker in self.coordinator.registry.workers.values()
        )
        told = self.reader.submit(LAST)
        self.run_until(lambda: not told.open, READY_NS, "a request after the faults did not end")
        if isinstance(told.end, Failed):
            raise Broken("a request after the faults failed", f"{told.end.code}: {told.end.text}")
        if bool(told.result.drafted_tokens) != bool(drafts):
            raise Broken("a request after the faults was decoded without a draft", "")
        if len(self._failing()) >= max(1, drafts):
            raise Broken("a draft that works again is still said to fail", f"{self._failing()}")
        self._end()

    def _end(self) -> None:
        """Let the last request's traces go, and see that nothing is left."""
        end_ns = self.time.now_ns + READY_NS
        while invariants.held(self.lead, self.processes):
            if self.time.now_ns >= end_ns:
                break
            self.time.step()
        left = any(made() is not None for made in self.lead.begun)
        invariants.nothing_leaks(self.lead, self.processes, in_memory=left)
        invariants.no_fault_is_told(self.loud.said)
        for reader in (*self.past, self.reader):
            invariants.every_request_ends(reader.told)

    def _call_off(self) -> None:
        """Call off what was planned for the next command, or message, and never came to it."""
        self.hub.fuse = None
        self.hub.deaf.clear()
        if self.lead.disk is not None:
            self.lead.disk.fuse = None
        for process in self.processes:
            process.sticks = process.sticks and process.busy
            process.refuses, process.again, process.asked_again, process.drops = False, 0, 0, 0
        for unplant in self.planted:
            unplant()
        self.planted.clear()

    def ready(self) -> bool:
        """Return whether everybody is there, no change of workers tries what it brings, and nothing
        is said to fail but what will show."""
        if self.coordinator._changes.under_way or not all(
            process.registered and not process.sticks for process in self.processes
        ):
            return False
        if len(self.coordinator.registry.workers) != len(self.processes):
            return False
        return {*self.coordinator.report().reasons} <= self._failing()

    def _owed(self) -> bool:
        """Return whether an answer is still waited for, such as one to a command that was dropped:
        whoever owes it is about to be taken for lost."""
        return any(worker.turns.owed for worker in self.coordinator.registry.workers.values())

    def _failing(self) -> set[str]:
        """Return what is said of drafts that have failed at a request and have not drafted for
        another one since."""
        return {fault.words for fault in self.coordinator._shared.failing.faults(self.time.now_ns)}

    def fired(self, where: str) -> None:
        """Count that the coordinator failed there."""
        self.seen["exception", where] += 1

    def committed(self, client: bytes, request: int) -> int | None:
        """Return how many tokens of a request are committed; None: it is over."""
        return self.lead.committed(client, request)

    def note(self, what: object) -> None:
        """Remember what happened."""
        self.history.append(((self.time.now_ns - S) / S, what))

    # -- what may not be ---------------------------------------------------------------------------

    def check_failed(self, told: Told, reply: Failed) -> None:
        """See that a request may fail so."""
        self.lead.look()
        since_ns = self.lead.bare_since_ns
        bare_ns = None if since_ns is None else self.time.now_ns - since_ns
        invariants.an_error_has_a_reason(
            told,
            reply,
            bare_s=None if bare_ns is None else bare_ns / S,
            patience_s=RECOVERY_S - TICK_NS / S,
            has_place=self.lead.has_place(),
            losses=self.losses - told.losses,
        )

    def check_change_failed(self, reply: Failed) -> None:
        """See that a change of workers may fail so."""
        codes = ("swap", "no_target", "internal") if self.sabotages else ("swap", "no_target")
        assert reply.code in codes, reply.text


def play(schedule: Schedule, kinds: Kinds = CAREFUL) -> World:
    """The world after all has happened and been checked; an exception says what was wrong, and
    when."""
    world = World(schedule, undisturbed, kinds)
    with hushed(world.loud):
        try:
            world.run_until(world.ready, READY_NS, "not everybody registered")
            for after, step in schedule.steps:
                world.run(after)
                world.do(step)
            world.settle()
        except (Exception, Panic) as error:
            lines = [f"{at_s:9.4f} s  {what}" for at_s, what in world.history]
            error.add_note("\n".join(["What happened before:", *lines, *world.loud.said]))
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
