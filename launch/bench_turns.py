"""How methods take their turns: prompt by prompt, each of them first equally often, so that whatever else happens on the machine happens to all of them.

A stack of processes whose turn it is not sleeps. A reply is measured up to its first repeated 20-gram: text of a small model that has begun to loop is
foretold by any draft. The reply of `none`, decoded once before anything is timed, says where that is; the same run warms the caches up, and shows which
prompts have to be cut to fit the context.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from dovetail.launch.bench_methods import NONE, Contender, Method, Ours, PromptSet, Run, Task, sampling_of
from dovetail.launch.connection import Connection
from dovetail.launch.prompts import Prompt
from dovetail.launch.terminal import progress_bar
from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Finished
from dovetail.runtime.comparison import Difference, first_difference

T = TypeVar("T")
LOOP_TOKENS = 20
SHORTER = 0.8
"""A prompt that does not fit is tried again with this share of its characters."""


@dataclass
class Cell:
    """All runs of one method on one set of prompts at one temperature."""

    method: Method
    prompts: PromptSet
    temperature: float
    runs: list[Run] = field(default_factory=list)
    differences: dict[str, Difference] = field(default_factory=dict)
    """Prompt id -> where its tokens part from those of `none`."""

    def decoding(self) -> tuple[Any, Any]:
        """(seconds, tokens) of decoding for each prompt, over all repeats, in the order of the prompts."""
        ids = list(dict.fromkeys(run.task.prompt.id for run in self.runs))
        seconds, tokens = np.zeros(len(ids)), np.zeros(len(ids))
        for run in self.runs:
            seconds[ids.index(run.task.prompt.id)] += run.decode_s
            tokens[ids.index(run.task.prompt.id)] += run.decoded_tokens
        return seconds, tokens

    @property
    def tokens_per_s(self) -> float:
        """The decoding rate."""
        seconds, tokens = self.decoding()
        return float(tokens.sum() / seconds.sum()) if seconds.sum() else 0.0


def measure(found: Mapping[str, Contender], sets: Sequence[PromptSet], temperatures: Sequence[float], repeat: int, seed: int) -> Iterator[Cell]:
    """The cells of every set and temperature, filled prompt by prompt with the methods in turn."""
    alone = found[NONE]
    assert isinstance(alone, Ours)
    steps = sum(len(s.prompts) for s in sets) * len(temperatures) * (1 + repeat * len(found))
    with progress_bar(steps, "replies") as step:
        for prompts in sets:
            for temperature in temperatures:
                cells = [Cell(contender.method, prompts, temperature) for contender in found.values()]
                for number, prompt in enumerate(prompts.prompts):
                    step(f"{prompts.name} {prompt.id}: how far")
                    task = prepare(alone.connection, alone.method, prompt, temperature, seed)
                    for turn in range(repeat):
                        for cell in rotated(cells, number + turn):
                            step(f"{prompts.name} {prompt.id}: {cell.method.label}")
                            cell.runs.append(found[cell.method.label].decode(task, temperature, seed))
                    _compare(cells, task)
                yield from cells


def rotated(those: Sequence[T], by: int) -> list[T]:
    """Each of them is the first one equally often."""
    by %= len(those)
    return [*those[by:], *those[:by]]


def prepare(connection: Connection, alone: Method, prompt: Prompt, temperature: float, seed: int) -> Task:
    """Cut a prompt until it fits the context together with its reply, keeping its beginning, and find where the reply begins to loop."""
    tree, most = alone.configuration.settings.tree, alone.configuration.settings.sampling.max_tokens
    sampling = sampling_of(alone, temperature, most)
    turn = prompt.turns[0]
    while True:
        try:
            finished = connection.decode([turn], sampling=sampling, tree=tree, max_tokens=most, seed=seed, speculate=False)
        except RequestError as error:
            if error.code != "prompt_too_long" or not turn:
                raise
        else:
            result = finished.result
            if result.finish_reason != "length" or result.completion_tokens == most or not turn:
                return Task(prompt, turn, max(1, loop_begins(result.token_ids)), finished)
        turn = turn[: int(len(turn) * SHORTER)]


def loop_begins(tokens: Sequence[int], length: int = LOOP_TOKENS) -> int:
    """How many tokens there are before the first 20-gram that was there before; all of them if none was."""
    seen: set[tuple[int, ...]] = set()
    for start in range(len(tokens) - length + 1):
        gram = tuple(tokens[start : start + length])
        if gram in seen:
            return start
        seen.add(gram)
    return len(tokens)


def _compare(cells: Sequence[Cell], task: Task) -> None:
    """Hold the last replies to a prompt against that of `none`, where they are to be the same."""
    alone = cells[0].runs[-1].finished
    for cell in cells[1:]:
        other = cell.runs[-1].finished
        difference = first_difference(alone, other) if _comparable(cell, alone, other) else None
        if difference is not None:
            cell.differences[task.prompt.id] = difference


def _comparable(cell: Cell, alone: Finished, other: Finished) -> bool:
    """Replies of another function (fingerprint) are no matter of losslessness; nor is what a peer draws, or computes with weights that it has not."""
    if cell.method.ours:
        return other.result.fingerprint == alone.result.fingerprint
    return cell.temperature == 0.0 and cell.method.configuration.settings.target.weights in ("fp32", "half")
