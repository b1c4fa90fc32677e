"""Liveness: whether a worker still does what it is asked, judged by what it says to probes. Pure:
times are handed in, what follows is the coordinator's business.

A worker does one command after the other, and messages keep their order both ways. So a probe that
it answers between two commands is answered after all that was asked before it: what it owed when
the probe left and still owes will not come. A probe that it answers in the midst of a command says
only that it is at work, for however long that may take.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dovetail.protocol.messages import Probed
from dovetail.runtime.fleet.scheduler import Owed

MOST_STEP_NS = 1_000_000_000
"""Between two looks no more counts as silence: whoever looks may have stood still itself."""
LEAST_S = 5.0
"""A worker may be silent for so long at least: it says that it is at work some seconds after it
began."""
DEAF = 6
"""After so many times `coordinator.stuck_s` without a word a worker is lost: its own watchdog ends
it sooner, if it still can."""


@dataclass
class Liveness:
    """The liveness of one worker."""

    owed: Mapping[int, Owed] = field(default_factory=dict)
    """When the last probe left."""
    sent_ns: int = -1
    """When that was."""
    silent_ns: int = 0
    """For so long it has not answered it, nor said anything else; 0 again with its next word."""

    def probed(self, owed: Mapping[int, Owed], now_ns: int) -> None:
        """A probe leaves."""
        self.owed, self.sent_ns = dict(owed), now_ns

    def missed(self, since_ns: int) -> None:
        """It has been looked at, and has not answered."""
        self.silent_ns += min(since_ns, MOST_STEP_NS)

    def has_forgotten(self, answer: Probed, owed: Mapping[int, Owed]) -> bool:
        """Return whether something that it owed when the last probe left, and still owes, will not
        come."""
        if answer.busy or answer.sent_ns != self.sent_ns:
            return False
        return any(owed.get(session) is asked for session, asked in self.owed.items())
