"""What every process did at every moment, and for what idle ones waited, in seconds, from intervals
on one clock. A process outside its spans waits for the other side, the coordinator or a message
while a session runs. Growth ahead of a verdict is busy time of the draft."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import fmean

from dovetail.protocol.messages import RoundRecord, SeenRound, SeenSpan

COORDINATOR = "coordinator"
PARTS = ("draft", "verify", "transport", "queue", "coordinator")
"""The parts of a round, as its record has them."""
BESIDE = frozenset({"queue", "link", "lost"})  # spans without work
AHEAD = frozenset({"grow", "prepare"})  # work that no round waits for
NS = 1e9


@dataclass(frozen=True)
class Slice:
    """An interval in which a process did something."""

    process: str
    name: str
    start_ns: int
    end_ns: int
    session: int | None = None
    round: int | None = None
    shared: tuple[tuple[int, int], ...] = ()
    """Session and round of each, if it belongs to several."""

    @classmethod
    def of(cls, seen: SeenSpan) -> "Slice":
        name, start, duration = seen.span
        about = seen.session, seen.round, seen.shared
        return cls(seen.process, name, start, start + duration, *about)

    @property
    def works(self) -> bool:
        return self.name not in BESIDE

    @property
    def about(self) -> Sequence[tuple[int, int]]:
        """Sessions and rounds to which it belongs; spans of a session outside of its rounds are
        left out."""
        if self.shared or self.session is None or self.round is None:
            return self.shared
        return ((self.session, self.round),)


@dataclass(frozen=True)
class Actor:
    """An observed process: a worker or the coordinator."""

    name: str
    roles: tuple[str, ...]


@dataclass
class Use:
    """The use of a device's time in an interval, in seconds; `busy_s` and waits add up to it."""

    busy_s: float = 0.0
    ahead_s: float = 0.0  # the part of the busy time that is growth for which no round waited
    waiting_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_name_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of all spans by name; parts of a span are also counted in it."""

    @property
    def whole_s(self) -> float:
        return self.busy_s + sum(self.waiting_s.values())


def uses(
    slices: Sequence[Slice], actors: Sequence[Actor], start_ns: int, end_ns: int
) -> dict[str, Use]:
    found = {actor.name: Use() for actor in actors}
    for piece in slices:
        inside = min(piece.end_ns, end_ns) - max(piece.start_ns, start_ns)
        if piece.process in found and inside > 0:
            found[piece.process].by_name_s[piece.name] += inside / NS
    for begin, end, working, waited_for, at_work in _moments(slices, start_ns, end_ns):
        taken = (end - begin) / NS
        for actor in actors:
            use = found[actor.name]
            if actor.name in working:
                use.busy_s += taken
                use.ahead_s += taken * (actor.name not in waited_for)
            else:
                use.waiting_s[_cause(actor, actors, waited_for) if at_work else "no work"] += taken
    return found


def _cause(actor: Actor, actors: Sequence[Actor], waited_for: frozenset[str]) -> str:
    """Return for what an idle actor waits while a session is running, by the working process."""
    others = [other for other in actors if other.name in waited_for and other.name != actor.name]
    for role in ("target", "draft"):
        if role not in actor.roles and any(role in other.roles for other in others):
            return role
    return COORDINATOR if any(other.name == COORDINATOR for other in others) else "transport"


def _moments(
    slices: Sequence[Slice], start_ns: int, end_ns: int
) -> Iterator[tuple[int, int, frozenset[str], frozenset[str], bool]]:
    """(begin, end, who works, whose work is awaited, whether a session is running), from start to
    end, without gaps."""
    edges: list[tuple[int, int, int, str]] = []
    for piece in slices:
        if piece.works and piece.end_ns > start_ns and piece.start_ns < end_ns:
            kind = 1 if piece.name in AHEAD else 0
            edges += (
                (max(start_ns, piece.start_ns), 1, kind, piece.process),
                (min(end_ns, piece.end_ns), -1, kind, piece.process),
            )
    for begin, end in open_spans(slices):
        if end > start_ns and begin < end_ns:
            edges += ((max(start_ns, begin), 1, 2, ""), (min(end_ns, end), -1, 2, ""))
    edges.sort()
    counts: tuple[dict[str, int], ...] = (defaultdict(int), defaultdict(int), defaultdict(int))
    now = start_ns
    for at, step, kind, process in [*edges, (end_ns, 0, 2, "")]:
        if at > now:
            waited_for, ahead = (
                frozenset(name for name, count in counts[kind].items() if count) for kind in (0, 1)
            )
            yield now, at, waited_for | ahead, waited_for, bool(counts[2][""])
            now = at
        counts[kind][process] += step


def open_spans(slices: Iterable[Slice]) -> list[tuple[int, int]]:
    """Return for each session the time from its first to its last span."""
    sessions: dict[int, tuple[int, int]] = {}
    for piece in slices:
        for session in [session for session, _ in piece.shared] or (
            [] if piece.session is None else [piece.session]
        ):
            begin, end = sessions.get(session, (piece.start_ns, piece.end_ns))
            sessions[session] = min(begin, piece.start_ns), max(end, piece.end_ns)
    return sorted(sessions.values())


def one_by_one(rounds: Iterable[SeenRound]) -> bool:
    sessions: dict[int, list[int]] = defaultdict(list)
    for seen in rounds:
        sessions[seen.session].append(seen.at_ns)
    spans = sorted((min(times), max(times)) for times in sessions.values())
    return all(one[1] <= two[0] for one, two in pairwise(spans))


def passes(slices: Iterable[Slice]) -> list[Slice]:
    """Return the passes of the target over trees."""
    return [piece for piece in slices if piece.name == "verify" and piece.about]


def sessions_a_pass(slices: Iterable[Slice]) -> float:
    """Return how many sessions a pass of the target serves, on average."""
    return fmean(len(piece.about) for piece in found) if (found := passes(slices)) else 1.0


def round_ms(slices: Sequence[Slice], rounds: int) -> dict[str, float]:
    """Milliseconds per round of all spans by name, for every process; parts of a span are also
    counted in it."""
    sums: dict[str, float] = defaultdict(float)
    for piece in slices:
        if piece.session is not None or piece.shared or piece.name in AHEAD:
            sums[piece.name] += (piece.end_ns - piece.start_ns) / 1e6
    largest = sorted(sums.items(), key=lambda item: -item[1])
    return {name: total / rounds for name, total in largest} if rounds else {}


def tokens_of(records: Iterable[RoundRecord]) -> int:
    return sum(record.brought for record in records)


def firsts_of(rounds: Iterable[SeenRound]) -> int:
    """Return how many replies began: the first token of each is from the prompt's pass and belongs
    to no round."""
    return sum(seen.record.round == 1 for seen in rounds)


def waited_for(record: RoundRecord) -> tuple[Sequence[tuple[int, int]], int]:
    """Return (rows, nanoseconds) of the draft passes for which a proposal waited, which are listed
    before those ahead of it, and the nanoseconds of other drafting for which it waited."""
    sums = [0, *accumulate(taken for _, taken in record.passes)]
    waited = max(place for place, total in enumerate(sums) if total <= max(record.draft_ns, 0))
    return record.passes[:waited], record.draft_ns - sums[waited]


@dataclass(frozen=True)
class Split:
    """The parts of the mean round in seconds; `wall_s` from verdict to verdict."""

    wall_s: float
    parts_s: Mapping[str, float]

    @property
    def unaccounted_share(self) -> float:
        return 1.0 - sum(self.parts_s.values()) / self.wall_s


def split_of(rounds: Sequence[SeenRound]) -> Split | None:
    """Return the mean over all rounds that follow another one of their session, or None."""
    ordered = sorted(rounds, key=lambda seen: (seen.session, seen.record.round))
    pairs = [
        (one, two)
        for one, two in pairwise(ordered)
        if (two.session, two.record.round) == (one.session, one.record.round + 1)
        and two.at_ns > one.at_ns
    ]
    if not pairs:
        return None
    records = [two.record for _, two in pairs]
    parts = {part: fmean(getattr(one, f"{part}_ns") for one in records) / NS for part in PARTS}
    return Split(fmean(two.at_ns - one.at_ns for one, two in pairs) / NS, parts)
