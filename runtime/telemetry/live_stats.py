"""The live stats: the last two minutes, for the dashboard and `dovetail top`. `LiveStats` takes a
coordinator's states and the events of its log, and keeps the displayed values: tokens in each of
the last seconds, how busy each worker was, the last round of each session. All of it is bounded.
`view` returns plain values; the page, `dovetail top` and scripts get the same object. Pure: times
are the coordinator's."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dovetail.protocol.messages import Reported, Seen, SeenRound, SeenWorker, WorkerState
from dovetail.runtime.telemetry.metrics import count_depths
from dovetail.runtime.telemetry.picture import (
    Spell,
    cores_in_words,
    counts,
    folder_name,
    pair_figures,
    process_figures,
    share,
    speculation,
    speedup,
    tree_picture,
)

FORMAT = 2  # version of the view, raised when older readers would not understand it
HISTORY_S = 120  # seconds covered by the displayed history, shares and means
RATE_S = 5  # seconds over which the present rate is averaged
QUIET_S = 30.0  # a session without a round for this long is not listed
MAX_SESSIONS = 64  # sessions that are listed
MAX_DEPTHS = 16  # positions whose acceptance is shown
PARTS = ("draft", "verify", "transport", "queue", "coordinator")
"""Parts of a round's time, in the order in which they are shown."""


@dataclass
class Second:
    """Sums over the rounds that ended within one second."""

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    plain: int = 0
    hits: int = 0
    at_depth: list[int] = field(default_factory=list)
    parts_ns: list[int] = field(default_factory=lambda: [0] * len(PARTS))
    drafting_ns: Counter[str] = field(default_factory=Counter)
    """Drafting for which rounds waited, by worker."""

    def add(self, seen: SeenRound) -> None:
        record = seen.record
        accepted = min(len(record.accepted), record.brought)
        self.rounds += 1
        self.tokens += record.brought
        self.drafted += record.verified
        self.accepted += accepted
        self.plain += not record.verified
        self.hits += record.hit and record.verified > 0
        count_depths(accepted, self.at_depth)
        self.drafting_ns[seen.draft] += record.draft_ns
        for place, part in enumerate(PARTS):
            self.parts_ns[place] += getattr(record, f"{part}_ns")


@dataclass
class SessionStats:
    """The sums of a session's rounds, and the last of them."""

    last: SeenRound
    began_ns: int
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    root: int | None = None  # the token of the last tree's root, if known

    def add(self, seen: SeenRound) -> None:
        before, record = self.last.record, seen.record
        self.root = (
            before.bonus
            if self.rounds and before.round == record.round - 1 and self.last.readable
            else None
        )
        self.rounds += 1
        self.tokens += record.brought
        self.drafted += record.verified
        self.accepted += min(len(record.accepted), record.brought)
        self.last = seen


@dataclass
class WorkerLoad:
    """When a worker was busy: (time, share of the time since the previous sample)."""

    seen: SeenWorker
    shares: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=4 * HISTORY_S))

    def add(self, seen: SeenWorker) -> None:
        passed_ns, worked_ns = seen.at_ns - self.seen.at_ns, seen.busy_ns - self.seen.busy_ns
        if passed_ns > 0 and self.seen.at_ns:  # 0: no report yet
            self.shares.append((seen.at_ns, min(1.0, max(0.0, worked_ns / passed_ns))))
        self.seen = seen


class LiveStats:
    """Takes states and events for `view`; forgets those of an earlier coordinator."""

    def __init__(self) -> None:
        self._state: Reported | None = None
        self._epoch: int | None = None
        self._before: Reported | None = None
        self._begin()

    def _begin(self) -> None:
        self._now_ns = 0
        self._missed = 0
        self._since_ns: int | None = None
        self._seconds: dict[int, Second] = {}
        self._sessions: dict[int, SessionStats] = {}
        self._loads: dict[int, WorkerLoad] = {}
        self.next = 0  # the number of the next event to request

    def hear(self, state: Reported) -> None:
        """Take a coordinator's state."""
        self._before = self._state
        self._state = state

    def see(self, seen: Seen) -> bool:
        """Take a coordinator's events since `next`; return whether there are more."""
        if seen.epoch != self._epoch:
            asked = self.next
            self._begin()
            self._epoch = seen.epoch
            if asked:  # with a number of the previous coordinator
                return True
        self._missed += seen.missed
        self._now_ns, self.next = seen.at_ns, seen.next
        for round_ in seen.rounds:
            self._since_ns = min(self._since_ns or round_.at_ns, round_.at_ns)
            self._seconds.setdefault(round_.at_ns // 10**9, Second()).add(round_)
            self._sessions.setdefault(round_.session, SessionStats(round_, round_.at_ns)).add(
                round_
            )
        self._loads = {
            worker.worker_epoch: self._loads.get(worker.worker_epoch) or WorkerLoad(worker)
            for worker in seen.workers
        }
        for worker in seen.workers:
            self._loads[worker.worker_epoch].add(worker)
        self._forget()
        return seen.more

    def _forget(self) -> None:
        oldest = self._now_ns // 10**9 - HISTORY_S
        self._seconds = {second: done for second, done in self._seconds.items() if second >= oldest}
        quiet = [
            number
            for number, stats in self._sessions.items()
            if self._age_s(stats.last.at_ns) > QUIET_S
        ]
        for number in [*quiet, *sorted(self._sessions.keys() - set(quiet))[:-MAX_SESSIONS]]:
            del self._sessions[number]

    def _age_s(self, at_ns: int) -> float:
        return (self._now_ns - at_ns) / 1e9

    # -- the view ----------------------------------------------------------------------------------

    def view(
        self,
        *,
        spell: Spell | None = None,
        session: int | None = None,
        called: Callable[[str], str] = folder_name,
    ) -> dict[str, Any]:
        """Return all displayed values, with the last tree of a session, by default the newest.
        `spell`: None hides tokens and texts; `called`: a model -> its name."""
        state = self._state
        assert state is not None, "nothing has arrived yet"
        stats = self._sessions.get(session) if session is not None else None
        if stats is None and self._sessions:
            stats = self._sessions[max(self._sessions)]
        return {
            "format": FORMAT,
            "coordinator": {
                "epoch": f"{state.epoch:x}",
                "pid": state.pid,
                "uptime_s": round(state.uptime_s, 1),
            },
            "processes": process_figures(state, self._before),
            "speculation": speculation(state),
            "speedup": speedup(state),
            "occupied": round(state.totals.occupied, 3),
            "degraded": state.degraded,
            "reasons": [*state.reasons, *filter(None, [state.totals.queue_words])],
            "faults": [fault.model_dump() for fault in state.faults],
            "loading": [{**told.model_dump(), "words": told.words} for told in state.loading],
            "counts": counts(state, self._missed),
            "figures": self._figures(),
            "history": self._history(),
            "workers": [
                self._worker(worker, called)
                for worker in sorted(
                    state.workers, key=lambda worker: ("target" not in worker.roles, worker.name)
                )
            ],
            "sessions": [
                self._session(number, stats) for number, stats in sorted(self._sessions.items())
            ],
            "tree": None if stats is None else tree_picture(stats.last, stats.root, spell),
            "pairs": [pair_figures(pair) for pair in state.pairs],
            "decisions": list(state.decisions),
        }

    def _figures(self) -> dict[str, Any]:
        done = [*self._seconds.values()]
        rounds, tokens, drafted = (
            sum(getattr(second, name) for second in done)
            for name in ("rounds", "tokens", "drafted")
        )
        with_tree = rounds - sum(second.plain for second in done)
        depths = max((len(second.at_depth) for second in done), default=0)
        at_depth = [
            sum(second.at_depth[depth] for second in done if depth < len(second.at_depth))
            for depth in range(min(depths, MAX_DEPTHS))
        ]
        parts = [sum(second.parts_ns[place] for second in done) for place in range(len(PARTS))]
        return {
            "window_s": HISTORY_S,
            "tokens_per_s": self._rate(),
            "tau": share(tokens, rounds, 3),
            "rounds": rounds,
            "acceptance_rate": share(sum(second.accepted for second in done), drafted, 4),
            "hit_rate": share(sum(second.hits for second in done), with_tree, 4),
            "plain_share": share(rounds - with_tree, rounds, 4),
            "nodes_a_round": share(drafted, rounds, 2),
            "accepted_per_position": [share(count, with_tree, 4) for count in at_depth],
            "round_ms": {
                name: share(ns / 1e6, rounds, 4) for name, ns in zip(PARTS, parts, strict=True)
            },
        }

    def _rate(self) -> float:
        """Return the tokens per second over the last whole seconds."""
        last = self._now_ns // 10**9
        tokens = sum(
            done.tokens for second, done in self._seconds.items() if last - RATE_S <= second < last
        )
        return round(tokens / max(1, min(RATE_S, last - (self._since_ns or 0) // 10**9)), 2)

    def _history(self) -> dict[str, Any]:
        """Return (seconds ago, value) of every whole second since the first known one."""
        last = self._now_ns // 10**9
        seconds = range(max((self._since_ns or self._now_ns) // 10**9, last - HISTORY_S), last)
        ages = [round(self._age_s(second * 10**9), 1) for second in seconds]
        done = [self._seconds.get(second) for second in seconds]
        return {
            "tokens_per_s": [
                (age, d.tokens if d else 0) for age, d in zip(ages, done, strict=True)
            ],
            "tau": [
                (age, round(d.tokens / d.rounds, 2) if d else None)
                for age, d in zip(ages, done, strict=True)
            ],
        }

    def _worker(self, worker: WorkerState, called: Callable[[str], str]) -> dict[str, Any]:
        load = self._loads.get(worker.worker_epoch)
        shares = (
            []
            if load is None
            else [
                (round(self._age_s(at_ns), 1), round(share, 3))
                for at_ns, share in load.shares
                if self._age_s(at_ns) <= HISTORY_S
            ]
        )
        told = worker.model_dump(exclude={"worker_epoch", "model"})
        return {
            **{
                name: round(value, 3) if isinstance(value, float) else value
                for name, value in told.items()
            },
            "model": called(worker.model),
            "epoch": f"{worker.worker_epoch:x}",
            "waiting": "" if load is None else load.seen.waiting,
            "cores": cores_in_words(() if load is None else load.seen.cores),
            "node": "" if load is None else load.seen.node,
            "busy": shares[-1][1] if shares else None,
            "waited_for": self._waited_for(worker),
            "history": shares,
        }

    def _waited_for(self, worker: WorkerState) -> float | None:
        """Return the share of seconds in which rounds waited for a draft worker."""
        last = self._now_ns // 10**9
        seconds = min(RATE_S, last - (self._since_ns or self._now_ns) // 10**9)
        if "draft" not in worker.roles or seconds < 1:
            return None
        waited_ns = sum(
            done.drafting_ns[worker.name]
            for second, done in self._seconds.items()
            if last - RATE_S <= second < last
        )
        return round(waited_ns / 1e9 / seconds, 3)

    def _session(self, number: int, stats: SessionStats) -> dict[str, Any]:
        took_s = (stats.last.at_ns - stats.began_ns) / 1e9
        return {
            "session": number,
            "draft": stats.last.draft,
            "target": stats.last.target,
            "rounds": stats.rounds,
            "round": stats.last.record.round,
            "length": stats.last.record.prefix + stats.last.record.brought,
            "tau": share(stats.tokens, stats.rounds, 2),
            "acceptance_rate": share(stats.accepted, stats.drafted, 3),
            "tokens_per_s": share(stats.tokens, took_s, 1),
            "quiet_s": round(self._age_s(stats.last.at_ns), 1),
        }
