"""The command `heterospec`: the paper's ablation (HeteroSpec, Liu et al. 2025, table 2) on this
machine, and what the policy itself costs.

`dynamic` with the same tree is the baseline; dynamic extended drafting, top-N pruning and dynamic
computational adaptation join one after the other. Real processes, methods in turns, one stack of
processes for all of them, since they differ in nothing but the tree that a request asks for. Calls
are passes of the target over trees, tokens the rows of all of them. What the policy does beside
growing as `dynamic` grows - entropy, bin, the surest path - is timed in one process and held
against the round of the real ones.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import click

from benchmarks.coupling import PROMPTS, list_keys
from benchmarks.duet import Duet, open_draft, open_target
from benchmarks.options import Command, Numbers, option, options, report
from dovetail.launch.bench.contenders import contenders
from dovetail.launch.bench.figures import baseline, row
from dovetail.launch.bench.methods import (
    NONE,
    Method,
    PromptSet,
    read_method,
    read_prompt_set,
    tree_of,
)
from dovetail.launch.bench.turns import Cell, measure
from dovetail.launch.console.terminal import print_table
from dovetail.launch.settings.configure import Configuration, configure
from dovetail.launch.settings.embedded import with_draft, with_target
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.text.tokenizer import TextCodec
from dovetail.workers.draft import DraftWorker
from dovetail.workers.speculation.growth import GrowingTree, Nodes
from dovetail.workers.speculation.heterospec import Heterospec
from dovetail.workers.speculation.proposal import Shape
from support.inflated import models_at

DYNAMIC = "dynamic"
STEPS: Mapping[str, tuple[str, ...]] = {
    "+ extended drafting": ("extend",),
    "+ top-N pruning": ("extend", "prune"),
    "+ computational adaptation": ("extend", "prune", "compute"),
}
"""Row -> tree.adapt."""
OVERHEAD_FIGURE = 0.01
"""The share of a round that the policy's own work may take."""
TIMED_PROMPTS = 4


@click.command(cls=Command)
@option(
    "--draft",
    default="small",
    help="Folder of a draft or head, or a kind that comes with the program.",
)
@option("--target", default="", help="Folder of the target.  [default: the embedded one]")
@option(
    "--inflate", default="512MiB", help="Size to which the target is inflated; empty: as it is."
)
@option(
    "--prompts",
    "files",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    default=(PROMPTS,),
    help="File of prompts; can be repeated.",
)
@option(
    "--thresholds",
    default="",
    help="File of `dovetail stratify`.  [default: that of the embedded draft]",
)
@option("--tree", type=Numbers(3), default="15,8,4", help="gamma, depth, width.")
@option("--limit", type=click.IntRange(min=1), help="Prompts taken of each file.  [default: all]")
@option("--max-tokens", type=click.IntRange(min=2), default=192, help="Tokens of a reply.")
@option(
    "--temperature",
    "temperatures",
    multiple=True,
    type=float,
    default=(0.0,),
    help="Can be repeated.",
)
@option(
    "--repeat",
    type=click.IntRange(min=1),
    default=1,
    help="Times that every prompt is decoded with every method.",
)
@option("--seed", type=click.IntRange(min=0), default=0, help="Seed of every reply.")
@options("json")
def heterospec(
    files: Sequence[Path],
    limit: int | None,
    temperatures: Sequence[float],
    repeat: int,
    seed: int,
    max_tokens: int,
    as_json: bool,
    **settings: Any,
) -> None:
    """tau, calls, verified tokens and tokens/s as its parts join, and its own share of a round."""
    base = configuration(max_tokens=max_tokens, **settings)
    methods = rows_of(base)
    sets = [read_prompt_set(path, limit) for path in files]
    with contenders([replace(read_method(base, NONE), shares="one"), *methods]) as found:
        cells = list(measure(found, sets, temperatures, repeat, seed))
        rows = [
            told(cell, cells, row(cell, baseline(cells, cell), found[cell.method.label], seed))
            for cell in cells
            if cell.method.name != NONE
        ]
    own_s = overhead_s(methods[-1].configuration, sets[0], max_tokens)
    for line in rows:
        line["overhead_share"] = own_s / line["round_s"] if line["method"] in STEPS else None
    result = {
        "tree": settings["tree"],
        "inflate": settings["inflate"],
        "overhead_us": 1e6 * own_s,
        "overhead_figure": OVERHEAD_FIGURE,
        "rows": rows,
    }
    report(result, as_json, lambda: show(result))


def configuration(
    *,
    draft: str,
    target: str,
    inflate: str,
    thresholds: str,
    tree: tuple[int, int, int],
    max_tokens: int,
    environment: Mapping[str, str] | None = None,
) -> Configuration:
    """The settings of `dynamic`, over which the parts join."""
    gamma, depth, width = tree
    shape = {
        **tree_of(DYNAMIC),
        "tree.gamma": gamma,
        "tree.depth": depth,
        "tree.width": width,
        "tree.thresholds": thresholds,
    }
    models = {
        "draft.device": "cpu",
        "draft.ahead": False,
    }
    named = read_method(configure(environment=environment or {}), draft).configuration
    chosen = {"target.model": target} if target else models_at(inflate, draft)
    both = {**models, **chosen, **shape, "sampling.max_tokens": max_tokens}
    return named.over("heterospec", both)


def rows_of(base: Configuration) -> list[Method]:
    """`dynamic`, and what joins it."""
    steps = {
        name: base.over("heterospec", {"tree.policy": "heterospec", "tree.adapt": adapt})
        for name, adapt in STEPS.items()
    }
    return [Method(name, found, shares="one") for name, found in {DYNAMIC: base, **steps}.items()]


def told(cell: Cell, cells: Sequence[Cell], measured: Mapping[str, Any]) -> dict[str, Any]:
    """A row, with what it has less than `dynamic` on the same prompts."""
    plain = next(
        c
        for c in cells
        if c.method.name == DYNAMIC
        and c.prompts is cell.prompts
        and c.temperature == cell.temperature
    )
    calls, tokens = measured["calls"], measured["verified_tokens"]
    return {
        **measured,
        "tokens_per_call": tokens / calls if calls else None,
        "calls_change": calls / sum(run.finished.result.rounds for run in plain.runs) - 1,
        "tokens_change": tokens / sum(run.finished.result.verified_rows for run in plain.runs) - 1,
        "round_s": sum(run.decode_s for run in cell.runs) / calls if calls else None,
        "differences": sum(not difference.near_tie for difference in cell.differences.values()),
    }


# -- the policy's own time -------------------------------------------------------------------------


class Timed(Heterospec):
    """Takes the time of what it does beside growing."""

    def __init__(self, settings: TreeSettings) -> None:
        super().__init__(settings)
        self.own_ns = 0

    def assess(self, tree: GrowingTree, depth: int, width: int) -> None:
        start = time.thread_time_ns()
        super().assess(tree, depth, width)
        self.own_ns += time.thread_time_ns() - start

    def complete(self, best: Nodes, tree: GrowingTree, size: Shape) -> Nodes:
        start = time.thread_time_ns()
        offered = super().complete(best, tree, size)
        self.own_ns += time.thread_time_ns() - start
        return offered


class Watched:
    """A draft worker whose sessions go by a `Timed` policy."""

    def __init__(self, worker: DraftWorker[Any], tree: TreeSettings) -> None:
        self._worker, self._tree = worker, tree
        self.policies: list[Timed] = []
        self.hello, self.idle = worker.hello, worker.idle

    def handle(self, command: Any) -> Any:
        events = self._worker.handle(command)
        if command.type == "open":
            self.policies.append(Timed(self._tree))
            self._worker.session(command.session).policy = self.policies[-1]
        return events


def overhead_s(configuration: Configuration, prompts: PromptSet, max_tokens: int) -> float:
    """Seconds of a round that the policy itself takes, in one process without inflation: the policy
    does the same whatever the target costs."""
    settings = configuration.settings
    target, draft = with_target(settings.target).model, with_draft(settings.draft).model
    watched = Watched(open_draft(draft, target), settings.tree)
    duet = Duet(open_target(target), watched)  # type: ignore[arg-type]
    codec, rounds, keys = TextCodec(duet.tokenizer, duet.vocabulary), 0, count()
    for prompt in prompts.prompts[:TIMED_PROMPTS]:
        tokens = codec.encode_turns(prompt.turns[:1])[: duet.context - max_tokens]
        (key,) = list_keys(f"{prompt.id} {next(keys)}", 1)
        rounds += duet.decode(
            tokens, key=key, sampling=Sampling(), tree=settings.tree, max_tokens=max_tokens
        ).rounds
    return sum(policy.own_ns for policy in watched.policies) / 1e9 / max(1, rounds)


# -- what is shown ---------------------------------------------------------------------------------


def show(result: Mapping[str, Any]) -> None:
    headings = (
        "prompts",
        "T",
        "method",
        "tokens/s",
        "speed-up",
        "tau",
        "calls",
        "",
        "tokens",
        "",
        "tokens/call",
        "own share",
    )
    print_table(headings, [_cells(line) for line in result["rows"]])
    if wrong := sum(line["differences"] for line in result["rows"]):
        click.echo(f"{wrong} replies differ from those of the target alone")
    click.echo(
        f"the policy itself: {result['overhead_us']:.0f} us a round; figure: at most "
        f"{OVERHEAD_FIGURE:.0%} of it"
    )


def _cells(line: Mapping[str, Any]) -> tuple[object, ...]:
    changes = tuple(
        "" if line["method"] == DYNAMIC else f"{line[name]:+.1%}"
        for name in ("calls_change", "tokens_change")
    )
    share = "" if line["overhead_share"] is None else f"{line['overhead_share']:.2%}"
    where = (
        line["prompts"],
        line["temperature"],
        line["method"],
        line["tokens_per_s"],
        line["speedup"],
        line["tau"],
    )
    return (
        *where,
        line["calls"],
        changes[0],
        line["verified_tokens"],
        changes[1],
        line["tokens_per_call"],
        share,
    )
