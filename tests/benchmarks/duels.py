"""The parts that the commands about drafting ahead and tree sizes share: methods of one pair of
models on one stack of processes, in turns, reply by reply.

All methods decode on the same processes - a tree and the wish for drafting ahead travel with a
request -, so that no memory page nor core is luckier than another. A finding is a `Bout`: what each
method took for one prompt, once.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Estimate, ratio
from dovetail.launch.bench.contenders import Contender, Ours, Run, Task, contenders
from dovetail.launch.bench.methods import NONE, Method, PromptSet
from dovetail.launch.bench.turns import prepare, rotated
from dovetail.launch.files.prompts import Prompt
from dovetail.launch.settings.configure import Configuration, configure
from dovetail.protocol.errors import UserError
from dovetail.runtime.session.comparison import first_difference

STACK = "the pair"


@dataclass(frozen=True)
class Share:
    """The cost of one reply; nodes and rounds are counted as in `messages.Result`."""

    seconds: float
    tokens: int
    rounds: int
    exposed_s: float
    verify_s: float
    hit_rate: float | None
    grown: int
    ahead: int
    wasted: int
    plain: int
    rows: int

    @classmethod
    def of(cls, run: Run) -> "Share":
        told = run.finished.result
        costs = (
            run.decode_s,
            run.decoded_tokens,
            told.rounds,
            told.draft_exposed_s,
            told.verify_s,
            told.hit_rate,
        )
        return cls(
            *costs,
            told.grown_nodes,
            told.ahead_nodes,
            told.wasted_nodes,
            told.plain_rounds,
            told.verified_rows,
        )

    @property
    def rate(self) -> float:
        """Tokens per second of decoding."""
        return self.tokens / self.seconds


Bout = Mapping[str, Share]
"""Method -> what it took for the same reply."""


def bout_of(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Share]:
    """A bout from its JSON."""
    return {name: Share(**share) for name, share in found.items()}


def as_json(bout: Bout) -> dict[str, Any]:
    return {name: asdict(share) for name, share in bout.items()}


def settings_of(values: Mapping[str, Any]) -> Configuration:
    """The settings of a pair: one core for the target, one for the draft."""
    return configure(environment={}).over(
        "benchmark", {"target.threads": 1, "draft.device": "cpu", **values}
    )


def draft_of(name: str) -> dict[str, Any]:
    """The settings that name a draft by its kind or its folder."""
    return (
        {"draft.kind": "auto", "draft.model": name}
        if "/" in name or Path(name).is_dir()
        else {"draft.kind": name}
    )


@contextmanager
def ring(
    base: Configuration, variants: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Contender]]:
    """`none` and the variants by name, each with its own settings over those of the pair, all on
    one stack."""
    alone = Method(NONE, base.over("none", {"draft.kind": NONE}), shares=STACK)
    methods = [
        Method(name, base.over(name, values), shares=STACK) for name, values in variants.items()
    ]
    with contenders([alone, *methods]) as found:
        yield found


class Fights:
    """Replies of all methods in turns; how far a reply goes is found once for each prompt and
    temperature."""

    def __init__(self, found: Mapping[str, Contender]) -> None:
        self._found = found
        self._tasks: dict[tuple[str, str, float, int], Task] = {}

    def bout(
        self, prompts: PromptSet, prompt: Prompt, temperature: float, seed: int, turn: int
    ) -> dict[str, Share] | None:
        """One reply of each method, the first of them another in every turn; None where it has no
        token after the first. All have the same tokens."""
        task = self._task(prompts, prompt, temperature, seed)
        runs = {
            name: self._found[name].decode(task, temperature, seed)
            for name in rotated(list(self._found), turn)
        }
        for name, run in runs.items():
            difference = first_difference(runs[NONE].finished, run.finished)
            if difference is not None and not difference.near_tie:
                raise UserError(
                    f"{name} differs from the target alone at token {difference.position} of "
                    f"prompt {prompt.id!r}: run `dovetail selftest`"
                )
        shares = {name: Share.of(runs[name]) for name in self._found}
        return (
            shares
            if all(share.tokens > 0 and share.rounds > 0 for share in shares.values())
            else None
        )

    def _task(self, prompts: PromptSet, prompt: Prompt, temperature: float, seed: int) -> Task:
        place = (prompts.name, prompt.id, temperature, seed)
        if place not in self._tasks:
            alone = self._found[NONE]
            assert isinstance(alone, Ours)
            self._tasks[place] = prepare(alone.connection, alone.method, prompt, temperature, seed)
        return self._tasks[place]


def rate_ratio(bouts: Sequence[Bout], method: str, rival: str) -> Estimate:
    """Return how many times as fast a method is as another: the median over the bouts."""
    return ratio([bout[method].rate for bout in bouts], [bout[rival].rate for bout in bouts])
