"""The workload that `dovetail profile` watches: replies to prompts, and soundings: short replies
with other trees, and with none, that measure the cost of passes over other numbers of rows and the
gain of a larger tree."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dovetail.launch.files.prompts import Prompt
from dovetail.launch.processes.connection import Connection, ahead_of
from dovetail.launch.profiling.watching import EVERY_S, Watch
from dovetail.protocol.errors import DovetailError, UserError
from dovetail.protocol.messages import Emitted, Failed, Finished, Recorded, Result, RoundRecord
from dovetail.protocol.settings import MAX_DEPTH, Settings, TreeSettings

WIDE, DEEPER = 63, 4
"""Nodes, and further levels, of the trees that larger ones are judged by."""
LADDER = (1, 3, 7, 31)
"""Nodes of the trees that passes are measured with, in addition to 0, that of the run, and WIDE."""
WIDE_TOKENS, LADDER_TOKENS, WARM_TOKENS = 96, 24, 12
WIDE_PROMPTS = 4


@dataclass
class Reply:
    """One that was decoded."""

    result: Result
    rounds: list[RoundRecord] = field(default_factory=list)


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
        self._decode(prompt, max_tokens=WARM_TOKENS)

    def run(
        self, prompts: Sequence[Prompt], watch: Watch, step: Callable[[str], None]
    ) -> list[Reply]:
        replies = []
        for prompt in prompts:
            replies.append(
                self._decode(
                    prompt, max_tokens=self.settings.sampling.max_tokens, glance=watch.glance
                )
            )
            step(prompt.id)
        return replies

    def sound(self, prompts: Sequence[Prompt], step: Callable[[str], None]) -> Soundings:
        first = prompts[0]
        plain = self._decode(first, max_tokens=LADDER_TOKENS, speculate=False, record=True).rounds
        step("the target alone")
        if not self.drafts:
            return Soundings(plain=plain)
        others: list[RoundRecord] = []
        for gamma in LADDER:
            others += self._decode(
                first,
                max_tokens=LADDER_TOKENS,
                tree=self._fixed(gamma, self.settings.tree.depth),
                ahead=False,
                record=True,
            ).rounds
            step(f"gamma {gamma}")
        wide = []
        for prompt in prompts[:WIDE_PROMPTS]:
            tree = self._fixed(
                max(WIDE, self.settings.tree.gamma),
                min(MAX_DEPTH, self.settings.tree.depth + DEEPER),
            )
            wide.append(
                self._decode(
                    prompt, max_tokens=WIDE_TOKENS, tree=tree, ahead=False, record=True
                ).rounds
            )
            step("a wide tree")
        return Soundings(wide, plain, others)

    @property
    def soundings(self) -> int:
        """Return how many steps `sound` takes at most."""
        return 1 + (len(LADDER) + WIDE_PROMPTS if self.drafts else 0)

    def _fixed(self, gamma: int, depth: int) -> TreeSettings:
        """A tree of that size that is grown level by level; rejection sampling knows static ones
        alone."""
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

    def _decode(
        self,
        prompt: Prompt,
        *,
        max_tokens: int,
        tree: TreeSettings | None = None,
        speculate: bool = True,
        ahead: bool | None = None,
        record: bool = False,
        glance: Callable[[], None] = lambda: None,
    ) -> Reply:
        """One reply; `glance` is called at least every EVERY_S."""
        settings, client = self.settings, self.connection.client
        sampling = settings.sampling
        request = client.submit(
            turns=prompt.turns[:1],
            sampling=sampling.model_copy(
                update={"min_tokens": min(sampling.min_tokens, max_tokens)}
            ),
            tree=tree or settings.tree,
            max_tokens=max_tokens,
            seed=self.seed,
            speculate=speculate and self.drafts,
            ahead=ahead if ahead is not None else ahead_of(settings.draft),
            record=record,
        )
        rounds: list[RoundRecord] = []
        while True:
            reply = client.receive(EVERY_S)
            glance()
            match reply:
                case Recorded(request=number) if number == request:
                    rounds.append(reply.record)
                case Finished(request=number) if number == request:
                    if (
                        losses := self.connection.stack.losses()
                        if self.connection.stack is not None
                        else []
                    ):
                        raise losses[0]
                    return Reply(reply.result, rounds)
                case Failed():
                    raise self.connection.failure(reply)
                case None | Emitted() | Recorded():
                    pass
                case _:
                    raise DovetailError(
                        f"the coordinator answered a completion with {type(reply).__name__}"
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
