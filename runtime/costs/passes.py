"""Costs of passes: the target's over M rows at a context length, the draft's over rows. A
`RowCosts` begins with the curves of a profile file or with nothing, and learns from every pass. For
each number of rows, the last passes are stored and their middle half counts, so that an
interruption has no effect and an old state of the machine is forgotten. Observations bend the
expected curve, including unobserved numbers of rows; the result never falls with rows. A machine
that becomes slower or faster does so for all numbers of rows: passes are stored at the usual speed,
and predicted at the speed of the last ones. For a target with experts, T_V = f(M) + c U: passes are
compared as if each had used the number of experts U that is expected of the next one. Pure: seconds
are arguments."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import log

from dovetail.protocol.calibration import (
    Calibration,
    ContextCurve,
    ExpertCosts,
    RowsSeconds,
    weighted_median,
)
from dovetail.protocol.messages import MAX_NODES, MAX_SESSIONS

VARIETIES = 8  # the last passes, from which the variety of rows is estimated
FULL = 0.95  # share of experts above which a pass is little evidence of variety
SLOPES = 128  # last slopes from which the cost of an expert is estimated
PRIOR = 2.0  # weight of the known cost, as of a slope between passes 2 rows' experts apart


class ExpertsOfPasses:
    """Predicts the number of experts of passes, and learns their cost. Rows of one text share more
    experts than independent rows, especially in repetitive text; this variety is estimated from the
    last passes of any size. The cost of an expert is a weighted median of slopes, seconds over
    experts, between consecutive passes, so that a machine that slows down does not distort them.
    Each is first compared with passes over as many rows, so that costs of rows cancel."""

    def __init__(self, known: ExpertCosts) -> None:
        self._known, self.routing = known, known.routing
        self._varieties: deque[tuple[float, float]] = deque(maxlen=VARIETIES)  # (variety, weight)
        self._slopes: deque[tuple[float, float]] = deque(maxlen=SLOPES)
        """(seconds an expert, weight)."""
        self._before: tuple[float, float] | None = None
        self.variety = 1.0  # the exponent of rows (`Routing.unique`)
        self.expert_s = known.expert_s
        """Seconds of each further expert, at the usual speed of the machine."""

    def at(self, rows: int) -> float:
        """Return how many experts a future pass over `rows` rows is expected to use."""
        return self.routing.unique(rows, self.variety)

    def measured(self, rows: int) -> float | None:
        """Return how many experts the passes of the profile used; None: not counted."""
        return self._known.measured(rows) if self._known.passes else None

    def count(self, rows: int, experts: int) -> None:
        """Learn variety from a pass over `rows` rows that used `experts` experts."""
        routing = self.routing
        if rows > 1 and routing.unique(rows) <= FULL * routing.most:
            self._varieties.append((routing.variety(rows, experts), log(rows)))
            self.variety = weighted_median(self._varieties)

    def weigh(self, seconds: float, experts: float, *, usual_s: float, row_s: float) -> None:
        """Learn an expert's cost from a pass of `seconds` with `experts` more than usual; usual
        passes take `usual_s`. `row_s`: a pass over one row, an upper bound."""
        before, now = self._before, (seconds / usual_s, experts / usual_s)
        self._before = now
        if before is None or (apart := now[1] - before[1]) == 0.0:
            return
        self._slopes.append(((now[0] - before[0]) / apart, abs(apart)))
        row = self.routing.row
        prior = self._known.expert_s, PRIOR * row / row_s
        self.expert_s = min(max(0.0, weighted_median([*self._slopes, prior])), row_s / row)


def curves_of(calibration: Calibration) -> "PassCurves":
    """Return the pass times of a calibration."""
    own = ContextCurve(context=calibration.context, t_v=calibration.t_v)
    return PassCurves([own, *calibration.t_v_by_context])


class PassCurves:
    """T(M, context) by curves over rows at one or more lengths of the cache: interpolated linearly,
    constant below the first length, and extrapolated from the last two above the last."""

    def __init__(self, curves: Sequence[ContextCurve]) -> None:
        """`curves`: at least one."""
        by_context = {curve.context: curve for curve in curves}
        self.contexts = sorted(by_context)
        self.curves = tuple(by_context[context] for context in self.contexts)
        self._levels: list[list[float]] = [[] for _ in self.curves]
        """Each curve at 0, 1, 2, ... rows."""

    def at(self, rows: int, context: float = 0.0) -> float:
        """Return the seconds of a pass over this many rows."""
        below, above, share = self._around(context)
        low, high = self._level(below, rows)[rows], self._level(above, rows)[rows]
        return (1.0 - share) * low + share * high

    def table(self, most: int, context: float) -> list[float]:
        """Return the seconds of passes over 0, 1, ... `most` rows."""
        below, above, share = self._around(context)
        low = self._level(below, most)
        if above == below:
            return low[: most + 1]
        high = self._level(above, most)
        return [(1.0 - share) * low[rows] + share * high[rows] for rows in range(most + 1)]

    def _around(self, context: float) -> tuple[int, int, float]:
        """Return the curves below and above a context, and its relative position."""
        if len(self.contexts) == 1 or context <= self.contexts[0]:
            return 0, 0, 0.0
        place = min(bisect_left(self.contexts, context), len(self.contexts) - 1)
        low, high = self.contexts[place - 1], self.contexts[place]
        return place - 1, place, (context - low) / (high - low)

    def _level(self, curve: int, most: int) -> list[float]:
        level = self._levels[curve]
        if len(level) <= most:
            t_v = self.curves[curve].t_v
            level.extend(t_v.at(rows) for rows in range(len(level), most + 1))
        return level


EXACT_ROWS = 32  # smaller numbers of rows are stored separately
KEPT = 16  # stored passes of each number of rows
RECALLED = 4  # of these, at most this many come from an earlier worker
FEW = 8  # with fewer passes than this only the median counts
TRUST = 2.0  # passes of a number of rows that weigh as much as neighbours and profile together
HOPE = 0.5  # without a profile, the share of a rise assigned to the rows in between
ROW_SHARE = 0.01
"""Assumed cost of a further row, in passes over one: small, so that more rows are tried."""
FIRST_ROWS = 4
"""Without a profile, the most rows of the first passes: 16 can take eight times as long as 1."""
OUTLIER = 4.0  # passes up to this multiple of the usual seconds count for the slope over context
FORGETTING = 0.995  # decay of the slope, per pass
SPREAD = 64.0 * 64.0  # squared distance of contexts at which a slope over them gets half weight
LEAST_SHARE = 0.25
"""A prediction is at least this share of the observed time, for any context and experts."""
LEAST_S = 1e-9
STALE_TOKENS = 32  # contexts within this distance share a table
MOST_TABLES = 64
SPEEDS = 5  # number of last passes whose median is the machine's present speed
SEEN = 2  # passes of a number of rows before further ones measure the speed
PASSING = 0.95
"""Exponent of the slowness that is removed from a pass: a lasting change becomes usual after some
hundred passes."""
STALE_PASSES = 8
MOST_POINTS = 24  # the most points of a displayed curve


def bucket(rows: int) -> int:
    """Return the rows under which a pass is stored: exact up to 32, then rounded to a sixteenth."""
    step = 1 << max(0, rows.bit_length() - 5)
    return rows // step * step


@dataclass(slots=True)
class _Passes:
    """The passes of one number of rows."""

    last: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=KEPT))
    """(seconds at the usual speed, context, experts)."""
    weight: float = 0.0
    mean_context: float = 0.0
    mean_seconds: float = 0.0
    contexts: float = 0.0
    """Decaying sum of squared deviations of contexts; `product`: of context times seconds."""
    product: float = 0.0
    mean_experts: float = 0.0
    _middle: tuple[float, float, float] | None = None
    """The value of `middle`, until another pass is added."""

    def add(self, seconds: float, context: float, experts: float) -> None:
        self.last.append((seconds, context, experts))
        self._middle = None
        before, usual_s = self.weight, self.mean_seconds
        if before > 1.0 and seconds > (most_s := OUTLIER * usual_s):
            seconds = most_s
        kept = before * FORGETTING
        self.weight = weight = kept + 1.0
        off_context, off_seconds = context - self.mean_context, seconds - usual_s
        self.mean_context += off_context / weight
        self.mean_seconds = usual_s + off_seconds / weight
        self.mean_experts += (experts - self.mean_experts) / weight
        self.contexts = FORGETTING * self.contexts + off_context * off_context * kept / weight
        self.product = FORGETTING * self.product + off_context * off_seconds * kept / weight

    def middle(self) -> tuple[float, float, float]:
        """Return mean seconds, context and experts of the middle half of the last passes."""
        if self._middle is None:
            self._middle = self._made()
        return self._middle

    def _made(self) -> tuple[float, float, float]:
        ordered = sorted(self.last)
        edge = len(ordered) // 4 if len(ordered) >= FEW else (len(ordered) - 1) // 2
        inner = ordered[edge : len(ordered) - edge]
        seconds, context, experts = map(sum, zip(*inner, strict=True))
        return seconds / len(inner), context / len(inner), experts / len(inner)


@dataclass
class _Table:
    """Seconds of passes over 0, 1, ... rows."""

    usual: list[float] = field(default_factory=list)  # at the usual speed
    experts: list[float] = field(default_factory=list)
    """Expected experts of each pass; empty for a target that counts none."""
    seconds: list[float] = field(default_factory=list)
    slowness: float = 0.0  # the machine's slowness to which `seconds` apply
    observed: int = 0  # number of passes observed when it was made
    asked: int = 0  # rows requested since


class RowCosts:
    """T(M, context) of one worker's passes, in seconds."""

    def __init__(
        self, curves: Sequence[ContextCurve] = (), experts: ExpertCosts | None = None
    ) -> None:
        """`curves`: of the profile; `experts`: for a target that counts those of its passes."""
        self.experts = None if experts is None else ExpertsOfPasses(experts)
        self.known = self.profiled = bool(curves)
        """Return whether anything is known; `profiled`: it began with curves."""
        self._curves = PassCurves(curves) if curves else None
        self._passes: dict[int, _Passes] = {}
        self._observed = 0
        self._slowness = 1.0  # recent pass times over usual ones
        self._lately: deque[float] = deque([1.0] * SPEEDS, maxlen=SPEEDS)
        self._tables: dict[int, _Table] = {}
        """Tables by context, each for `STALE_TOKENS`: sessions that share a pass alternate."""

    @property
    def most_rows(self) -> int:
        """Return the most rows to try: twice the most rows so far; no bound with curves."""
        return (
            MAX_NODES * MAX_SESSIONS
            if self.profiled
            else max(FIRST_ROWS, 2 * max(self._passes, default=0))
        )

    def seen(self, rows: int) -> int:
        """Return how many of the last passes had about this many rows."""
        found = self._passes.get(bucket(rows))
        return len(found.last) if found else 0

    def observe(self, rows: int, seconds: float, context: float = 0.0, experts: int = 0) -> None:
        """Learn from a pass of `seconds` behind `context` tokens; `experts` 0: not counted."""
        if seconds <= 0.0:
            return
        key = rows if rows < EXACT_ROWS else bucket(rows)
        if (known := self._passes.get(key)) is None:
            known = self._passes[key] = _Passes()
        if len(known.last) >= SEEN:
            self._lately.append(seconds / self._usual(rows, context, experts))
            self._slowness = sorted(self._lately)[SPEEDS // 2]
        through = float(experts)
        if self.experts is not None:
            through = self._weigh_experts(self.experts, known, rows, seconds, context, experts)
        known.add(seconds / self._slowness**PASSING, context, through)
        if len(known.last) == SEEN:
            self._tables.clear()  # such passes measure the speed from now on
        self._observed += 1
        self.known = True

    def _weigh_experts(
        self,
        passes: ExpertsOfPasses,
        known: _Passes,
        rows: int,
        seconds: float,
        context: float,
        experts: int,
    ) -> float:
        """Learn experts' cost from a pass; return its number of experts, or the expected number."""
        if not experts:
            return passes.at(rows)
        if len(known.last) >= SEEN:
            passes.weigh(
                seconds,
                experts - known.mean_experts,
                usual_s=known.mean_seconds,
                row_s=self._table(1, context).usual[1],
            )
        passes.count(rows, experts)
        return float(experts)

    def _usual(self, rows: int, context: float, experts: int) -> float:
        """Return the seconds of a pass that uses `experts` experts, at the usual speed."""
        table = self._table(rows, context)
        usual = table.usual[rows]
        if self.experts is None or not experts:
            return usual
        more_s = self.experts.expert_s * (experts - table.experts[rows])
        return max(LEAST_SHARE * usual, usual + more_s)

    def observe_all(self, passes: Iterable[tuple[int, int]]) -> None:
        """Learn from the passes of a proposal, (rows, nanoseconds): the median of equal rows."""
        durations_ns: dict[int, list[int]] = {}
        for rows, duration_ns in passes:
            durations_ns.setdefault(rows, []).append(duration_ns)
        for rows, alike in durations_ns.items():
            self.observe(rows, sorted(alike)[(len(alike) - 1) // 2] / 1e9)

    def at(self, rows: int, context: float = 0.0, experts: int = 0) -> float:
        """Return the seconds of a pass, 0 if unknown; `experts` 0: not counted."""
        if experts and self.experts is not None:
            return self._slowness * self._usual(rows, context, experts)
        return self._slowness * self._table(rows, context).usual[rows]

    def up_to(self, most: int, context: float = 0.0) -> Callable[[int], float]:
        """Return a function from rows, at most `most`, to seconds of a pass, for few calls."""
        usual, slowness = self._table(most, context).usual, self._slowness
        return lambda rows: slowness * usual[rows]

    def table(self, most: int, context: float = 0.0) -> list[float]:
        """Return the seconds of passes over 0 to at least `most` rows; 0 rows take 0 s."""
        found = self._table(most, context)
        if found.slowness != self._slowness:
            found.slowness = self._slowness
            found.seconds = [self._slowness * seconds for seconds in found.usual]
        return found.seconds

    def _table(self, most: int, context: float) -> _Table:
        """Return the table of a context, with usual-speed passes over up to this many rows."""
        key = int(context) // STALE_TOKENS
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) >= MOST_TABLES:
                self._tables.clear()
            found = self._tables[key] = _Table()
        if most > found.asked:
            found.asked = most
        unseen = self._observed - found.observed
        stale = unseen >= STALE_PASSES or unseen > self._observed // 4
        if stale or len(found.usual) <= most:
            found.usual, found.slowness = self._made(found.asked, context), 0.0
            if self.experts is not None:
                found.experts = [*map(self.experts.at, range(found.asked + 1))]
            found.observed, found.asked = self._observed, most
        return found

    def record(self) -> list[tuple[float, ...]]:
        """Return (rows, usual seconds, context, experts, count) of the last passes."""
        passes = sorted(self._passes.items())
        return [(rows, *alike.middle(), len(alike.last)) for rows, alike in passes]

    def recall(self, record: Iterable[Sequence[float]]) -> None:
        """Start from the passes of an earlier worker, unless there have been new ones."""
        for rows, seconds, context, experts, count in () if self._passes else [*record]:
            alike = self._passes[int(rows)] = _Passes()
            for _ in range(min(int(count), RECALLED)):
                alike.add(seconds, context, experts)
                self._observed += 1
            self.known = True

    def curve(self, context: float = 0.0, *, usual: bool = False) -> RowsSeconds | None:
        """Return the curve over seen rows, or None; `usual`: without present disturbance."""
        rows = sorted(self._passes)[:: 1 + len(self._passes) // MOST_POINTS]
        if not rows:
            return None
        table = self._table(rows[-1], context).usual if usual else self.table(rows[-1], context)
        return RowsSeconds(rows=tuple(rows), seconds=tuple(table[count] for count in rows))

    def usual(self, rows: tuple[int, ...], context: float = 0.0) -> RowsSeconds | None:
        """Return seconds of passes over these ascending rows at usual speed; None if unknown."""
        if not self.known:
            return None
        seconds = self._made(rows[-1], context)
        return RowsSeconds(rows=rows, seconds=tuple(seconds[count] for count in rows))

    def _made(self, most: int, context: float) -> list[float]:
        if not self.known:
            return [0.0] * (most + 1)
        expected = self._expected(most, context)
        if not self._passes:
            return [0.0, *accumulate(expected[1:], max)]
        anchors = self._anchors(
            expected
            if len(expected) > max(self._passes)
            else self._expected(max(self._passes), context),
            context,
        )
        bent = _bent(expected, anchors, beyond=not self.profiled)
        return [0.0, *accumulate(bent[1:], max)]

    def _expected(self, most: int, context: float) -> list[float]:
        """Return the curve before measurements: the profile's, else rising a little per row."""
        if self._curves is None:
            return [1.0 + ROW_SHARE * (rows - 1) for rows in range(most + 1)]
        table = self._curves.table(most, context)
        if self.experts is not None and self.experts.measured(1) is not None:
            table = [seconds + self._more_s(rows) for rows, seconds in enumerate(table)]
        return [seconds if seconds > LEAST_S else LEAST_S for seconds in table]

    def _more_s(self, rows: int) -> float:
        """Return the seconds beyond the profile's for another number of experts."""
        assert self.experts is not None
        measured = self.experts.measured(rows) if rows else None
        if measured is None:
            return 0.0
        return self.experts.expert_s * (self.experts.at(rows) - measured)

    def _anchors(self, expected: Sequence[float], context: float) -> list[tuple[int, float]]:
        """Return (rows, observed / expected seconds), ascending; few passes are smoothed."""
        slope = self._learned_slope()
        found = []
        for rows, passes in sorted(self._passes.items()):
            seconds, behind, through = passes.middle()
            more_s = slope * (context - behind)
            if self.experts is not None:
                more_s += self.experts.expert_s * (self.experts.at(rows) - through)
            there = max(LEAST_SHARE * seconds, seconds + more_s)
            found.append((rows, there / expected[rows], float(len(passes.last))))
        if not self.profiled:
            return _risen(found, expected)
        overall = weighted_median([(share, count) for _, share, count in found])
        return _risen(
            [
                (rows, (count * share + TRUST * overall) / (count + TRUST), count)
                for rows, share, count in found
            ],
            expected,
        )

    def _learned_slope(self) -> float:
        """Return seconds per token of context beyond the profile's, from passes of equal rows."""
        if self._curves is not None and len(self._curves.contexts) > 1:
            return 0.0
        contexts = sum([passes.contexts for passes in self._passes.values()])
        product = sum([passes.product for passes in self._passes.values()])
        return max(0.0, product / (contexts + SPREAD))


def _risen(
    found: Sequence[tuple[int, float, float]], expected: Sequence[float]
) -> list[tuple[int, float]]:
    """Pool adjacent violators: (rows, share) whose seconds do not fall with rows."""
    pools: list[tuple[float, float, list[int]]] = []
    for rows, share, weight in found:
        pools.append((share * expected[rows], weight, [rows]))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, low_weight, low_rows), (high, high_weight, high_rows) = pools[-2:]
            mean = (low * low_weight + high * high_weight) / (low_weight + high_weight)
            pools[-2:] = [(mean, low_weight + high_weight, low_rows + high_rows)]
    return [(rows, seconds / expected[rows]) for seconds, _, members in pools for rows in members]


def _bent(
    expected: Sequence[float], anchors: Sequence[tuple[int, float]], *, beyond: bool
) -> list[float]:
    """Return the expected curve times the shares at the anchors, which are interpolated linearly
    and constant outside. `beyond`: nothing else is known of the curve; then values between anchors
    are assumed to be nearer to the lower one, and above the last anchor the seconds rise at least
    as fast as from the first to the last."""
    bent = [seconds * anchors[0][1] for seconds in expected]
    for (below, low), (above, high) in pairwise(anchors):
        for rows in range(below + 1, min(above + 1, len(bent))):
            way = (rows - below) / (above - below) * (HOPE if beyond and rows < above else 1.0)
            bent[rows] = expected[rows] * (low + (high - low) * way)
    last, share = anchors[-1]
    first = anchors[0][0]
    slope = (
        (bent[last] - bent[first]) / (last - first) if beyond and len(bent) > last > first else 0.0
    )
    for rows in range(last + 1, len(bent)):
        bent[rows] = max(expected[rows] * share, bent[last] + slope * (rows - last))
    return bent


class PooledPasses:
    """Seconds of a target's passes over any number of rows, from its own passes and from those of
    targets with the same fingerprint. Below the smallest known number of rows T_V is assumed to be
    proportional to the rows, which is optimistic."""

    def __init__(self, own: RowsSeconds | None, others: Iterable[RowsSeconds | None]) -> None:
        """`own`: of the target's passes; `others`: of those of other targets."""
        points = _points(own)
        for curve in others:
            theirs = _points(curve)
            scale = _scale(points, theirs)
            for rows, seconds in theirs.items():
                if rows not in points and _rises(points, rows, scale * seconds):
                    points[rows] = scale * seconds
        self._rows = sorted(points)
        self._seconds = [points[rows] for rows in self._rows]

    def at(self, rows: int) -> float:
        """Return the seconds of a pass over this many rows; 0 if nothing is known."""
        if not self._rows or rows <= 0:
            return 0.0
        place = bisect_left(self._rows, rows)
        if place == 0:
            return self._seconds[0] * rows / self._rows[0]
        if place == len(self._rows):
            return self._beyond(rows)
        low, high = self._rows[place - 1], self._rows[place]
        share = (rows - low) / (high - low)
        return self._seconds[place - 1] + share * (self._seconds[place] - self._seconds[place - 1])

    def _beyond(self, rows: int) -> float:
        """Extrapolate beyond the largest number of rows: by two points, else in proportion."""
        most, seconds = self._rows[-1], self._seconds[-1]
        before, less = (0, 0.0) if len(self._rows) == 1 else (self._rows[-2], self._seconds[-2])
        return seconds + (rows - most) * max(0.0, seconds - less) / (most - before)


def slowness(own: RowsSeconds | None, others: RowsSeconds | None) -> float:
    """Return the ratio to another target's passes of equal rows; 1 without common rows."""
    return _scale(_points(own), _points(others))


def _points(curve: RowsSeconds | None) -> dict[int, float]:
    return {} if curve is None else dict(zip(curve.rows, curve.seconds, strict=True))


def _scale(own: dict[int, float], theirs: dict[int, float]) -> float:
    """Return how much longer our passes take, over rows that both have measured."""
    ratios = sorted(own[rows] / theirs[rows] for rows in own.keys() & theirs.keys())
    return ratios[len(ratios) // 2] if ratios else 1.0


def _rises(points: dict[int, float], rows: int, seconds: float) -> bool:
    """Return whether a further point keeps the curve rising with rows."""
    return all(
        known <= seconds if count < rows else seconds <= known for count, known in points.items()
    )
