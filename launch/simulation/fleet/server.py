"""One server: the sessions that it decodes and the prompts that it reads, between two events.

Sessions share a server alike: all get the same tokens a second, so that their order of ending is
that of the tokens that they want, counted from a common sum (processor sharing).
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush

from dovetail.launch.simulation.fleet.profile import Profile

NEVER = float("inf")
READING = 0.5
"""The share of a server that reads a prompt while others decode: a chunk has as many rows as keep
the pass within twice its time."""
EPSILON = 1e-9


@dataclass(slots=True)
class Session:
    """A request on its way."""

    number: int
    prompt: int
    reply: int
    key: int
    asked_s: float
    """When it came; `first_s`: when its first token did."""
    begun_s: float = NEVER
    first_s: float = NEVER
    made: float = 0.0
    """Tokens of the reply that an earlier server made."""
    moves: int = 0

    @property
    def tokens(self) -> int:
        """Return the tokens that it takes room for."""
        return self.prompt + self.reply


@dataclass(slots=True)
class Server:
    """A server, and what it is about."""

    index: int
    kind: int
    group: int
    profile: Profile
    node: list["Server"] = field(default_factory=list)
    """The servers that share its memory and are lost with it, itself among them."""
    slow: float = 1.0
    """The factor by which its rounds are lengthened by its coordinator, its router and the servers
    of its node."""
    up: bool = True
    paused: bool = False
    version: int = 0
    last_s: float = 0.0
    sum: float = 0.0
    """Tokens that a session would have had that was here all the time."""
    decoding: list[tuple[float, int, Session]] = field(default_factory=list)
    """A heap by the sum at which each is done."""
    reading: list[Session] = field(default_factory=list)
    left_s: float = 0.0
    """Seconds of this server alone that the first of `reading` still takes; `behind_s`: that those
    behind it will."""
    behind_s: float = 0.0
    sessions: int = 0
    """Decoded, read, and waiting to be read."""
    busy_s: float = 0.0
    tokens: float = 0.0

    def advance(self, now_s: float) -> None:
        """Let the time pass since it was last looked at."""
        gone_s, self.last_s = now_s - self.last_s, now_s
        if gone_s <= 0.0 or self.paused or not self.sessions:
            return
        self.busy_s += gone_s
        decoding = len(self.decoding)
        if self.reading:
            self.left_s -= gone_s * READING if decoding else gone_s
        if decoding:
            got = gone_s * self._rate(decoding)
            self.sum += got
            self.tokens += got * decoding

    def _rate(self, decoding: int) -> float:
        """Return the tokens a second of each session."""
        rate = self.profile.rates[decoding] / self.slow
        return rate * (1.0 - READING) if self.reading else rate

    def next_s(self) -> float:
        """Return when the next session has been read or is done, if nothing else happens."""
        if self.paused or not self.sessions:
            return NEVER
        when_s, decoding = NEVER, len(self.decoding)
        if self.reading:
            left_s = max(0.0, self.left_s)
            when_s = self.last_s + (left_s / READING if decoding else left_s)
        if decoding:
            left = max(0.0, self.decoding[0][0] - self.sum)
            when_s = min(when_s, self.last_s + left / self._rate(decoding))
        return when_s

    def begin(self, session: Session, now_s: float) -> None:
        """Take a session, whose log is read first; `advance` has been called."""
        session.begun_s = min(session.begun_s, now_s)
        self.sessions += 1
        self.reading.append(session)
        if len(self.reading) == 1:
            self.left_s = self._reading_s(session)
        else:
            self.behind_s += self._reading_s(session)

    def _reading_s(self, session: Session) -> float:
        return (session.prompt + session.made) * self.profile.read_s

    def finish(self, now_s: float) -> list[Session]:
        """Take note of what has been read or is done by now; return the sessions that are done."""
        done = []
        while self.reading and self.left_s <= EPSILON:
            session = self.reading.pop(0)
            decoding = len(self.decoding)
            round_s = self.slow / self.profile.rounds[decoding] if decoding else 0.0
            later_s = self.profile.first_s + round_s / 2  # it comes in the midst of a pass
            session.first_s = min(session.first_s, now_s + later_s)
            wanted = max(0.0, session.reply - 1 - session.made)
            self.tokens += 0.0 if session.made else 1.0
            if wanted:
                waits = later_s * self.profile.rates[decoding + 1] / self.slow
                heappush(self.decoding, (self.sum + wanted + waits, session.number, session))
                self.tokens -= waits
            else:
                done.append(session)
            if self.reading:
                self.left_s = self._reading_s(self.reading[0])
                self.behind_s -= self.left_s
        while self.decoding and self.decoding[0][0] <= self.sum + EPSILON:
            done.append(heappop(self.decoding)[2])
        self.sessions -= len(done)
        return done

    def evict(self) -> list[Session]:
        """Give up all sessions, which go on elsewhere behind the tokens that they have."""
        gone = self.reading
        for end, _, session in self.decoding:
            session.made = session.reply - 1 - max(0.0, end - self.sum)
            gone.append(session)
        for session in gone:
            session.moves += 1
        self.decoding, self.reading, self.sessions = [], [], 0
        self.left_s = self.behind_s = 0.0
        return gone

    def done_s(self, prompt: float, reply: int) -> float:
        """Return about how long a session would take here if it came now: what the placement of new
        sessions goes by."""
        profile = self.profile
        rate = profile.rates[self.sessions + 1] / self.slow
        return self.left_s + self.behind_s + prompt * profile.read_s + reply / rate
