"""One server, pass by pass: the sessions that it decodes and the prompts that it reads.

Passes that are alike are one step, until a session is done, a prompt is read or a request comes,
which waits for the end of the pass that runs. Whoever comes at random finds a longer pass than the
mean (the inspection paradox), by the spread of the profile; passes in which nothing is read make
good for it. All sessions get tau tokens a pass, so that their order of ending is that of the tokens
that they want, counted from a common sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil

from dovetail.runtime.costs.reading import LAST, ReadingCosts, reading_order, shares
from dovetail.runtime.engine.reading import AT_ONCE, LATENCY, LEAST_ROWS
from simulation.fleet.profile import CHUNK, Profile

NEVER = float("inf")
EPSILON = 1e-6  # the parts of a pass and of a token below which nothing is left of them


@dataclass(slots=True)
class Session:
    """A request on its way."""

    number: int
    prompt: int
    reply: int
    key: int
    asked_s: float  # when it came; `first_s`: when its first token did
    begun_s: float = NEVER
    first_s: float = NEVER
    made: float = 0.0  # tokens of the reply that an earlier server made
    moves: int = 0

    @property
    def tokens(self) -> int:
        """Return the tokens that it takes room for."""
        return self.prompt + self.reply


@dataclass(slots=True)
class Log:
    """The log of a session, which is read before that is decoded."""

    session: Session
    left: int  # rows that are unread
    opened: bool = False
    rows: int = 0  # rows of it in each pass of the present step


@dataclass(slots=True)
class Server:
    """A server, and what it is about."""

    index: int
    kind: int
    group: int
    profile: Profile
    node: list["Server"] = field(default_factory=list)
    """The servers that are lost with it, itself among them."""
    up: bool = True
    paused: bool = False
    version: int = 0
    last_s: float = 0.0
    began_s: float = 0.0  # when the pass began that runs; it takes `pass_s`
    pass_s: float = 0.0
    passes: int = 0
    """Passes of the present step that have not ended; 0: there is nothing to do, or the next step
    is to be planned."""
    owed_s: float = 0.0
    """By how much passes that were found running have taken longer than the mean, until others make
    good for it."""
    sum: float = 0.0  # tokens that a session would have had that was here all the time
    decoding: list[tuple[float, int, Session]] = field(default_factory=list)
    """A heap by the sum at which each is done."""
    reading: list[Log] = field(default_factory=list)
    learned: ReadingCosts = field(default_factory=ReadingCosts)
    """The costs of reading here, as a coordinator has learned them."""
    sessions: int = 0  # decoded, read, and waiting to be read
    handled: int = 0  # sessions decoded here that its coordinator knows of
    busy_s: float = 0.0
    tokens: float = 0.0

    @property
    def ends_s(self) -> float:
        """Return when the present step ends."""
        if self.paused or not self.passes:
            return NEVER
        return self.began_s + self.passes * self.pass_s

    def advance(self, now_s: float) -> None:
        """Let the time pass since it was last looked at, but no further than the present step."""
        gone_s, self.last_s = now_s - self.last_s, now_s
        if self.paused:
            self.began_s += gone_s
        elif self.passes:
            self.busy_s += gone_s
            ended = int(max(0.0, (now_s - self.began_s) / self.pass_s + EPSILON))
            self._end_passes(min(self.passes, ended))

    def _end_passes(self, ended: int) -> None:
        self.began_s += ended * self.pass_s
        self.passes -= ended
        if self.decoding:
            got = ended * self.profile.taus[len(self.decoding)]
            self.sum += got
            self.tokens += got * len(self.decoding)
        for log in self.reading:
            log.left -= ended * log.rows

    def cut(self) -> None:
        """Have the step end with the pass that runs, since the next one is another."""
        self.passes = min(self.passes, 1)

    def begin(self, session: Session, now_s: float) -> None:
        """Take a session, whose log is read first; `advance` has been called."""
        session.begun_s = min(session.begun_s, now_s)
        self.sessions += 1
        self.reading.append(Log(session, session.prompt + ceil(session.made)))
        self.cut()
        if self.passes:
            longer_s = self.profile.spread * (self.began_s + self.pass_s - now_s)
            self.began_s += longer_s
            self.owed_s += longer_s

    def finish(self) -> list[Session]:
        """Take note of what has been read or is done at the end of a step; return the sessions that
        are done."""
        done = []
        while self.decoding and self.decoding[0][0] <= self.sum + EPSILON:
            end, _, session = heappop(self.decoding)
            self.tokens -= self.sum - end
            done.append(session)
        for log in [log for log in self.reading if log.opened and not log.left]:
            self.reading.remove(log)
            session = log.session
            session.first_s = min(session.first_s, self.last_s)
            self.tokens += 0.0 if session.made else 1.0
            if (wanted := session.reply - 1 - session.made) > 0.0:
                heappush(self.decoding, (self.sum + wanted, session.number, session))
            else:
                done.append(session)
        self.sessions -= len(done)
        return done

    def plan(self) -> None:
        """Plan the next step, which begins now, at full speed."""
        self.began_s = self.last_s
        if self.decoding:
            self._plan_rounds()
        elif self.reading:
            self._plan_reading()

    def _plan_reading(self) -> None:
        """Nobody is delayed: a log is read in passes of its own, in turns with others that are too
        long for one."""
        log = self.reading.pop(0)
        self.reading.append(log)
        self._share([log], [min(log.left, CHUNK)])
        took_s = self.profile.passes_s[log.rows]
        self.learned.observe(log.rows, took_s)
        log.opened, self.passes, self.pass_s = True, 1, self.profile.open_s + took_s

    def _plan_rounds(self) -> None:
        """Every session gets a round; logs are opened first and read in the passes of the
        rounds."""
        profile, count = self.profile, len(self.decoding)
        for log in self.reading:
            self.began_s += 0.0 if log.opened else profile.open_s
            log.opened = True
        self.passes = ceil((self.decoding[0][0] - self.sum) / profile.taus[count] - EPSILON)
        self.pass_s = profile.rounds_s[count]
        if self.reading:
            self._read_beside(profile.verify_s[count], profile.rows[count])
        else:
            made_good_s = min(self.owed_s, self.pass_s / 2)
            self.began_s -= made_good_s
            self.owed_s -= made_good_s

    def _read_beside(self, verify_s: float, rows: int) -> None:
        """Have the passes of rounds, which verify `rows` rows of trees in `verify_s`, read as many
        rows of logs as a coordinator allows."""
        bound_s = LATENCY * self.pass_s - verify_s
        most = min(CHUNK, max(LEAST_ROWS, self.learned.rows_within(bound_s)))
        logs = self._in_order()
        self._share(logs, shares([log.left for log in logs], most, at_once=AT_ONCE))
        read = sum(log.rows for log in logs)
        added_s = self.profile.passes_s[rows + read] - self.profile.passes_s[rows]
        self.pass_s += added_s
        self.passes = min(self.passes, *(log.left // log.rows for log in logs if log.rows), LAST)
        for _ in range(self.passes):
            self.learned.observe(read, added_s)

    def _share(self, logs: Sequence[Log], rows: Sequence[int]) -> None:
        for log in self.reading:
            log.rows = 0
        for log, its in zip(logs, rows, strict=True):
            log.rows = its

    def _in_order(self) -> Sequence[Log]:
        """Return the logs in the order in which a coordinator has them read."""
        order = reading_order(
            [str(log.session.key) for log in self.reading],
            waited_s=[self.last_s - log.session.asked_s for log in self.reading],
            reading_s=[log.left * self.learned.row_s for log in self.reading],
        )
        return [self.reading[place] for place in order]

    def evict(self) -> list[Session]:
        """Give up all sessions, which go on elsewhere behind the tokens that they have."""
        gone = [log.session for log in self.reading]
        for end, _, session in self.decoding:
            session.made = session.reply - 1 - max(0.0, end - self.sum)
            gone.append(session)
        for session in gone:
            session.moves += 1
        self.decoding, self.reading, self.sessions, self.passes = [], [], 0, 0
        return gone

    @property
    def next_round_s(self) -> float:
        """Return the seconds of a round with one session more, which placement goes by: they are
        taken to be proportional to the sessions, as in `runtime/fleet/placement.py`."""
        return (self.sessions + 1) * self.profile.rounds_s[1]
