"""The command `levels`: what a level of a draft's tree costs, and how much of that is no matrix
work.

Both workers in one process decode real prompts (`duet.py`); the draft worker's own spans tell what
a level took, and the model's passes how many rows they had. After each reply the draft's matrices
are multiplied with as many rows, pass by pass, and nothing else is done.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import click
import torch

from benchmarks.coupling import PROMPTS, list_keys
from benchmarks.duet import Duet, Reply, open_draft, open_target
from benchmarks.measure import Estimate, estimate
from benchmarks.options import Command, Numbers, option, options, pin, report
from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.launch.files.prompts import read_prompts
from dovetail.launch.settings.embedded import DEMO_FOLDER
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Draft
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.text.tokenizer import TextCodec
from dovetail.workers.kernels import PackedMatrix

REPEATS = 5
"""Times that the matrices are multiplied for a number of rows; the median counts."""


@click.command(cls=Command)
@option(
    "--draft",
    "drafts",
    multiple=True,
    default=(str(DEMO_FOLDER / "draft"),),
    help="Folder of a draft or head; can be repeated.",
)
@option("--draft-weights", default="auto", help="Type of their weights.")
@option("--target", default=str(DEMO_FOLDER / "target"), help="Folder of their target.")
@option(
    "--prompts",
    type=click.Path(dir_okay=False, path_type=Path),
    default=PROMPTS,
    help="File of prompts.",
)
@option("--limit", type=click.IntRange(min=2), default=8, help="Prompts taken.")
@option("--max-tokens", type=click.IntRange(min=2), default=96, help="Tokens of a reply.")
@option(
    "--temperature",
    type=click.FloatRange(min=0.0),
    default=0.0,
    help="Temperature of the sampling.",
)
@option("--tree", type=Numbers(3), default="15,8,10", help="gamma, depth, width.")
@options("json")
def levels(
    drafts: tuple[str, ...],
    draft_weights: str,
    target: str,
    prompts: Path,
    limit: int,
    max_tokens: int,
    temperature: float,
    tree: tuple[int, int, int],
    as_json: bool,
) -> None:
    """Milliseconds of a draft level, and the share of it that is no matrix product: the rest of the
    model, ranking, growth, and Python."""
    pin(1)
    gamma, depth, width = tree
    found = []
    with progress_bar(len(drafts) * limit, "replies") as step:
        for draft in drafts:
            subject = Subject(draft, target, draft_weights)
            asked = [
                (prompt.id, subject.tokens(prompt.turns[0], max_tokens))
                for prompt in read_prompts(prompts)[:limit]
            ]
            measured = []
            for name, tokens in asked:
                step(f"{draft} {name}")
                measured.append(
                    subject.measure(
                        tokens,
                        list_keys(name, 1)[0],
                        Sampling(temperature=temperature),
                        TreeSettings(
                            policy="dynamic", insist=True, gamma=gamma, depth=depth, width=width
                        ),
                        max_tokens,
                    )
                )
            found.append(Cost(draft, subject.parameters, tuple(measured)).as_json())
    report(
        {"tree": tree, "temperature": temperature, "drafts": found}, as_json, lambda: show(found)
    )


def show(found: Sequence[Mapping[str, Any]]) -> None:
    cells = []
    for told in found:
        shares = (
            f"{told['not_matrices']['median']:.0%}",
            f"{told['outside_the_model']['median']:.0%}",
        )
        sizes = (told["draft"], told["parameters"], told["levels_a_round"], told["rows"])
        cells.append(
            (
                *sizes,
                f"{told['level_ms']['median']:.3f}",
                f"{told['root_ms']['median']:.3f}",
                f"{told['round_ms']['median']:.2f}",
                *shares,
            )
        )
    headings = (
        "draft",
        "parameters",
        "levels a round",
        "rows",
        "ms a level",
        "ms the root",
        "ms a round",
        "no matrix work",
        "outside the model",
    )
    print_table(headings, cells)


@dataclass(frozen=True)
class Measured:
    """One reply: seconds of its levels and roots, of the model's passes in them, and of the
    matrices of these passes alone."""

    levels_s: tuple[float, ...]
    roots_s: tuple[float, ...]
    passes_s: float
    matrices_s: float
    rows: tuple[int, ...]
    rounds: int

    @property
    def whole_s(self) -> float:
        return sum(self.levels_s) + sum(self.roots_s)


@dataclass(frozen=True)
class Cost:
    """The cost of a draft; estimates are over replies."""

    draft: str
    parameters: int
    replies: tuple[Measured, ...]

    def as_json(self) -> dict[str, Any]:
        replies = self.replies
        return {
            "draft": self.draft,
            "parameters": self.parameters,
            "levels_a_round": sum(len(r.levels_s) for r in replies)
            / sum(r.rounds for r in replies),
            "rows": sum(sum(r.rows) for r in replies) / sum(len(r.rows) for r in replies),
            "level_ms": _over(
                replies, lambda r: 1e3 * sum(r.levels_s) / max(1, len(r.levels_s))
            ).as_json(),
            "root_ms": _over(replies, lambda r: 1e3 * sum(r.roots_s) / r.rounds).as_json(),
            "round_ms": _over(replies, lambda r: 1e3 * r.whole_s / r.rounds).as_json(),
            "not_matrices": _over(replies, lambda r: 1 - r.matrices_s / r.whole_s).as_json(),
            "outside_the_model": _over(replies, lambda r: 1 - r.passes_s / r.whole_s).as_json(),
        }


def _over(replies: Sequence[Measured], value: Callable[[Measured], float]) -> Estimate:
    return estimate([value(reply) for reply in replies])


class Subject:
    """A target with the draft that is looked at."""

    def __init__(self, draft: str, target: str, weights: str) -> None:
        worker, before = open_target(target), _matrices()
        self._duet = Duet(worker, open_draft(draft, target, weights=weights))
        self._matrices = [matrix for number, matrix in _matrices().items() if number not in before]
        if not self._matrices:
            raise UserError(
                f"{draft} does not compute on the C++ kernels, whose matrices are what is "
                "timed here: see `dovetail doctor`"
            )
        engine: Any = self._duet.draft._engine
        self._model: Any = getattr(engine, "head", None) or engine.model
        self._codec = TextCodec(self._duet.tokenizer, self._duet.vocabulary)

    @property
    def parameters(self) -> int:
        """Numbers in the matrices that a pass multiplies with, the output head among them."""
        return sum(matrix.n * matrix.k for matrix in self._matrices)

    def tokens(self, turn: str, max_tokens: int) -> tuple[int, ...]:
        """A prompt, cut to leave room for the reply."""
        return self._codec.encode_turns([turn])[: self._duet.context - max_tokens]

    def measure(
        self,
        prompt: Sequence[int],
        key: bytes,
        sampling: Sampling,
        tree: TreeSettings,
        max_tokens: int,
    ) -> Measured:
        """Decode a reply, then time the matrices of its passes."""
        with self._watched() as passes:
            reply = self._duet.decode(
                prompt, key=key, sampling=sampling, tree=tree, max_tokens=max_tokens
            )
        rows = [count for count, _ in passes]
        price = {count: self._multiplied(count) for count in set(rows)}
        return Measured(
            levels_s=_seconds(reply, "level"),
            roots_s=_seconds(reply, "root"),
            passes_s=sum(seconds for _, seconds in passes),
            matrices_s=sum(price[count] for count in rows),
            rows=tuple(rows),
            rounds=reply.rounds,
        )

    @contextmanager
    def _watched(self) -> Iterator[list[tuple[int, float]]]:
        """(rows, seconds) of every pass of the model for a proposal within the block."""
        passes: list[tuple[int, float]] = []
        model, worker, drafting = self._model, cast(Any, self._duet.draft), False
        forward, handle = model.forward, worker.handle

        def watched_handle(command: Any) -> Any:
            nonlocal drafting
            drafting = isinstance(command, Draft)
            return handle(command)

        def watched_forward(tokens: Any, *arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            said = forward(tokens, *arguments, **named)
            if drafting:
                passes.append((len(tokens), time.perf_counter() - began))
            return said

        model.forward, worker.handle = watched_forward, watched_handle
        try:
            yield passes
        finally:
            del model.forward, worker.handle

    def _multiplied(self, rows: int) -> float:
        """Seconds of the products of all matrices with so many rows."""
        inputs = {matrix.k: torch.randn(rows, matrix.k) for matrix in self._matrices}
        taken = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            for matrix in self._matrices:
                matrix.linear(inputs[matrix.k])
            taken.append(time.perf_counter() - began)
        return sorted(taken)[REPEATS // 2]


def _seconds(reply: Reply, name: str) -> tuple[float, ...]:
    return tuple(duration / 1e9 for span, _, duration in reply.spans if span == name)


def _matrices() -> dict[int, PackedMatrix]:
    """All packed matrices of this process."""
    return {id(thing): thing for thing in gc.get_objects() if type(thing) is PackedMatrix}
