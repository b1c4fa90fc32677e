"""The command `links`: what a slow or a distant line between coordinator and worker costs, and
whether the cost model knew.

Two sets of the same processes decode the same requests in turns: one with all of them on loopback,
one with the target or the draft behind a line. A line is a proxy that delays every message, each
way, or a cable to another machine - a network namespace - of a limited rate. Each set first learns
from some replies what its rounds cost. What the cost model expected of the rounds is set beside
what they brought; a reply's rate counts its rounds, not its prefill. Cables need a kernel that
permits network namespaces to this user; the command starts itself anew within one of its own.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import Estimate, ratio_of_sums
from benchmarks.options import Command, Numbers, option, options, report
from dovetail.launch.console.terminal import note, print_table, progress_bar
from dovetail.launch.files.prompts import read_prompts
from dovetail.protocol.errors import DovetailError, UserError
from dovetail.protocol.messages import Result
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.fleets import LOOPBACK, Fleet
from support.inflated import as_flags, models_at
from support.machines import isolated, network, why_not
from support.stacks import DEMO_FOLDER

ISOLATED = "DOVETAIL_LINKS_ISOLATED"
ANYWHERE = "0.0.0.0"
LEARNED = 4
"""Replies of each set that are not counted: the cost model learns from them."""
REMOTES = ("target", "draft")


@dataclass(frozen=True)
class Line:
    """The line between the coordinator and the worker of one role: a delay each way, or a rate."""

    remote: str
    delay_ms: float = 0.0
    mbit: float = 0.0

    def __str__(self) -> str:
        return f"{self.mbit:g} Mbit/s" if self.mbit else f"{self.delay_ms:g} ms each way"


@dataclass(frozen=True)
class Side:
    """Replies of one set of processes."""

    results: Sequence[Result]

    @property
    def sums(self) -> list[tuple[float, float]]:
        """(tokens, seconds) of each reply's rounds."""
        return [(result.completion_tokens - 1, _seconds(result)) for result in self.results]

    @property
    def tokens_per_s(self) -> float:
        return sum(tokens for tokens, _ in self.sums) / sum(seconds for _, seconds in self.sums)

    @property
    def forecasts(self) -> list[tuple[float, float]]:
        """(tokens, seconds) as the cost model expected them, of the replies of which it expected
        something."""
        known = [
            (result.completion_tokens - 1, result.predicted_tokens_per_s) for result in self.results
        ]
        return [(tokens, tokens / rate) for tokens, rate in known if rate]

    def as_json(self) -> dict[str, Any]:
        rounds = sum(result.rounds for result in self.results)
        return {
            "tokens_per_s": self.tokens_per_s,
            "predicted_tokens_per_s": _rate(self.forecasts),
            "tau": sum(tokens for tokens, _ in self.sums) / rounds,
            "plain_share": sum(result.plain_rounds for result in self.results) / rounds,
            "transport_ms": 1e3 * sum(result.transport_s for result in self.results) / rounds,
            "bytes_per_round": sum(
                result.bytes_per_round * result.rounds for result in self.results
            )
            / rounds,
        }


def _seconds(result: Result) -> float:
    return result.wall_s - result.time_to_first_token_s


def _rate(sums: Sequence[tuple[float, float]]) -> float | None:
    return sum(tokens for tokens, _ in sums) / sum(seconds for _, seconds in sums) if sums else None


@click.command(cls=Command)
@option(
    "--draft", default="small", help="Draft of the embedded pair: small, dovetail, eagle or ngram."
)
@option("--inflate", default="256MiB", help="Size to which the target is inflated.")
@option("--policy", default="goodput", help="Policy of the tree.")
@option(
    "--remote",
    "remotes",
    multiple=True,
    type=click.Choice(REMOTES),
    default=REMOTES,
    help="Which worker is behind the line; can be repeated.",
)
@option(
    "--delays", type=Numbers(), default="1,5,20", help="Milliseconds, each way, through the proxy."
)
@option("--rates", type=Numbers(), default="100,1000", help="Mbit/s of cables between namespaces.")
@option("--no-cables", is_flag=True, help="Leave the cables out.")
@option(
    "--pairs", type=click.IntRange(min=2), default=12, help="Replies of each set that are counted."
)
@option("--max-tokens", type=click.IntRange(min=8), default=96, help="Tokens of a reply.")
@option(
    "--temperature",
    type=click.FloatRange(min=0.0),
    default=0.0,
    help="Temperature of the sampling.",
)
@option(
    "--prompts",
    type=click.Path(dir_okay=False, path_type=Path),
    default=DEMO_FOLDER / "prompts.jsonl",
    help="File of prompts, taken in turn.",
)
@options("json")
def links(
    draft: str,
    inflate: str,
    policy: str,
    remotes: Sequence[str],
    delays: Sequence[int],
    rates: Sequence[int],
    no_cables: bool,
    pairs: int,
    max_tokens: int,
    temperature: float,
    prompts: Path,
    as_json: bool,
) -> None:
    """Tokens/s over slow and distant lines, over those of one machine and over what the cost model
    expected."""
    skipped = None if no_cables else why_not() if ISOLATED not in os.environ else None
    if not no_cables and skipped is None and ISOLATED not in os.environ:
        command = isolated([str(Path(__file__).parent), *sys.argv[1:]])
        os.execvpe(command[0], command, {**os.environ, ISOLATED: "1"})
    if skipped is not None:
        note(f"without cables: {skipped}")
    cables = [] if no_cables or skipped is not None else rates
    lines = [
        line
        for remote in remotes
        for line in (
            *(Line(remote, delay_ms=ms) for ms in delays),
            *(Line(remote, mbit=mbit) for mbit in cables),
        )
    ]
    tree = TreeSettings(policy=policy)
    asked = Asked(
        [prompt.turns[:1] for prompt in read_prompts(prompts)],
        Sampling(temperature=temperature, min_tokens=max_tokens),
        max_tokens,
        tree,
    )
    found = []
    with progress_bar(len(lines) * (pairs + LEARNED), "pairs") as step:
        for line in lines:
            here, there = measure(line, asked, draft, inflate, pairs, step)
            found.append({"remote": line.remote, "line": str(line), **judge(here, there)})
    result = {
        "draft": draft,
        "inflate": inflate,
        "policy": policy,
        "pairs": pairs,
        "max_tokens": max_tokens,
        "skipped": skipped,
        "lines": found,
    }
    report(result, as_json, lambda: show(found))


@dataclass(frozen=True)
class Asked:
    """The requests that both sides decode."""

    prompts: Sequence[Sequence[str]]
    sampling: Sampling
    tokens: int
    tree: TreeSettings

    def complete(self, client: Client, number: int) -> Result:
        turns = self.prompts[number % len(self.prompts)]
        return client.complete(
            client.submit(
                turns=turns,
                sampling=self.sampling,
                max_tokens=self.tokens,
                seed=number,
                tree=self.tree,
            )
        ).result


def measure(
    line: Line, asked: Asked, draft: str, inflate: str, pairs: int, step: Callable[[str], None]
) -> tuple[Side, Side]:
    """Both sides in turns: on loopback, and with the line; `DovetailError` where the tokens
    differ."""
    with housed(None, draft, inflate) as here, housed(line, draft, inflate) as there:
        sides: dict[bool, list[Result]] = {False: [], True: []}
        for number in range(pairs + LEARNED):
            for remote in ((False, True), (True, False))[number % 2]:
                sides[remote].append(asked.complete(there if remote else here, number))
            if sides[False][-1].token_ids != sides[True][-1].token_ids:
                raise DovetailError(f"prompt {number} has another reply over {line}")
            step(f"{line.remote}, {line}")
    return Side(sides[False][LEARNED:]), Side(sides[True][LEARNED:])


@contextmanager
def housed(line: Line | None, draft: str, inflate: str) -> Iterator[Client]:
    """A client of a coordinator whose workers are registered."""
    with (
        network(1 if line is not None and line.mbit else 0)
        if ISOLATED in os.environ
        else _nowhere() as machines,
        Fleet(host=ANYWHERE) as fleet,
    ):
        listened = fleet.address
        for role in REMOTES:
            behind = line is not None and line.remote == role
            fleet.address = listened.replace(
                ANYWHERE, machines[0].here if behind and machines else LOOPBACK
            )
            flags = as_flags(models_at(inflate, draft))
            if role == "draft":
                flags.append("--draft.device=cpu")
            prefix = machines[0].prefix if behind and machines else []
            member = fleet.add(role, role, *flags, prefix=prefix, proxied=behind and not machines)  # type: ignore[arg-type]
            if line is not None and member.proxy is not None:
                member.proxy.delay(line.delay_ms / 1e3)
        if line is not None and machines:
            machines[0].limit(line.mbit)
        fleet.address = listened.replace(ANYWHERE, LOOPBACK)
        with fleet.client() as client:
            fleet.wait_until_ready(client)
            yield client


@contextmanager
def _nowhere() -> Iterator[list[Any]]:
    yield []


def judge(here: Side, there: Side) -> dict[str, Any]:
    """The rate over the line, over that of one machine and over the one that was predicted."""
    if not there.forecasts:
        raise UserError(
            "the cost model expected nothing of these rounds: take --policy goodput, or more "
            "--pairs"
        )
    known = [place for place, result in enumerate(there.results) if result.predicted_tokens_per_s]
    measured = [there.sums[place] for place in known]
    return {
        "local": here.as_json(),
        "remote_side": there.as_json(),
        "rate": ratio_of_sums(there.sums, here.sums).as_json(),
        "over_predicted": ratio_of_sums(measured, there.forecasts).as_json(),
    }


def show(found: Sequence[dict[str, Any]]) -> None:
    cells = []
    for told in found:
        here, there = told["local"], told["remote_side"]
        rates = (
            f"{here['tokens_per_s']:.1f}",
            f"{there['tokens_per_s']:.1f}",
            f"{there['predicted_tokens_per_s']:.1f}",
        )
        ratios = (str(Estimate(**told[name])) for name in ("rate", "over_predicted"))
        about = (
            f"{there['tau']:.2f}",
            f"{there['plain_share']:.0%}",
            f"{there['transport_ms']:.1f}",
            f"{there['bytes_per_round']:.0f}",
        )
        cells.append((told["remote"], told["line"], *rates, *ratios, *about))
    titles = (
        "remote",
        "line",
        "local tokens/s",
        "tokens/s",
        "predicted",
        "over local (95 %)",
        "over predicted (95 %)",
    )
    print_table((*titles, "tau", "plain", "transport ms a round", "bytes a round"), cells)
