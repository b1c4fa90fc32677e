"""The command `turns`: how long the second turn of a conversation takes to its first token, beside
the first one.

Real processes, a client of the coordinator. Every conversation is new to them: tokens drawn at
random as the first turn, the reply, and a second turn behind both, which target and draft should
have to read only what is new of. The embedded pair holds 512 tokens, so for longer histories there
is a random one.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.checkpoints import TYPES, write_model
from benchmarks.figures import SECOND_TURN
from benchmarks.measure import estimate
from benchmarks.models import SHAPES, VOCABULARY, model_folder
from benchmarks.options import Command, holds, option, options, report, verdict
from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.launch.processes.stack import start_stack, wait_until_ready
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import configure
from dovetail.protocol.messages import Result
from dovetail.protocol.settings import TreeSettings
from dovetail.runtime.client import Client
from support.inflated import inflated

REPLY, NEW = 32, 12
"""Tokens of the first reply and of the second turn."""
TREE = TreeSettings(policy="dynamic", insist=True, gamma=15, depth=8, width=4)
"""Drafts in every round, so that a draft's rows are as many as they are where drafting pays."""


@click.command(cls=Command)
@option(
    "--history",
    type=click.IntRange(min=64),
    default=384,
    help="Tokens of the first turn and its reply.",
)
@option(
    "--random",
    "drawn",
    is_flag=True,
    help="A random target and draft of 4,096 tokens instead of the embedded pair, of 512.",
)
@option(
    "--draft",
    default="small",
    help="Draft of the embedded pair: small, dovetail, eagle, ngram or none.",
)
@option("--inflate", default="", help="Size to which the target is inflated.")
@option("--pairs", type=click.IntRange(min=2), default=21, help="Conversations.")
@options("models", "json")
def turns(
    history: int,
    drawn: bool,
    draft: str,
    inflate: str,
    pairs: int,
    models: Path | None,
    as_json: bool,
) -> None:
    """Time to the first token of a conversation's second turn, over that of its first."""
    with (
        pair_of(drawn, draft, inflate, models) as client,
        progress_bar(pairs, "conversations") as step,
    ):
        found = [converse(client, history, seed, step) for seed in range(pairs + 1)][
            1:
        ]  # the first one warms up
    ratio = estimate(
        [pair.second.time_to_first_token_s / pair.first.time_to_first_token_s for pair in found]
    )
    row = {
        "history": history,
        "first_ms": 1e3 * sum(pair.first.time_to_first_token_s for pair in found) / len(found),
        "second_ms": 1e3 * sum(pair.second.time_to_first_token_s for pair in found) / len(found),
        "reused": sum(pair.second.reused_tokens for pair in found) / len(found),
        "ratio": {**ratio.as_json(), "holds": holds(ratio, SECOND_TURN)},
    }
    cells = (
        history,
        f"{row['first_ms']:.1f}",
        f"{row['second_ms']:.1f}",
        f"{row['reused']:.0f}",
        str(ratio),
        *verdict(ratio, SECOND_TURN),
    )
    titles = (
        "history",
        "first ms",
        "second ms",
        "reused tokens",
        "second / first (95 %)",
        "figure",
        "holds",
    )
    report(row, as_json, lambda: print_table(titles, [cells]))


@dataclass(frozen=True)
class Pair:
    """The two replies of a conversation."""

    first: Result
    second: Result


@contextmanager
def pair_of(drawn: bool, draft: str, inflate: str, models: Path | None) -> Iterator[Client]:
    """A client of a running target and draft."""
    with model_folder(models) as folder, Supervisor() as supervisor:
        flags = {"draft.device": "cpu"}
        if drawn:
            shape = SHAPES["small"]
            target, small = (
                write_model(folder / name, shape, TYPES["fp32"], seed=seed)
                for seed, name in enumerate(("target", "draft"))
            )
            flags |= {"target.model": str(target), "draft.model": str(small)}
        else:
            flags |= inflated(inflate, draft) if inflate else {"draft.kind": draft}
        stack = start_stack(supervisor, configure(flags=flags, environment={}))
        wait_until_ready(supervisor, stack)
        with stack.connect() as client:
            yield client


def converse(client: Client, history: int, seed: int, step: Callable[[str], None]) -> Pair:
    """Two turns of tokens that nobody has seen before."""
    drawn = random.Random(seed)
    tokens = [drawn.randrange(2, VOCABULARY) for _ in range(history - REPLY)]
    first = _complete(client, tokens)
    second = _complete(
        client, [*tokens, *first.token_ids, *(drawn.randrange(2, VOCABULARY) for _ in range(NEW))]
    )
    step("")
    return Pair(first, second)


def _complete(client: Client, tokens: Sequence[int]) -> Result:
    return client.complete(
        client.submit(tokens=tokens, max_tokens=REPLY, seed=0, end=(), tree=TREE)
    ).result
