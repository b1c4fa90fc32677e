"""The steps by which a worker replaces another, or leaves, their order, and what is undone if one
fails.

A newcomer is on standby. It is tested with short sessions, then promoted: new sessions go to it and
none to the old worker. Those of the old one move: from a draft at their next round; from a target
one after the other, so that none waits longer than the prefill of its own log; those that may not
move, or have not begun, end where they are. When none is left and the newcomer is ready for all
sessions given to it, the old worker is dismissed. If the newcomer fails before that, the old one
stays and the newcomer is dismissed; a promoted target leaves in the same way as the old one would
have, since only it can end what it has begun. A worker that leaves without a newcomer follows the
same steps, without the trials.

Pure: events in, actions out. Knows workers by address and name, sessions by number, and a trial's
result."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from dovetail.protocol.messages import Failed, Finished, Role
from dovetail.runtime.session.comparison import first_difference

SILENT_NS = 30_000_000_000
"""Seconds without a token of any trial after which the newcomer has failed."""

TrialName = Literal["alone", "drafted", "before"]
Standing = Literal["held", "movable", "coming", "over"]
"""A session's standing: on the old worker, to stay or go; moving; on another one."""


@dataclass(frozen=True)
class Party:
    """A worker that takes part in a change."""

    peer: bytes
    name: str


@dataclass(frozen=True)
class Trial:
    """A short session for the newcomer: a fixed request, on these workers alone."""

    name: TrialName
    target: bytes
    draft: bytes | None = None


@dataclass(frozen=True)
class Try:
    """Run this trial."""

    trial: Trial


@dataclass(frozen=True)
class Redirect:
    """Give the newcomer sessions from now on, and the old worker none."""


@dataclass(frozen=True)
class Move:
    """Have this session leave the old worker."""

    session: int


@dataclass(frozen=True)
class LetGo:
    """Dismiss this worker."""

    party: Party


@dataclass(frozen=True)
class Keep:
    """Give the old worker sessions again."""


@dataclass(frozen=True)
class TakeBack:
    """Give the old worker sessions again and the newcomer, which now leaves, none."""


@dataclass(frozen=True)
class Say:
    """Report a phase of the change."""

    text: str


@dataclass(frozen=True)
class End:
    """The change is over; `why` it has failed, empty if it has not."""

    why: str = ""


Action = Try | Redirect | Move | LetGo | Keep | TakeBack | Say | End


class Phase(Enum):
    TRYING = "trying"
    MOVING = "moving"
    OVER = "over"


@dataclass
class Change:
    """A change of workers; every method returns the actions that follow."""

    role: Role
    newcomer: Party | None
    old: Party | None
    trials: Sequence[Trial] = ()
    """Trials: a target alone, with a draft, and `before` on its equal; or a draft."""
    phase: Phase = Phase.TRYING
    longest_pause_ns: int = 0
    _heard_ns: int = 0
    _ends: dict[TrialName, Finished] = field(default_factory=dict)
    _held: set[int] = field(default_factory=set)
    """Sessions of the old worker; `_asked`: those that must leave, `_gone`: those that did."""
    _asked: set[int] = field(default_factory=set)
    _gone: set[int] = field(default_factory=set)
    _waits: bool = False  # True once it was reported that sessions end where they are
    _failure: str = ""  # why the newcomer is withdrawn
    _leaves: str = field(init=False)
    """The name of the leaving worker, which may be gone before its sessions are over."""

    def __post_init__(self) -> None:
        self._leaves = self.old.name if self.old is not None else ""

    @property
    def moved(self) -> int:
        """The number of sessions that moved."""
        return len(self._gone)

    @property
    def stayed(self) -> int:
        """The number of sessions that ended on the old worker, or are still there."""
        return len(self._held) - len(self._gone)

    @property
    def words(self) -> str:
        """The change in progress, for `status`."""
        if self.newcomer is None:
            return f"{self._leaves} leaves"
        place = f" takes the place of {self.old.name}" if self.old is not None else " joins"
        return f"{self.newcomer.name}{place}{', it is being tested' if self.phase is Phase.TRYING else ''}"  # noqa: E501

    def begin(self, now_ns: int) -> list[Action]:
        self._heard_ns = now_ns
        if self.newcomer is None:
            return self._move_over()
        return [Say(f"{self.newcomer.name} is tested"), *map(Try, self.trials)]

    # -- the trials --------------------------------------------------------------------------------

    def heard(self, now_ns: int) -> None:
        """Note progress of a trial."""
        self._heard_ns = now_ns

    def tried(self, name: TrialName, end: Finished | Failed, *, drafted: bool) -> list[Action]:
        """End a trial. `drafted`: whether its draft answered correctly to the end."""
        if self.phase is not Phase.TRYING:
            return []
        if isinstance(end, Failed):
            return (
                self._without_comparison()
                if name == "before"
                else self._fail(f"its trial failed: {end.text}")
            )
        if name == "drafted" and not drafted:
            return self._fail(
                "it offered nothing that its target could read"
                if self.role == "draft"
                else "it could not verify what was drafted for it"
            )
        self._ends[name] = end
        if why := self._contradiction(name, end):
            return self._fail(why)
        return self._move_over() if len(self._ends) == len(self.trials) else []

    def _without_comparison(self) -> list[Action]:
        """Do without the target for comparison, which does not answer."""
        self.trials = [trial for trial in self.trials if trial.name != "before"]
        return self._move_over() if len(self._ends) == len(self.trials) else []

    def _contradiction(self, name: TrialName, end: Finished) -> str:
        """Return why an answer contradicts the others, near-ties excepted, or ""."""
        for other_name, other in self._ends.items():
            parted = first_difference(end, other)
            if parted is None or parted.near_tie:
                continue
            if "before" in (name, other_name):
                return (
                    "it has the fingerprint of a registered target, but chooses different "
                    f"tokens from token {parted.position} on"
                )
            return (
                "with a draft it chooses different tokens than without, from token "
                f"{parted.position} on"
            )
        return ""

    def look(self, now_ns: int) -> list[Action]:
        """End the change if a trial takes too long."""
        if self.phase is Phase.TRYING and now_ns - self._heard_ns > SILENT_NS:
            return self._fail(f"its trial made no progress for {SILENT_NS // 10**9} s")
        return []

    # -- the sessions ------------------------------------------------------------------------------

    def _move_over(self) -> list[Action]:
        self.phase = Phase.MOVING
        said = [] if self.newcomer is None else [Say(f"{self.newcomer.name} is in place")]
        return [Redirect(), *said]

    def step(self, standings: Mapping[int, Standing]) -> list[Action]:
        """Take a change of `standings`: running sessions; those missing have ended."""
        if self.phase is not Phase.MOVING:
            return []
        here = [number for number, standing in standings.items() if standing in ("held", "movable")]
        self._held |= set(here)
        self._gone |= {
            number for number in self._held if standings.get(number) in ("coming", "over")
        }
        coming = any(standings.get(number) == "coming" for number in self._gone)
        if not here and not coming:
            self.phase = Phase.OVER
            return [*([LetGo(self.old)] if self.old is not None else []), End(self._failure)]
        movable = [number for number in here if standings[number] == "movable"]
        moves = self._moves(movable, coming=coming)
        self._asked |= set(moves)
        return [*map(Move, moves), *self._wait_for(here, movable, coming=coming)]

    def _moves(self, movable: Sequence[int], *, coming: bool) -> Sequence[int]:
        """Return the sessions that leave now."""
        if self.role == "draft":
            return [number for number in movable if number not in self._asked]
        return [] if coming else movable[:1]

    def _wait_for(
        self, here: Collection[int], movable: Collection[int], *, coming: bool
    ) -> list[Action]:
        """Report once which sessions end where they are, or wait for a target like the lost one."""
        if self._waits or coming or movable or not here:
            return []
        self._waits = True
        if self.old is not None:
            return [Say(f"sessions that end on {self.old.name}: {len(here)}")]
        return [Say(f"sessions waiting for a lost target: {', '.join(map(str, sorted(here)))}")]

    # -- what goes wrong ---------------------------------------------------------------------------

    def lost(self, peer: bytes, why: str) -> list[Action]:
        """Handle the loss of a worker."""
        if self.phase is Phase.OVER:
            return []
        if self.newcomer is not None and peer == self.newcomer.peer:
            return self._fail(why)
        if self.old is None or peer != self.old.peer:
            return []
        self.old = None  # its sessions continue as after any loss
        return []

    def failed(self, peer: bytes, why: str) -> list[Action]:
        """Note a worker's failure; a newcomer fully in place is like any other."""
        if (
            self.phase is not Phase.MOVING
            or self.newcomer is None
            or self.old is None
            or peer != self.newcomer.peer
        ):
            return []
        return self._fail(why) if self.role == "draft" else self._take_back(why)

    def _take_back(self, why: str) -> list[Action]:
        """Withdraw a promoted target, in the same way as the old one was to leave."""
        assert self.newcomer is not None
        self._failure, self._leaves = self._told(why), self.newcomer.name
        self.newcomer, self.old = None, self.newcomer
        self._held, self._asked, self._gone, self._waits = set(), set(), set(), False
        return [TakeBack(), Say(f"{self._leaves} is withdrawn: {why}")]

    def abandoned(self) -> list[Action]:
        """Note that the client has gone; begun moves are completed."""
        return (
            self._fail("the client that requested it disconnected")
            if self.phase is Phase.TRYING and self.newcomer is not None
            else []
        )

    def _fail(self, why: str) -> list[Action]:
        """Undo the change."""
        assert self.newcomer is not None
        end, in_place, self.phase = End(self._told(why)), self.phase is Phase.MOVING, Phase.OVER
        return [*([Keep()] if in_place else []), LetGo(self.newcomer), end]

    def _told(self, why: str) -> str:
        """Return what happened to the newcomer, and why."""
        assert self.newcomer is not None
        what = (
            "was in place and was removed again"
            if self.phase is Phase.MOVING
            else "was not put in place"
        )
        stays = f"; {self.old.name} stays" if self.old is not None else ""
        return f"{self.newcomer.name} {what}: {why}{stays}"
