"""Polls a coordinator while a workload runs, and keeps its answers; reads the samplers as often."""

import time
from collections.abc import Sequence

from dovetail.launch.profiling.samplers import Samplers
from dovetail.protocol.messages import Seen, SeenRound, SeenSpan, SeenWorker
from dovetail.runtime.client import Client

EVERY_S = 0.1  # between two looks: the coordinator answers one in a millisecond or two
SAMPLE_S = 0.25
"""Between two readings of the samplers: the kernel counts busy time in hundredths of a second."""


class Watch:
    """Everything that has been seen since it began; call `glance` as often as there is time."""

    def __init__(self, client: Client, samplers: Samplers) -> None:
        """`client`: used for nothing else. Earlier events are skipped."""
        self._client, self.samplers = client, samplers
        self._next = 0
        self.missed = 0  # rounds and spans that were gone before they were looked at
        self.rounds: list[SeenRound] = []
        self.spans: list[SeenSpan] = []
        self._workers: dict[str, SeenWorker] = {}
        self._there: Sequence[str] = ()
        self.changes: dict[str, str] = {}
        """Workers that came or went meanwhile, and which of the two."""
        self.start_ns = self.end_ns = 0
        """The watched interval, on the coordinator's clock."""
        self._looked_s = self._sampled_s = 0.0

    @property
    def workers(self) -> Sequence[SeenWorker]:
        return [*self._workers.values()]

    def begin(self) -> None:
        """Watch from now on; the coordinator has the workers record fine spans at its next tick."""
        while self._look().more:
            pass
        self.rounds.clear()
        self.spans.clear()
        self.start_ns, self.missed = self.end_ns, 0
        self._workers = {name: self._workers[name] for name in self._there}
        self.changes.clear()
        self.samplers.take()
        self._looked_s = self._sampled_s = time.monotonic()

    def glance(self) -> None:
        now_s = time.monotonic()
        if now_s - self._sampled_s >= SAMPLE_S:
            self.samplers.take()
            self._sampled_s = now_s
        if now_s - self._looked_s >= EVERY_S:
            while self._look().more:
                pass
            self._looked_s = now_s

    def end(self) -> None:
        """The last look; later events are not seen."""
        self.samplers.take()
        while self._look().more:
            pass

    def _look(self) -> Seen:
        seen = self._client.look(self._next, spans=True)
        self._next, self.end_ns = seen.next, seen.at_ns
        self._notice(seen.workers)
        self.missed += seen.missed
        self.rounds += seen.rounds
        self.spans += seen.spans
        return seen

    def _notice(self, workers: Sequence[SeenWorker]) -> None:
        now = {worker.name: worker for worker in workers}
        for name in {*now, *self._there}:
            if name not in now:
                self.changes[name] = "went"
            elif name not in self._there:
                self.changes[name] = "came"
            elif now[name].worker_epoch != self._workers[name].worker_epoch:
                self.changes[name] = "was restarted"
        self._workers.update(now)
        self._there = [*now]
