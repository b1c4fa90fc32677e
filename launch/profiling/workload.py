"""The workload that `dovetail profile` watches: replies to prompts, and soundings: short replies
with other trees, and with none, that measure the cost of passes over other numbers of rows and the
gain of a larger tree."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.launch.files.prompts import Prompt
from dovetail.launch.processes.connection import Connection, ahead_of
from dovetail.launch.profiling.samplers import Samplers
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import RoundRecord, Seen, SeenRound, SeenSpan, SeenWorker
from dovetail.protocol.settings import MAX_DEPTH, Settings, TreeSettings
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
        """Workers that came or went meanwhile, and what of it they did."""
        self.start_ns = self.end_ns = 0
        """The stretch of time that is watched, on the coordinator's clock."""
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
        """The last look; what happens after it is not seen."""
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


WIDE, DEEPER = 63, 4  # nodes, and further levels, of the trees that larger ones are judged by
LADDER = (1, 3, 7, 31)
"""Nodes of the trees that passes are measured with, in addition to 0, that of the run, and WIDE."""
WIDE_TOKENS, LADDER_TOKENS, WARM_TOKENS = 96, 24, 12
WIDE_PROMPTS = 4


@dataclass(frozen=True)
class Soundings:
    """Rounds with the widest tree, reply by reply, rounds without any, and those of the trees in
    between."""

    wide: Sequence[Sequence[RoundRecord]] = ()
    plain: Sequence[RoundRecord] = ()
    others: Sequence[RoundRecord] = ()


@dataclass(frozen=True)
class Workload:
    """Decodes prompts with the settings of a run."""

    connection: Connection
    settings: Settings
    seed: int

    @property
    def drafts(self) -> bool:
        return self.settings.draft.kind != "none"

    def warm_up(self, prompt: Prompt) -> None:
        self._decode(prompt, WARM_TOKENS)

    def run(self, prompts: Sequence[Prompt], watch: Watch, step: Callable[[str], None]) -> None:
        for prompt in prompts:
            self._decode(prompt, self.settings.sampling.max_tokens, glance=watch.glance)
            step(prompt.id)

    def sound(self, prompts: Sequence[Prompt], step: Callable[[str], None]) -> Soundings:
        first, depth = prompts[0], self.settings.tree.depth
        plain = self._recorded(first, LADDER_TOKENS, speculate=False)
        step("the target alone")
        if not self.drafts:
            return Soundings(plain=plain)
        others: list[RoundRecord] = []
        for gamma in LADDER:
            tree = self._fixed(gamma, depth)
            others += self._recorded(first, LADDER_TOKENS, tree=tree, ahead=False)
            step(f"gamma {gamma}")
        wide = []
        tree = self._fixed(max(WIDE, self.settings.tree.gamma), min(MAX_DEPTH, depth + DEEPER))
        for prompt in prompts[:WIDE_PROMPTS]:
            wide.append(self._recorded(prompt, WIDE_TOKENS, tree=tree, ahead=False))
            step("a wide tree")
        return Soundings(wide, plain, others)

    @property
    def soundings(self) -> int:
        """Return how many steps `sound` takes at most."""
        return 1 + (len(LADDER) + WIDE_PROMPTS if self.drafts else 0)

    def _fixed(self, gamma: int, depth: int) -> TreeSettings:
        """A tree of this size that is grown level by level; rejection sampling requires a static
        one."""
        tree = self.settings.tree
        policy = tree.policy if self.settings.sampling.acceptance == "rejection" else "dynamic"
        return tree.model_copy(
            update={
                "policy": policy,
                "insist": True,
                "gamma": gamma,
                "depth": depth,
                "thresholds": (),
            }
        )

    def _recorded(self, prompt: Prompt, max_tokens: int, **fields: Any) -> list[RoundRecord]:
        rounds: list[RoundRecord] = []
        self._decode(prompt, max_tokens, record=rounds.append, **fields)
        return rounds

    def _decode(
        self,
        prompt: Prompt,
        max_tokens: int,
        *,
        tree: TreeSettings | None = None,
        speculate: bool = True,
        ahead: bool | None = None,
        **calls: Any,
    ) -> None:
        settings = self.settings
        least = min(settings.sampling.min_tokens, max_tokens)
        self.connection.decode(
            prompt.turns[:1],
            sampling=settings.sampling.model_copy(update={"min_tokens": least}),
            tree=tree or settings.tree,
            max_tokens=max_tokens,
            seed=self.seed,
            speculate=speculate and self.drafts,
            ahead=ahead if ahead is not None else ahead_of(settings.draft),
            **calls,
        )


def watch_others(watch: Watch, seconds: float, step: Callable[[str], None]) -> None:
    """Watch what others have decoded, for so long; Ctrl-C ends it early. `UserError` if nothing
    was."""
    deadline, shown = time.monotonic() + seconds, 0
    try:
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(EVERY_S, left))
            watch.glance()
            while shown < int(seconds - left):
                shown += 1
                step(f"{len(watch.rounds)} rounds")
    except KeyboardInterrupt:
        watch.glance()
    if not watch.rounds:
        raise UserError(
            f"nothing was decoded in {seconds:g} s: send the server a request, or give a --prompt"
        )
