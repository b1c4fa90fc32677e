"""Runs methods in turn, prompt by prompt, so that other load affects all of them; the processes of
the others sleep. A reply is measured up to its first repeated 20-gram in the reply of `none`, since
any draft predicts a model that loops. The untimed first reply of `none` also warms up."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from dovetail.launch.bench.contenders import Contender, Ours, Run, Task, sampling_of
from dovetail.launch.bench.journal import Journal, Where
from dovetail.launch.bench.methods import NONE, Method, PromptSet
from dovetail.launch.console.terminal import counted, note, progress_bar
from dovetail.launch.files.prompts import Prompt
from dovetail.launch.processes.connection import Connection
from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Finished
from dovetail.runtime.session.comparison import Difference, first_difference

T = TypeVar("T")
LOOP_TOKENS = 20
SHORTER = 0.8  # a prompt that does not fit is tried again with this share of its characters


@dataclass
class Cell:
    """All runs of one method on one set of prompts at one temperature."""

    method: Method
    prompts: PromptSet
    temperature: float
    runs: list[Run] = field(default_factory=list)
    differences: dict[str, Difference] = field(default_factory=dict)
    """Prompt id -> the first position where its tokens differ from those of `none`."""

    def decoding(self) -> tuple[Any, Any]:
        """(seconds, tokens) of decoding for each prompt, over all repeats, in the order of the
        prompts."""
        ids = list(dict.fromkeys(run.task.prompt.id for run in self.runs))
        seconds, tokens = np.zeros(len(ids)), np.zeros(len(ids))
        for run in self.runs:
            seconds[ids.index(run.task.prompt.id)] += run.decode_s
            tokens[ids.index(run.task.prompt.id)] += run.decoded_tokens
        return seconds, tokens

    @property
    def tokens_per_s(self) -> float:
        seconds, tokens = self.decoding()
        return float(tokens.sum() / seconds.sum()) if seconds.sum() else 0.0


def measure(
    found: Mapping[str, Contender],
    sets: Sequence[PromptSet],
    temperatures: Sequence[float],
    repeat: int,
    seed: int,
    journal: Journal | None = None,
) -> Iterator[Cell]:
    """The cells of every set and temperature, filled prompt by prompt with the methods in turn;
    what the journal has is not measured again."""
    journal = journal or Journal()
    left = replies_left(found, sets, temperatures, repeat, journal)
    saved = counted(len(journal.replies), "reply", "replies")
    if not left:
        note(f"all {saved} are already in the file of --out: nothing was measured")
    elif journal.replies:
        note(f"{saved} from an earlier run: {left} to go")
    with progress_bar(left, "replies") as step:
        turns = _Turns(found, repeat, seed, journal, step)
        for prompts in sets:
            for temperature in temperatures:
                cells = [
                    Cell(contender.method, prompts, temperature) for contender in found.values()
                ]
                for number, prompt in enumerate(prompts.prompts):
                    task = turns.take(cells, prompt, number)
                    _compare(cells, task)
                yield from cells


def replies_left(
    found: Mapping[str, Contender],
    sets: Sequence[PromptSet],
    temperatures: Sequence[float],
    repeat: int,
    journal: Journal,
) -> int:
    """Return how many replies are still to be decoded, those that set the lengths included."""
    everywhere = [
        (prompts.name, temperature, prompt.id)
        for prompts in sets
        for temperature in temperatures
        for prompt in prompts.prompts
    ]
    left = [where for where in everywhere if not journal.complete(found, where, repeat)]
    return (
        sum(not journal.has(label, at, n) for label in found for at in left for n in range(repeat))
        + sum(where not in journal.tasks for where in everywhere)
        + any(where in journal.tasks for where in left[:1])
    )


@dataclass(frozen=True)
class _Turns:
    """The turns of a run: from the journal where it has them, else taken now."""

    found: Mapping[str, Contender]
    repeat: int
    seed: int
    journal: Journal
    step: Callable[[str], None]

    def take(self, cells: Sequence[Cell], prompt: Prompt, number: int) -> Task:
        where = (cells[0].prompts.name, cells[0].temperature, prompt.id)
        task = self._task(prompt, where)
        for turn in range(self.repeat):
            for cell in rotated(cells, number + turn):
                cell.runs.append(self._run(cell.method.label, where, turn, task))
        return task

    def _task(self, prompt: Prompt, where: Where) -> Task:
        """The prompt as it is measured. A continued run that begins at an incomplete prompt decodes
        it once first, to be as warm as the original run."""
        task = self.journal.task(where, prompt)
        if task is None or not (
            self.journal.begun or self.journal.complete(self.found, where, self.repeat)
        ):
            alone = self.found[NONE]
            assert isinstance(alone, Ours)
            self.step(f"{where[0]} {where[2]}: its length")
            task = prepare(alone.connection, alone.method, prompt, where[1], self.seed)
            self.journal.keep_task(where, task)
        return task

    def _run(self, label: str, where: Where, turn: int, task: Task) -> Run:
        run = self.journal.reply(label, where, turn, task)
        if run is None:
            contender = self.found[label]
            self.step(f"{where[0]} {where[2]}: {label}")
            run = contender.decode(task, where[1], self.seed)
            self.journal.keep_reply(label, where, turn, run, contender.peak_rss_mb())
        return run


def rotated(those: Sequence[T], by: int) -> list[T]:
    """Rotate the methods, so that each is first equally often."""
    by %= len(those)
    return [*those[by:], *those[:by]]


def prepare(
    connection: Connection, alone: Method, prompt: Prompt, temperature: float, seed: int
) -> Task:
    """Cut a prompt until it fits the context together with its reply, keeping its beginning, and
    find where the reply begins to loop."""
    tree, most = alone.configuration.settings.tree, alone.configuration.settings.sampling.max_tokens
    sampling = sampling_of(alone, temperature, most)
    turn = prompt.turns[0]
    while True:
        try:
            finished = connection.decode(
                [turn], sampling=sampling, tree=tree, max_tokens=most, seed=seed, speculate=False
            )
        except RequestError as error:
            if error.code != "prompt_too_long" or not turn:
                raise
        else:
            result = finished.result
            if result.finish_reason != "length" or result.completion_tokens == most or not turn:
                return Task(prompt, turn, max(1, loop_begins(result.token_ids)), finished)
        turn = turn[: int(len(turn) * SHORTER)]


def loop_begins(tokens: Sequence[int], length: int = LOOP_TOKENS) -> int:
    """Return the number of tokens before the first repeated 20-gram; all of them without one."""
    seen: set[tuple[int, ...]] = set()
    for start in range(len(tokens) - length + 1):
        gram = tuple(tokens[start : start + length])
        if gram in seen:
            return start
        seen.add(gram)
    return len(tokens)


def _compare(cells: Sequence[Cell], task: Task) -> None:
    """Compare the last replies to a prompt with that of `none`, if they should be equal."""
    alone = cells[0].runs[-1].finished
    for cell in cells[1:]:
        other = cell.runs[-1].finished
        difference = first_difference(alone, other) if _comparable(cell, alone, other) else None
        if difference is not None:
            cell.differences[task.prompt.id] = difference


def _comparable(cell: Cell, alone: Finished, other: Finished) -> bool:
    """Return whether losslessness applies: not to replies of another function (fingerprint), nor to
    a peer's random samples or other weights."""
    if cell.method.ours:
        return other.result.fingerprint == alone.result.fingerprint
    return cell.temperature == 0.0 and cell.method.configuration.settings.target.weights in (
        "fp32",
        "half",
    )
