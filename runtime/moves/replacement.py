"""The change of workers in progress, if any: a worker replaces another, joins, or leaves. A client
requests it and receives its progress.

A newcomer is on standby. It is tested with short sessions, then promoted: new sessions go to it and
none to the old worker. Sessions of the old worker move: from a draft at their next round; from a
target one after the other, so that none waits longer than the prefill of its own log. Those that
may not move, or have not begun, end where they are. When none is left and the newcomer is ready for
all its sessions, the old worker is dismissed. If the newcomer fails before that, the old worker
stays and the newcomer is dismissed; a promoted target first finishes its sessions, as the old one
would have. A worker that leaves without a newcomer follows the same steps, without the trials."""

import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import islice
from typing import Literal

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import (
    Dismiss,
    Dismissed,
    Engage,
    Failed,
    Finished,
    Hello,
    Message,
    Progressed,
    Role,
    Submit,
    Swap,
    Swapped,
)
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.engine.acts import EngineState
from dovetail.runtime.engine.faults import refusal
from dovetail.runtime.engine.requests import attempt
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.fleet.peers import ClientPeer, Worker
from dovetail.runtime.moves.moving import Moving
from dovetail.runtime.moves.reading_ahead import Reading, ReadingAhead
from dovetail.runtime.session.comparison import first_difference
from dovetail.runtime.session.state import State

COMMON = 1024
"""A trial's tokens are among the first this many of a vocabulary, which are the most frequent."""
PLACES = (0.5, 0.625, 0.75)
TRIAL_TOKENS, TRIAL_SEED = 12, 20260101
TRIAL_TREE = TreeSettings(policy="dynamic", insist=True, gamma=4, depth=3, width=2)
"""A policy that every kind of draft supports, and that drafts even at a loss."""


TrialName = Literal["alone", "drafted", "before"]


@dataclass(frozen=True)
class Trial:
    """A short session for the newcomer: a fixed request, on these workers alone."""

    name: TrialName
    target: bytes
    draft: bytes | None = None


def _decides_as(one: Worker, other: Worker) -> bool:
    """Return whether two targets compute the same for the same tokens."""
    return one.hello.fingerprint == other.hello.fingerprint and one.reads_as(other)


def trial_tokens(target: Worker) -> tuple[int, ...]:
    """Return a prompt of repeating ordinary tokens, without reading the tokenizer."""
    assert target.language is not None
    table, begin = target.language.table, target.facts.begin
    special = {*table.special.values(), *target.facts.end}
    ordinary = (token for token in table if token < target.facts.size and token not in special)
    common = [*islice(ordinary, COMMON)]
    found = [common[int(place * len(common))] for place in PLACES]
    return (*(() if begin is None else (begin,)), *found, *found, *found, found[0])


SILENT_NS = 30_000_000_000
"""A newcomer has failed after this many nanoseconds without a token of a trial or a pass that makes
progress."""

Standing = Literal["held", "movable", "coming", "over"]
"""A session's standing: on the old worker, to stay or move; moving; on another one."""


class Phase(Enum):
    TRYING = "trying"
    MOVING = "moving"
    OVER = "over"


@dataclass(eq=False)
class Change:
    """A change of workers."""

    role: Role
    newcomer: Worker | None
    old: Worker | None
    client: ClientPeer | None
    request: int
    heard_ns: int  # when a trial last made progress
    trials: list[Trial]
    """For a target: alone, with a draft, and `before` on an equal target; for a draft: one."""
    phase: Phase = Phase.TRYING
    old_lost: bool = False  # True if the old worker has disconnected
    longest_pause_ns: int = 0
    ends: dict[TrialName, Finished] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    """Sessions of the old worker. `asked`: those that must leave, with the time of the last request
    to do so; `gone`: those that left."""
    asked: dict[int, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    waits: bool = False  # True once it was reported that sessions end where they are
    failure: str = ""  # why the newcomer is withdrawn
    reading: set[tuple[bytes, int]] = field(default_factory=set)
    """Requests that were being read for the old target when it stopped getting new ones."""
    log: Reading | None = None
    """The log of the session that moves next, prefilled ahead by its new target."""

    @property
    def leaver(self) -> Worker | None:
        """The old worker while it is there."""
        return None if self.old_lost else self.old

    @property
    def words(self) -> str:
        """The change in progress, for `status`."""
        if self.newcomer is None:
            return f"{self.old.name if self.old is not None else 'a worker'} leaves"
        place = f" replaces {self.leaver.name}" if self.leaver is not None else " joins"
        tested = ", it is being tested" if self.phase is Phase.TRYING else ""
        return f"{self.newcomer.name}{place}{tested}"

    def failed(self, why: str) -> str:
        """Return what happened to the newcomer, and why."""
        assert self.newcomer is not None
        in_place = self.phase is Phase.MOVING
        what = "was in place but was removed again" if in_place else "was not put in place"
        stays = f"; {self.leaver.name} stays" if self.leaver is not None else ""
        return f"{self.newcomer.name} {what}: {why}{stays}"


class Changes:
    """Takes the requests Swap and Dismiss, one at a time."""

    def __init__(self, state: EngineState, moving: Moving, ahead: ReadingAhead) -> None:
        self._service, self._epoch, self._acts = state.service, state.epoch, state.acts
        self._running, self._registry = state.running, state.registry
        self._moving, self._ahead = moving, ahead
        self._change: Change | None = None
        self._placement, self._now_ns = state.placement, state.now_ns
        self._trials: dict[TrialName, RunningRequest] = {}
        self._ended: deque[tuple[TrialName, Finished | Failed, bool]] = deque()
        """Trials that have ended, and whether the draft of each worked."""
        self._progressed = False  # True if a trial has made progress since the last step

    @property
    def under_way(self) -> bool:
        return self._change is not None

    @property
    def words(self) -> str:
        """The change in progress in words; empty: none."""
        return self._change.words if self._change is not None else ""

    # -- requests ----------------------------------------------------------------------------------

    def swap(self, client: ClientPeer, asked: Swap, now_ns: int) -> None:
        """Begin a change; raise `RequestError` with the reason of a refusal."""
        newcomer = self._registry.of_epoch(asked.newcomer)
        if newcomer is None or not newcomer.standby:
            raise RequestError("swap", "the new worker is no longer on standby: start it again")
        self._check_free()
        role: Role = "target" if newcomer.plays("target") else "draft"
        old = None if asked.old is None else self._leaver(asked.old)
        if old is not None and not old.plays(role):
            raise RequestError(
                "swap",
                f"{old.name} is not a {role} worker: name one that {newcomer.name} can replace",
            )
        self._registry.check_place(newcomer)
        trials = self._plan(newcomer, role, old)
        change = Change(role, newcomer, old, client, asked.request, now_ns, trials)
        self._change = change
        self._say(change, f"{newcomer.name} is tested")
        for trial in [*trials]:
            if self._change is change:
                self._try(trial)

    def dismiss(self, client: ClientPeer, asked: Dismiss, now_ns: int) -> None:
        """Begin to drain a worker; raise `RequestError` with the reason of a refusal."""
        self._check_free()
        old = self._leaver(asked.worker)
        role: Role = "target" if old.plays("target") else "draft"
        others = [
            other
            for other in self._registry.workers.values()
            if other.plays("target") and other.available and other is not old
        ]
        if role == "target" and old.serves and not others and not asked.last:
            text = (
                f"{old.name} is the only target: replace it with `dovetail swap`, or let "
                "requests be refused from then on with --last"
            )
            raise RequestError("swap", text)
        suits = self._moving.suits
        mine = [one for one in self._running.values() if one.target is old]
        held = [one for one in mine if not any(suits(one, other) for other in others)]
        if role == "target" and held and not (old.available or asked.last):
            numbers = ", ".join(str(running.session.number) for running in held)
            text = (
                f"{old.whereabouts} does not respond, and no other target can continue its "
                f"sessions ({numbers}): wait until they have ended, or end them with --last"
            )
            raise RequestError("swap", text)
        self._change = Change(role, None, old, client, asked.request, now_ns, [])
        self._move_over(self._change)

    def _check_free(self) -> None:
        if self._change is not None:
            raise RequestError(
                "swap",
                f"another change of workers is in progress, {self._change.words}: wait until it "
                "has ended",
            )

    def _leaver(self, epoch: int) -> Worker:
        worker = self._registry.of_epoch(epoch)
        if worker is None:
            raise RequestError(
                "swap",
                "the worker to remove is no longer registered: `dovetail status` lists those that "
                "are",
            )
        return worker

    # -- what happens ------------------------------------------------------------------------------

    def step(self, now_ns: int) -> None:
        """Advance the change after an event or a tick."""
        if (change := self._change) is not None:
            probed = change.newcomer.probed if change.newcomer is not None else None
            passes = probed is not None and probed.busy and probed.sent_ns > change.heard_ns
            if self._progressed or passes:
                change.heard_ns = now_ns
        self._progressed = False
        while self._ended:
            name, end, drafted = self._ended.popleft()
            self._trials.pop(name, None)
            if self._change is not None and self._change.phase is Phase.TRYING:
                self._tried(self._change, name, end, drafted=drafted)
        if (change := self._change) is not None and change.phase is Phase.TRYING:
            if now_ns - change.heard_ns > SILENT_NS:
                self._fail(change, f"its trial made no progress for {SILENT_NS // 10**9} s")
        elif change is not None and change.phase is Phase.MOVING and not self._reads(change):
            self._move_on(change)

    def break_off(self, why: str) -> None:
        """End a change after an internal error: the old worker stays, the newcomer goes."""
        if (change := self._change) is None:
            return
        if change.old is not None:
            change.old.leaving = False
        self._abandon_trials()
        if change.newcomer is not None and change.newcomer.standby:
            self._acts.let_go(change.newcomer)
        self._end(
            change, f"the change was abandoned because the coordinator failed ({why}); see its log"
        )

    def lost(self, worker: Worker, why: str) -> None:
        """Handle the loss of a worker. The sessions of an old one continue as after any loss."""
        if (change := self._change) is None or change.phase is Phase.OVER:
            return
        if worker is change.newcomer:
            self._fail(change, f"it {why}")
        elif worker is change.old:
            change.old_lost = True

    def failed(self, running: RunningRequest, worker: Worker, why: str) -> bool:
        """Note a worker's failure; return whether it is a newcomer, which is then withdrawn."""
        return (
            self._change is not None
            and not running.trial
            and worker is self._change.newcomer
            and self._undo(self._change, f"it failed in session {running.session.number}: {why}")
        )

    def client_lost(self, client: ClientPeer) -> None:
        """Handle the loss of the client that requested the change; begun moves are completed."""
        if (change := self._change) is not None and client is change.client:
            change.client = None
            if change.phase is Phase.TRYING:
                self._fail(change, "the client that requested it disconnected")

    def paused(self, pause_ns: int) -> None:
        """Note how long a client has waited for its next token."""
        if self._change is not None:
            self._change.longest_pause_ns = max(self._change.longest_pause_ns, pause_ns)

    # -- the trials --------------------------------------------------------------------------------

    def _plan(self, newcomer: Worker, role: Role, old: Worker | None) -> list[Trial]:
        """Return a newcomer's trials: as a draft for the present target; as a target alone, with
        the draft, and compared with a target of equal fingerprint."""
        if role == "draft":
            target = self._placement.target(
                lambda target: self._placement.goes_with(newcomer, target)
            )
            if target is None:
                raise RequestError(
                    "no_target",
                    f"there is no target worker to test {newcomer.name} with: start one first",
                )
            return [Trial("drafted", target.peer, newcomer.peer)]
        draft = self._placement.draft(newcomer)
        same = [
            other
            for other in self._registry.workers.values()
            if other.plays("target") and other.available and _decides_as(other, newcomer)
        ]
        reference = old if old in same else next(iter(same), None)
        return [
            Trial("alone", newcomer.peer),
            *([Trial("drafted", newcomer.peer, draft.peer)] if draft is not None else []),
            *([Trial("before", reference.peer)] if reference is not None else []),
        ]

    def _try(self, trial: Trial) -> None:
        """Run a trial, and receive its messages as the client."""
        target = self._registry.workers.get(trial.target)
        draft = self._registry.workers.get(trial.draft or b"")
        try:
            if target is None or (trial.draft is not None and draft is None):
                raise RequestError("worker_lost", "its partner disconnected")
            submit = Submit(
                epoch=self._epoch,
                request=0,
                tokens=trial_tokens(target),
                sampling=Sampling(temperature=1.0),
                max_tokens=TRIAL_TOKENS,
                seed=TRIAL_SEED,
                end=(),
                tree=TRIAL_TREE,
            )
            running = self.trial(submit, target, draft, partial(self._hear, trial.name, draft))
        except RequestError as error:
            self._ended.append((trial.name, refusal(self._epoch, error), False))
            return
        self._trials[trial.name] = running
        self._acts.start(running)

    def trial(
        self, submit: Submit, target: Worker, draft: Worker | None, hear: Callable[[Message], None]
    ) -> RunningRequest:
        """Return a session for an internal request on these workers; `hear` receives its messages.
        Raises `RequestError` if it cannot be tokenized."""
        request = attempt(submit, target)
        if isinstance(request, RequestError):
            raise request
        hello = Hello(epoch=self._epoch, roles=("client",), name="trial", host="", pid=os.getpid())
        ours = ClientPeer(b"", hello, hear=hear)
        return self._placement.try_out(ours, submit, target, draft, request, self._now_ns())

    def _hear(self, name: TrialName, draft: Worker | None, message: Message) -> None:
        """Receive a trial's message; a draft that was lost meanwhile has not failed."""
        self._progressed = True
        if isinstance(message, Finished | Failed):
            draft_sync, gone = (
                self._trials[name].session.draft_sync,
                draft is not None and draft.peer not in self._registry.workers,
            )
            self._ended.append(
                (name, message, gone or (draft_sync is not None and draft_sync.rows > 0))
            )

    def _abandon_trials(self) -> None:
        """End the running trials."""
        ended, self._trials = [*self._trials.values()], {}
        for running in ended:
            self._acts.drop(running)

    def _tried(
        self, change: Change, name: TrialName, end: Finished | Failed, *, drafted: bool
    ) -> None:
        """End a trial. `drafted`: whether its draft answered correctly to the end."""
        if isinstance(end, Failed) and name == "before":  # the target for comparison
            change.trials = [trial for trial in change.trials if trial.name != "before"]
        elif isinstance(end, Failed):
            self._fail(change, f"its trial failed: {end.text}")
            return
        elif name == "drafted" and not drafted:
            nothing = "it offered nothing that its target could verify"
            unread = "it could not verify its drafts"
            self._fail(change, nothing if change.role == "draft" else unread)
            return
        else:
            change.ends[name] = end
            if why := _contradiction(change.ends, name, end):
                self._fail(change, why)
                return
        if len(change.ends) == len(change.trials):
            self._move_over(change)

    # -- the sessions ------------------------------------------------------------------------------

    def _move_over(self, change: Change) -> None:
        """Send new sessions to the newcomer instead of the old worker, if it still fits."""
        if (newcomer := change.newcomer) is not None:
            try:
                self._registry.check_place(newcomer)
            except RequestError as misfit:
                self._fail(change, str(misfit))
                return
        change.phase = Phase.MOVING
        if change.old is not None:
            change.old.leaving = True
            change.reading = self._read_now()
        if newcomer is not None:
            newcomer.standby = False
            self._registry.engaged.add(newcomer.process)
            self._acts.send(newcomer, Engage(epoch=self._epoch))
            self._acts.join(newcomer)
            if self._change is change:
                self._say(change, f"{newcomer.name} is in place")

    def _read_now(self) -> set[tuple[bytes, int]]:
        clients = self._registry.clients.values()
        return {(client.peer, request) for client in clients for request in client.reading}

    def _reads(self, change: Change) -> bool:
        """Return whether a request for the leaving worker is still being read."""
        change.reading &= self._read_now()
        return bool(change.reading)

    def _move_on(self, change: Change) -> None:
        """Let sessions leave the old worker; end the change once all have."""
        standings = {
            number: self._standing(change, running)
            for number, running in self._running.items()
            if not running.trial
        }
        here = [number for number, standing in standings.items() if standing in ("held", "movable")]
        change.held |= set(here)
        change.gone |= {
            number for number in change.held if standings.get(number) in ("coming", "over")
        }
        coming = any(standings.get(number) == "coming" for number in change.gone)
        if not here and not coming:
            change.phase = Phase.OVER
            if change.leaver is not None:
                self._let_go(change.leaver)
            if self._change is change:
                self._end(change, change.failure)
            return
        movable = [number for number in here if standings[number] == "movable"]
        if change.role == "draft":
            moves = [number for number in movable if number not in change.asked]
        else:
            moves = [] if coming else movable[:1]
        change.asked |= dict.fromkeys(moves, self._now_ns())
        for number in moves:
            if self._change is change:
                self._move(change, self._running[number])
        if self._change is change and here and not (movable or coming or change.waits):
            change.waits = True
            if change.leaver is not None:
                self._say(change, f"sessions that end on {change.leaver.name}: {len(here)}")
            else:
                numbers = ", ".join(map(str, sorted(here)))
                self._say(change, f"sessions waiting for a lost target: {numbers}")

    def _standing(self, change: Change, running: RunningRequest) -> Standing:
        if change.role == "draft":
            if running.draft is change.old is not None:
                return "movable"
            return "coming" if running.joining else "over"
        if running.loss is not None and self._stranded(change, running):
            return "held"
        if running.target is not change.old or running.loss is not None:
            opens = running.session.state in (State.WAITING, State.OPENING)
            # until the next token, which ends the pause for its client
            moves = (running.last_sent_ns or 0) < change.asked.get(running.session.number, 0)
            return "coming" if opens or moves else "over"
        begun = running.session.state in (State.DRAFTING, State.VERIFYING)
        return "movable" if begun and self._refuge(change, running) is not None else "held"

    def _stranded(self, change: Change, running: RunningRequest) -> bool:
        """Return whether a session has lost its target and cannot continue on the newcomer."""
        newcomer = change.newcomer if change.old is None else None
        return newcomer is not None and not self._moving.suits(running, newcomer)

    def _move(self, change: Change, running: RunningRequest) -> None:
        if running.draft is change.old:
            self._moving.change_draft(running)
        elif (target := self._refuge(change, running)) is not None and not (
            self._reads_ahead(change, running, target)
        ):
            self._moving.move(running, target)

    def _refuge(self, change: Change, running: RunningRequest) -> Worker | None:
        """Return the target to which a session moves: the one that already prefills its log, if
        any."""
        log = change.log
        if log is not None and log.running is running and log.new.available:
            return log.new
        return self._moving.refuge(running)

    def _reads_ahead(self, change: Change, running: RunningRequest, target: Worker) -> bool:
        """Make a target prefill a moving session's log; return whether it is still doing so."""
        log = change.log
        if log is not None and (log.running, log.new) == (running, target):
            if log.heard is None:
                return True
            if isinstance(log.heard, Failed) or not self._ahead.lags(log):
                return False
        self._ahead.abandon(log)
        change.log = None
        if self._ahead.able(running, target):
            change.log = self._ahead.begin(running, target)
        return change.log is not None

    # -- what goes wrong ---------------------------------------------------------------------------

    def _undo(self, change: Change, why: str) -> bool:
        """Undo a change whose newcomer failed after its promotion; return whether it had been
        promoted. A promoted target leaves as the old one would have."""
        kept, newcomer = change.leaver, change.newcomer
        if change.phase is not Phase.MOVING or newcomer is None or kept is None:
            return False
        if change.role == "draft":
            self._fail(change, why)
            return True
        change.failure, change.newcomer, change.old = change.failed(why), None, newcomer
        change.held, change.asked, change.gone, change.waits = set(), {}, set(), False
        kept.leaving, newcomer.leaving = False, True
        change.reading = self._read_now()
        self._acts.join(kept)
        if self._change is change:
            self._say(change, f"{newcomer.name} is withdrawn: {why}")
        return True

    def _fail(self, change: Change, why: str) -> None:
        """Dismiss the newcomer, and end the change; the old worker stays."""
        assert change.newcomer is not None
        failure = change.failed(why)
        if change.phase is Phase.MOVING and change.old is not None:
            change.old.leaving = False
        change.phase = Phase.OVER
        self._let_go(change.newcomer)
        if self._change is change:
            self._end(change, failure)

    def _let_go(self, worker: Worker) -> None:
        self._abandon_trials()
        if self._registry.workers.get(worker.peer) is worker:
            self._acts.let_go(worker)

    # -- what is reported --------------------------------------------------------------------------

    def _say(self, change: Change, text: str) -> None:
        """Report a phase of the change."""
        self._acts.decide(text)
        self._answer(change, Progressed(epoch=self._epoch, request=change.request, text=text))

    def _end(self, change: Change, why: str) -> None:
        """Report the outcome; the next change may begin."""
        self._ahead.abandon(change.log)
        self._change = None
        figures = {
            "epoch": self._epoch,
            "request": change.request,
            "moved": len(change.gone),
            "stayed": len(change.held) - len(change.gone),
            "longest_pause_s": change.longest_pause_ns / 1e9,
        }
        if why:
            self._acts.decide(why)
            failed = Failed(epoch=self._epoch, session=change.request, code="swap", text=why)
            self._answer(change, failed)
        elif change.newcomer is not None:
            self._answer(change, Swapped.model_validate(figures))
        else:
            if change.old is not None:
                self._service.drained.update(change.old.hello.roles)
                self._acts.decide(f"{change.old.name} was removed")
            self._answer(change, Dismissed.model_validate(figures))
        self._ended.clear()

    def _answer(self, change: Change, message: Message) -> None:
        if change.client is not None:
            self._acts.reply(change.client, message)


def _contradiction(ends: Mapping[TrialName, Finished], name: TrialName, end: Finished) -> str:
    """Return why an answer contradicts the others, near-ties excepted, or ""."""
    for other_name, other in ends.items():
        parted = first_difference(end, other)
        if parted is None or parted.near_tie:
            continue
        if "before" in (name, other_name):
            return (
                "it has the fingerprint of a registered target, but chooses different tokens from "
                f"token {parted.position} on"
            )
        return (
            "with a draft it chooses different tokens than without, from token "
            f"{parted.position} on"
        )
    return ""
