"""A coordinator over in-memory links with scripted workers and a client: one thread, one step after
the other, no model and no clock to wait for."""

import itertools
import time
from typing import Any

from dovetail.protocol.keys import PeerKey
from dovetail.protocol.messages import Finished, Limits, Reads, Reported
from dovetail.protocol.settings import CoordinatorSettings, TreeSettings
from dovetail.runtime.client import Client
from dovetail.runtime.engine.coordinator import DEFAULTS, Coordinator
from dovetail.runtime.journal.journal import Journal
from dovetail.runtime.record.recorder import Recorder
from support.memory_links import MemoryHub, MemoryLink, memory_links
from support.scripted import ScriptedDraft, ScriptedTarget, ScriptedWorker

PROMPT = (5, 6, 7)
DYNAMIC = TreeSettings(policy="dynamic", insist=True)
STEP_NS = 1_000
"""Time that passes whenever the coordinator reads its clock, which no busy machine stops."""


class House:
    """A coordinator with its workers and one client, all in this thread."""

    def __init__(
        self,
        *,
        draft: bool = True,
        target: bool = True,
        repeat: int = 1,
        reads: Reads | None = None,
        limits: Limits | None = None,
        settings: CoordinatorSettings = DEFAULTS,
        recorder: Recorder | None = None,
        journal: Journal | None = None,
        hub: MemoryHub | None = None,
    ) -> None:
        """`reads`: the draft is a head of the target's, and reads these features. `limits`: of both
        workers. `hub`: one that is there already."""
        self.hub: MemoryHub = hub or memory_links()
        self.later_ns = 0
        clock = itertools.count(time.monotonic_ns(), STEP_NS)
        self.coordinator = Coordinator(
            self.hub,
            clock_ns=lambda: next(clock) + self.later_ns,
            settings=settings,
            recorder=recorder,
            journal=journal,
        )
        self.workers: list[ScriptedWorker] = []
        both: dict[str, Any] = {} if limits is None else {"limits": limits}
        self.target = self.add(ScriptedTarget, "target", repeat, **both) if target else None
        head: dict[str, Any] = {} if reads is None else {"reads": reads, "vocabulary": None}
        self.draft = self.add(ScriptedDraft, "draft", repeat, **head, **both) if draft else None
        self.client = self.connect()

    def add(
        self,
        kind: type[ScriptedWorker],
        role: str,
        repeat: int = 1,
        user: PeerKey | None = None,
        **changes: object,
    ) -> ScriptedWorker:
        worker = kind(self.hub.connect(user), role, epoch=100 + len(self.workers), repeat=repeat)
        worker.register(**changes)
        self.workers.append(worker)
        self.run()
        return worker

    def lose(self, worker: ScriptedWorker) -> None:
        """Have it vanish."""
        self.workers.remove(worker)
        worker.link.close()

    def connect(self) -> Client:
        return Client(pumped(self, self.hub.connect()))

    def run(self, most: int = 10_000) -> None:
        """Let everybody do what there is to do."""
        for _ in range(most):
            self.coordinator.look_around()
            self.coordinator.pump()
            if not sum(worker.step() for worker in self.workers):
                return

    def submit(self, prompt: tuple[int, ...] = PROMPT, **options: Any) -> int:
        return self.client.submit(
            tokens=prompt, **{"max_tokens": 60, "seed": 1, "tree": DYNAMIC, **options}
        )

    def complete(self, **options: Any) -> Finished:
        return self.client.complete(self.submit(**options))

    def replies(self) -> list[object]:
        replies = list[object]()
        while (reply := self.client.receive(0)) is not None:
            replies.append(reply)
        return replies

    def report(self) -> Reported:
        return self.client.status()


def pumped(house: House, link: MemoryLink) -> MemoryLink:
    """A link whose reader lets everybody else work first."""
    receive = link.receive
    link.receive = lambda timeout_s, **_: (house.run(), receive(0))[1]  # type: ignore[method-assign]
    return link
