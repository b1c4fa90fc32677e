"""Succession: when a standby takes over, and when a coordinator stops for fear that it has. Pure.

There is no third party to ask but the workers on other machines than the coordinator's, the
*voters*. Each of them serves one coordinator, or waits at one. The standby takes over if more than
half of the voters wait there; the coordinator goes on while at least half of them serve here, or
while it has its standby. Both cannot be of one list of voters, and a coordinator whose list has
changed goes by all lists that its standby may have.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from dovetail.protocol.errors import DovetailError
from dovetail.protocol.messages import Hello, StandbyState

PATIENCE_S = 0.5
"""A standby that has lost its coordinator waits so long for it, as after a flaw in the line; that
comes on top of the 1.2 to 1.7 s that a link needs to find out about a cut."""
MAX_NAME = 512


class Deposed(DovetailError):
    """A coordinator steps down, since one in a higher term leads, at an address."""

    def __init__(self, why: str, successor: str) -> None:
        super().__init__(why)
        self.successor = successor


def reached_at(address: str, host: str) -> str:
    """Return where others find a coordinator that listens at an address, perhaps at all of its
    machine."""
    for anywhere in ("//0.0.0.0:", "//[::]:"):
        address = address.replace(anywhere, f"//{host}:")
    return address


def voter_of(hello: Hello) -> str:
    """Return how a worker is called as a voter: the same process has the same name everywhere."""
    return f"{hello.host}/{hello.pid}/{hello.name}"[:MAX_NAME]


@dataclass
class Copying:
    """The standby that copies a coordinator's journal, and what it has not confirmed."""

    address: str
    host: str
    _unconfirmed: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By the number of a message: its bytes of the journal, and when it was sent."""

    def __str__(self) -> str:
        return f"at {self.address} on {self.host}"

    def told(self, number: int, size: int, now_ns: int) -> None:
        """Note a message of so many bytes of the journal."""
        self._unconfirmed[number] = size, now_ns

    def confirmed(self, number: int) -> None:
        """Note that it has all up to this message."""
        while (oldest := next(iter(self._unconfirmed), math.inf)) <= number:
            del self._unconfirmed[int(oldest)]

    @property
    def behind(self) -> bool:
        """Return whether it has not confirmed all that it was sent."""
        return bool(self._unconfirmed)

    def state(self, now_ns: int) -> StandbyState:
        """Return how far it is behind, for `status`."""
        sent = [*self._unconfirmed.values()]
        return StandbyState(
            address=self.address,
            host=self.host,
            behind_bytes=sum(size for size, _ in sent),
            behind_s=(now_ns - min(at_ns for _, at_ns in sent)) / 1e9 if sent else 0.0,
        )


@dataclass
class Tenure:
    """A coordinator's knowledge of its standby: whether it is there, and its voters."""

    followed: bool = False
    _lists: dict[int, frozenset[str]] = field(default_factory=dict)
    """By the numbers of the messages that told them: that which the standby goes by, and those
    which it may go by."""

    def told(self, number: int, voters: Collection[str]) -> None:
        """Note that the standby was told of these voters."""
        self._lists[number] = frozenset(voters)

    def confirmed(self, number: int) -> None:
        """Note that the standby goes by the voters of this message, and by no earlier ones."""
        if number in self._lists:
            self._lists = {n: voters for n, voters in self._lists.items() if n >= number}

    def lapsed(self, here: Collection[str]) -> bool:
        """Return whether the standby may have taken over: it is not here, and by one of the lists
        more than half of the voters are not either."""
        return not self.followed and any(
            2 * len(voters.intersection(here)) < len(voters) for voters in self._lists.values()
        )


@dataclass
class Watch:
    """A standby's knowledge of the coordinator that it follows."""

    voters: frozenset[str] = frozenset()
    lost_s: float | None = None
    """When it was lost; None: it is there, or never was."""

    def due(self, waiting: Collection[str], now_s: float) -> bool:
        """Return whether to take over: the coordinator has been lost for some time, and more than
        half of the voters wait here."""
        return (
            self.lost_s is not None
            and now_s - self.lost_s >= PATIENCE_S
            and 2 * len(self.voters.intersection(waiting)) > len(self.voters)
        )
