"""The live stats: what has happened in the last two minutes, for the dashboard and `dovetail top`.

`LiveStats` is told a coordinator's states and the events of its log, and keeps what is shown: how
much was decoded in each of the last seconds, how busy each worker was, the last round of each
session. All of it is bounded, however much happens. `view` returns the picture as plain values; the
page, `dovetail top` and scripts get the same object. Pure: the time is the coordinator's, as it
says it. Knows no HTTP and no terminal.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any

from dovetail.protocol.messages import PairState, Reported, Seen, SeenRound, SeenWorker, WorkerState
from dovetail.protocol.tree import ROOT
from dovetail.runtime.telemetry.metrics import count_depths

FORMAT = 1
"""Of the picture: raised when a reader of an older one would not understand it."""
HISTORY_S = 120
"""What is drawn over time, and what shares and means are taken over."""
RATE_S = 5
"""What the rate of now is taken over."""
QUIET_S = 30.0
"""A session that has had no round for so long is no longer listed."""
MAX_SESSIONS = 64
"""Of them, those that are listed."""
MAX_NODES = 256
"""Of a tree, those that are drawn."""
MAX_DEPTHS = 16
"""Positions whose acceptance is shown."""
MAX_LABEL = 24
"""Characters of a token that are shown."""
PARTS = ("draft", "verify", "transport", "queue", "coordinator")
"""What a round's time goes to, in the order in which it is shown."""
SIGNS = str.maketrans({" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"})

Spell = Callable[[int], str]
"""What a token id stands for, as `label` writes it."""


@dataclass
class Second:
    """What was decoded in one second."""

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    plain: int = 0
    hits: int = 0
    at_depth: list[int] = field(default_factory=list)
    parts_ns: list[int] = field(default_factory=lambda: [0] * len(PARTS))
    drafting_ns: Counter[str] = field(default_factory=Counter)
    """Drafting that was waited for, by worker."""

    def add(self, seen: SeenRound) -> None:
        record = seen.record
        accepted = min(len(record.accepted), record.brought)
        self.rounds += 1
        self.tokens += record.brought
        self.drafted += record.verified
        self.accepted += accepted
        self.plain += not record.verified
        self.hits += record.hit and record.verified > 0
        count_depths(self.at_depth, accepted)
        self.drafting_ns[seen.draft] += record.draft_ns
        for place, part in enumerate(PARTS):
            self.parts_ns[place] += getattr(record, f"{part}_ns")


@dataclass
class Talk:
    """A session as its last rounds show it."""

    last: SeenRound
    began_ns: int
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    root: int | None = None
    """The token that the last tree hangs from, if it is known."""

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
class Load:
    """How busy a worker was: (when, share of the time since the sample before)."""

    seen: SeenWorker
    shares: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=4 * HISTORY_S))

    def add(self, seen: SeenWorker) -> None:
        passed_ns, worked_ns = seen.at_ns - self.seen.at_ns, seen.busy_ns - self.seen.busy_ns
        if passed_ns > 0 and self.seen.at_ns:  # 0: it had not said anything yet
            self.shares.append((seen.at_ns, min(1.0, max(0.0, worked_ns / passed_ns))))
        self.seen = seen


class LiveStats:
    """Hears states and sees what has happened, as both come; `view` shows it. What was seen of a
    coordinator is forgotten when another one speaks."""

    def __init__(self) -> None:
        self._state: Reported | None = None
        self._epoch: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._now_ns = 0
        self._missed = 0
        self._since_ns: int | None = None
        self._seconds: dict[int, Second] = {}
        self._talks: dict[int, Talk] = {}
        self._loads: dict[int, Load] = {}
        self.next = 0
        """What to ask with next time."""

    def hear(self, state: Reported) -> None:
        """A coordinator's state."""
        self._state = state

    def see(self, seen: Seen) -> bool:
        """What a coordinator has seen since `next`; whether there is more to be asked for at
        once."""
        if seen.epoch != self._epoch:
            asked = self.next
            self._begin()
            self._epoch = seen.epoch
            if asked:  # with a number of the one before
                return True
        self._missed += seen.missed
        self._now_ns, self.next = seen.at_ns, seen.next
        for round_ in seen.rounds:
            self._since_ns = min(self._since_ns or round_.at_ns, round_.at_ns)
            self._seconds.setdefault(round_.at_ns // 10**9, Second()).add(round_)
            self._talks.setdefault(round_.session, Talk(round_, round_.at_ns)).add(round_)
        self._loads = {
            worker.worker_epoch: self._loads.get(worker.worker_epoch) or Load(worker)
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
            number for number, talk in self._talks.items() if self._age_s(talk.last.at_ns) > QUIET_S
        ]
        for number in [*quiet, *sorted(self._talks.keys() - set(quiet))[:-MAX_SESSIONS]]:
            del self._talks[number]

    def _age_s(self, at_ns: int) -> float:
        return (self._now_ns - at_ns) / 1e9

    # -- the picture -------------------------------------------------------------------------------

    def view(self, *, spell: Spell | None = None, session: int | None = None) -> dict[str, Any]:
        """All that is shown, and the last tree of a session: of this one, or of the newest.
        `spell`: without it neither tokens nor texts are told."""
        state = self._state
        assert state is not None, "nothing has been heard yet"
        talk = self._talks.get(session) if session is not None else None
        if talk is None and self._talks:
            talk = self._talks[max(self._talks)]
        return {
            "format": FORMAT,
            "coordinator": {
                "epoch": f"{state.epoch:x}",
                "pid": state.pid,
                "uptime_s": round(state.uptime_s, 1),
            },
            "speculation": _speculation(state),
            "degraded": state.degraded,
            "reasons": list(state.reasons),
            "faults": [fault.model_dump() for fault in state.faults],
            "loading": [{**told.model_dump(), "words": told.words} for told in state.loading],
            "counts": _counts(state, self._missed),
            "figures": self._figures(),
            "history": self._history(),
            "workers": [
                self._worker(worker)
                for worker in sorted(
                    state.workers, key=lambda worker: ("target" not in worker.roles, worker.name)
                )
            ],
            "sessions": [
                self._session(number, talk) for number, talk in sorted(self._talks.items())
            ],
            "tree": None if talk is None else _tree(talk, spell),
            "pairs": [_pair(pair) for pair in state.pairs],
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
            "tau": _share(tokens, rounds, 3),
            "rounds": rounds,
            "acceptance_rate": _share(sum(second.accepted for second in done), drafted, 4),
            "hit_rate": _share(sum(second.hits for second in done), with_tree, 4),
            "plain_share": _share(rounds - with_tree, rounds, 4),
            "nodes_a_round": _share(drafted, rounds, 2),
            "accepted_per_position": [_share(count, with_tree, 4) for count in at_depth],
            "round_ms": {
                name: _share(ns / 1e6, rounds, 4) for name, ns in zip(PARTS, parts, strict=True)
            },
        }

    def _rate(self) -> float:
        """Tokens a second of the last whole seconds."""
        last = self._now_ns // 10**9
        tokens = sum(
            done.tokens for second, done in self._seconds.items() if last - RATE_S <= second < last
        )
        return round(tokens / max(1, min(RATE_S, last - (self._since_ns or 0) // 10**9)), 2)

    def _history(self) -> dict[str, Any]:
        """(seconds ago, value) of every whole second since the first that is known."""
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

    def _worker(self, worker: WorkerState) -> dict[str, Any]:
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
            "model": worker.model.rstrip("/").rpartition("/")[2],
            "epoch": f"{worker.worker_epoch:x}",
            "waiting": "" if load is None else load.seen.waiting,
            "cores": cores_in_words(() if load is None else load.seen.cores),
            "node": "" if load is None else load.seen.node,
            "busy": shares[-1][1] if shares else None,
            "waited_for": self._waited_for(worker),
            "history": shares,
        }

    def _waited_for(self, worker: WorkerState) -> float | None:
        """Share of the last whole seconds in which rounds waited for what a draft worker did: what
        it was busy for beside that it did ahead."""
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

    def _session(self, number: int, talk: Talk) -> dict[str, Any]:
        took_s = (talk.last.at_ns - talk.began_ns) / 1e9
        return {
            "session": number,
            "draft": talk.last.draft,
            "target": talk.last.target,
            "rounds": talk.rounds,
            "round": talk.last.record.round,
            "length": talk.last.record.prefix + talk.last.record.brought,
            "tau": _share(talk.tokens, talk.rounds, 2),
            "acceptance_rate": _share(talk.accepted, talk.drafted, 3),
            "tokens_per_s": _share(talk.tokens, took_s, 1),
            "quiet_s": round(self._age_s(talk.last.at_ns), 1),
        }


def label(content: bytes) -> str:
    """A token's bytes as they may stand in a drawing: one line without commands, spaces and line
    ends to be seen, cut where it is long."""
    text = content.decode(errors="replace").translate(SIGNS)
    text = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
    return text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 1] + "…"


def cores_in_words(cores: Sequence[int]) -> str:
    """Numbers of cores as ranges: "0-3,8"."""
    return ",".join(
        f"{first}" if first == last else f"{first}-{last}" for first, last in _runs(sorted(cores))
    )


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    first: int | None = None
    for place, number in enumerate(numbers):
        first = number if first is None else first
        if place + 1 == len(numbers) or numbers[place + 1] != number + 1:
            yield first, number
            first = None


def _share(part: float, whole: float, digits: int) -> float | None:
    return round(part / whole, digits) if whole else None


def _counts(state: Reported, missed: int) -> dict[str, int]:
    totals = state.totals
    return {
        **{
            name: getattr(state, name)
            for name in ("sessions", "finished", "failed", "cancelled", "stale", "refused")
        },
        "rounds_of_finished": state.rounds,
        **{
            name: getattr(totals, name)
            for name in (
                "refused_requests",
                "opening",
                "waiting",
                "kept",
                "prompt_tokens",
                "reused_tokens",
                "completion_tokens",
            )
        },
        "missed": missed,
    }


def _speculation(state: Reported) -> dict[str, Any]:
    """Whether is speculated, in a word, and where not: why."""
    serving = [worker for worker in state.workers if not (worker.standby or worker.leaving)]
    if not any("target" in worker.roles for worker in serving):
        return {"state": "none", "why": "no target worker is registered"}
    if not any("draft" in worker.roles for worker in serving):
        return {
            "state": "off" if state.degraded else "alone",
            "why": "no draft worker is registered: the target decodes alone",
        }
    speculating = {pair.speculating for pair in state.pairs}
    if not speculating:
        return {"state": "idle", "why": "nothing has been decoded yet"}
    if speculating == {True}:
        return {"state": "on", "why": ""}
    reason = next(
        iter(state.decisions[::-1]), "nothing has been drafted yet, or no request asks for it"
    )
    return {"state": "off" if speculating == {False} else "partly", "why": reason}


def _pair(pair: PairState) -> dict[str, Any]:
    told = pair.model_dump(exclude={"t_v", "t_d"})
    return {
        name: round(value, 3) if isinstance(value, float) else value for name, value in told.items()
    }


def _tree(talk: Talk, spell: Spell | None) -> dict[str, Any]:
    """The last tree of a session, best node first; of each node its parent, what became of it and
    how likely the draft thought it."""
    record = talk.last.record
    if not talk.last.readable:
        spell = None
    shown = min(len(record.parents), MAX_NODES)
    accepted = {node for node in record.accepted if node < shown}
    return {
        "session": talk.last.session,
        "round": record.round,
        "draft": talk.last.draft,
        "target": talk.last.target,
        "parents": list(record.parents[:shown]),
        "fates": "".join(
            "a" if node in accepted else "r" if node < record.verified else "n"
            for node in range(shown)
        ),
        "likely": [round(exp(min(0.0, score)), 4) for score in record.scores[:shown]],
        "bonus_parent": record.accepted[-1]
        if record.accepted and record.accepted[-1] < shown
        else ROOT,
        "offered": len(record.parents),
        "verified": record.verified,
        "accepted": len(record.accepted),
        "hit": record.hit,
        "texts": None if spell is None else [spell(token) for token in record.tokens[:shown]],
        "bonus": None if spell is None else spell(record.bonus),
        "root": None if spell is None or talk.root is None else spell(talk.root),
    }
