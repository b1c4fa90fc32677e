"""The memory, open files, threads and sessions that processes hold, and whether it is as much as
before."""

import os
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from dovetail.protocol.messages import Reported
from support.fleets import Fleet, of

MOST_GROWTH_MB = {"coordinator": 24.0, "worker": 96.0}
"""A worker may keep the caches of 64 ended sessions, which are not there at first; a session that
is left behind in every fault would be far more."""
MOST_NEW_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""asyncio's executor, in which prompts are read, starts so many as they are needed, and keeps
them."""


@dataclass(frozen=True)
class Held:
    """The memory, files, threads and sessions that a process holds."""

    rss_mb: float
    files: int
    threads: int
    sessions: int

    @classmethod
    def by(cls, pid: int, sessions: int) -> "Held":
        process = psutil.Process(pid)
        return cls(
            process.memory_info().rss / 1e6, process.num_fds(), process.num_threads(), sessions
        )


@dataclass(frozen=True)
class Compared:
    """A process before and after; it need not be the same one."""

    name: str
    before: Held
    after: Held

    @property
    def clean(self) -> bool:
        most_mb = MOST_GROWTH_MB["coordinator" if self.name == "coordinator" else "worker"]
        most_threads = self.before.threads + (MOST_NEW_THREADS if self.name == "coordinator" else 1)
        held = (
            self.after.files <= self.before.files
            and self.after.threads <= most_threads
            and self.after.sessions == 0
        )
        return held and self.after.rss_mb <= self.before.rss_mb + most_mb

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "before": asdict(self.before),
            "after": asdict(self.after),
            "clean": self.clean,
        }


def held(fleet: Fleet, state: Reported) -> dict[str, Held]:
    """Return what each process of a fleet holds, of which nobody asks anything at present."""
    found = {"coordinator": Held.by(fleet.coordinator.pid, state.sessions)}
    for member in fleet.members.values():
        worker = of(state, member)
        assert worker is not None
        found[member.name] = Held.by(member.pid, worker.sessions)
    return found


def compare(before: dict[str, Held], after: dict[str, Held]) -> list[Compared]:
    return [Compared(name, before[name], after[name]) for name in before]
