"""The rounds of a run as bars that follow each other, their mean, and the time in them that nobody
used."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

from dovetail.launch.profiling.timeline import BESIDE, NS, Slice
from dovetail.protocol.messages import SeenRound

WITHIN = frozenset({"linears", "attention", "other", "head", "choose", "root", "level", "move"})
"""Parts of a longer span of the same process."""
PARTS = ("draft", "verify", "transport", "queue", "coordinator")
"""The parts of a round, as its record has them."""
MESSAGES = frozenset({"decode", "encode", "send"})
"""Spans of what a worker does beside its device's work."""
OFTEN = 0.5
"""Share of the rounds in which a bar has to be, to stand in the mean round."""


# -- rounds ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """The parts of the mean round in seconds; `wall_s` from verdict to verdict."""

    rounds: int
    wall_s: float
    parts_s: Mapping[str, float]

    @property
    def unaccounted_share(self) -> float:
        """Return the share of the time between two verdicts that stands in no part."""
        return 1.0 - sum(self.parts_s.values()) / self.wall_s if self.wall_s else 0.0


def split_of(rounds: Sequence[SeenRound]) -> Split | None:
    """The mean over all rounds that follow another one of their session; None without any."""
    pairs = [(before, after) for before, after in _followers(rounds) if after.at_ns > before.at_ns]
    if not pairs:
        return None
    parts = {
        part: fmean(getattr(after.record, f"{part}_ns") for _, after in pairs) / NS
        for part in PARTS
    }
    return Split(
        len(pairs), fmean(after.at_ns - before.at_ns for before, after in pairs) / NS, parts
    )


def _followers(rounds: Sequence[SeenRound]) -> Iterator[tuple[SeenRound, SeenRound]]:
    """Each round with the one before it, session by session."""
    by_session: dict[int, list[SeenRound]] = defaultdict(list)
    for seen in rounds:
        by_session[seen.session].append(seen)
    for those in by_session.values():
        those.sort(key=lambda seen: seen.record.round)
        yield from (
            (one, two) for one, two in pairwise(those) if two.record.round == one.record.round + 1
        )


@dataclass(frozen=True)
class Bar:
    """Work of a process in a round, from the verdict before it on; seconds."""

    process: str
    name: str
    start_s: float
    length_s: float


@dataclass(frozen=True)
class Waterfall:
    """A round as bars."""

    title: str
    length_s: float
    bars: tuple[Bar, ...]


def every_round(rounds: Sequence[SeenRound], slices: Sequence[Slice]) -> list[Waterfall]:
    """Return the rounds that follow another one of their session, each with the spans between its
    two verdicts, cut at both."""
    ordered = sorted(slices, key=lambda piece: piece.start_ns)
    pairs = sorted(
        ((one, two) for one, two in _followers(rounds) if two.at_ns > one.at_ns),
        key=lambda those: those[0].at_ns,
    )
    found: list[Waterfall] = []
    open_, following = list[Slice](), 0
    for one, two in pairs:
        while following < len(ordered) and ordered[following].start_ns < two.at_ns:
            open_.append(ordered[following])
            following += 1
        open_ = [piece for piece in open_ if piece.end_ns > one.at_ns]
        within = [piece for piece in open_ if piece.start_ns < two.at_ns]
        found.append(
            _waterfall(
                one.at_ns, two.at_ns, within, f"round {two.record.round} of session {two.session}"
            )
        )
    return found


def _waterfall(begin: int, end: int, slices: Iterable[Slice], title: str) -> Waterfall:
    bars = [
        Bar(
            piece.process,
            piece.name,
            (max(begin, piece.start_ns) - begin) / NS,
            (min(end, piece.end_ns) - max(begin, piece.start_ns)) / NS,
        )
        for piece in slices
        if piece.end_ns > begin
    ]
    return Waterfall(
        title, (end - begin) / NS, tuple(sorted(bars, key=lambda bar: (bar.start_s, -bar.length_s)))
    )


def telling(every: Sequence[Waterfall], *, alone: bool) -> list[Waterfall]:
    """Return what is worth drawing of all rounds: their mean, where sessions ran one after the
    other (`alone`), one of usual length, and the longest."""
    if not every:
        return []
    middle = median(fall.length_s for fall in every)
    usual, longest = (
        min(every, key=lambda fall: abs(fall.length_s - middle)),
        max(every, key=lambda fall: fall.length_s),
    )
    shown = [
        replace(usual, title=f"{usual.title}, of usual length"),
        replace(longest, title=f"{longest.title}, the longest"),
    ]
    return [mean_of(every), *shown] if alone else shown


def mean_of(every: Sequence[Waterfall]) -> Waterfall:
    """The mean of rounds: of the first bar of a name in each, of the second, and so on, as long as
    there is one in half of the rounds."""
    places: dict[tuple[str, str, int], list[Bar]] = defaultdict(list)
    for fall in every:
        counts: dict[tuple[str, str], int] = defaultdict(int)
        for bar in fall.bars:
            key = bar.process, bar.name
            places[*key, counts[key]].append(bar)
            counts[key] += 1
    bars = [
        Bar(process, name, fmean(bar.start_s for bar in bars), fmean(bar.length_s for bar in bars))
        for (process, name, _), bars in places.items()
        if len(bars) >= OFTEN * len(every)
        and name not in MESSAGES  # their means would lie within other work
    ]
    length = fmean(fall.length_s for fall in every)
    return Waterfall(
        f"the mean of {len(every)} rounds",
        length,
        tuple(sorted(bars, key=lambda bar: (bar.start_s, -bar.length_s))),
    )


@dataclass(frozen=True)
class Bubble:
    """A stretch of a round in which no device worked: between which spans, how often and how long
    on average; seconds a round."""

    after: str
    before: str
    seconds: float


def bubbles(every: Sequence[Waterfall], devices: Sequence[str]) -> list[Bubble]:
    """Return where in the rounds neither draft nor target worked, the largest first; seconds are
    means over all rounds. `devices`: names of the workers."""
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for fall in every:
        bars = [
            bar
            for bar in fall.bars
            if bar.process in devices and bar.name not in BESIDE | WITHIN | MESSAGES
        ]
        edge, last = 0.0, "verdict"
        for bar in bars:
            if bar.start_s > edge:
                sums[last, bar.name] += bar.start_s - edge
            if bar.start_s + bar.length_s > edge:
                edge, last = bar.start_s + bar.length_s, bar.name
        if fall.length_s > edge:
            sums[last, "verdict"] += fall.length_s - edge
    return (
        sorted(
            (Bubble(*key, total / len(every)) for key, total in sums.items()),
            key=lambda bubble: -bubble.seconds,
        )
        if every
        else []
    )
