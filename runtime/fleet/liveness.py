"""Liveness: whether a worker still executes its commands, judged by its answers to probes. Pure:
times are arguments. A worker executes one command after the other, and messages keep their order
both ways. So if it answers a probe between two commands, it has answered everything sent before: an
answer owed both when the probe was sent and now is lost. An answer during a command only shows that
it is computing."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dovetail.protocol.messages import Probed
from dovetail.runtime.fleet.scheduler import Owed

MOST_STEP_NS = 1_000_000_000
"""The most silence counted between two checks, since the coordinator may have been stopped."""
LEAST_S = 5.0  # the least silence of a lost worker; a busy one reports after some seconds
DEAF = 6  # multiple of `coordinator.stuck_s` after which a silent worker is lost


@dataclass
class Liveness:
    """The liveness of one worker."""

    owed: Mapping[int, Owed] = field(default_factory=dict)
    """The answers it owed when the last probe was sent."""
    sent_ns: int = -1  # time of that probe; -1 before the first
    silent_ns: int = 0  # its silence since the probe; 0 again with its next message

    def probed(self, owed: Mapping[int, Owed], now_ns: int) -> None:
        """Note that a probe is sent."""
        self.owed, self.sent_ns = dict(owed), now_ns

    def missed(self, since_ns: int) -> None:
        """Note at a check that the probe is unanswered."""
        self.silent_ns += min(since_ns, MOST_STEP_NS)

    def has_forgotten(self, answer: Probed, owed: Mapping[int, Owed]) -> bool:
        """Return whether an answer owed since before the last probe is lost."""
        if answer.busy or answer.sent_ns != self.sent_ns:
            return False
        return any(owed.get(session) is asked for session, asked in self.owed.items())
