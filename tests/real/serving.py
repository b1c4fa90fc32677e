"""Rates over HTTP with one and several users, at several samplings and lengths of prompts."""

import itertools
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from dovetail.launch.bench.load.measured import LoadRun, run
from dovetail.launch.bench.load.served import PLAIN_PATH, Reply, ask
from dovetail.launch.chat.web import WebServer
from dovetail.launch.console.terminal import print_table
from real.servers import PATIENCE_S, own_places, served

SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "T 0": {"temperature": 0},
    "T 1": {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0},
    "T 0.8 top-p 0.9": {"temperature": 0.8, "top_p": 0.9, "top_k": 0, "min_p": 0},
    "T 0.8 top-k 40": {"temperature": 0.8, "top_p": 1, "top_k": 40, "min_p": 0},
    "T 0.8 min-p 0.05": {"temperature": 0.8, "top_p": 1, "top_k": 0, "min_p": 0.05},
    "T 0 penalties": {"temperature": 0, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "T 0 logprobs 5": {"temperature": 0, "logprobs": 5},
}
TEXTS = "".join(
    path.read_text(encoding="utf-8")
    for path in sorted(Path(__file__).resolve().parents[2].glob("*/README.md"))
)
ROOM = 8192
"""Tokens of context of a request; of all requests together twice as many."""


def prompts(tokens: int) -> Iterator[str]:
    """Yield prompts of about `tokens` tokens of four letters, each with a different beginning."""
    letters = 4 * tokens
    for number in itertools.count():
        begin = number * 1009 % (len(TEXTS) - letters)
        yield TEXTS[begin : begin + letters]


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--llama-server", "peer", help="A llama-server to measure in alternation.")
@click.option("--tokens", default=96, show_default=True, help="Tokens of a reply.")
@click.option("--rounds", default=3, show_default=True, help="Replies of each user.")
@click.option("--users", default="1,4,8", show_default=True, help="Users at a time.")
@click.option("--depths", default="100,1000,3000,6000", show_default=True, help="Empty: none.")
@click.argument("more", nargs=-1)
def serve(
    file: Path,
    peer: str | None,
    tokens: int,
    rounds: int,
    users: str,
    depths: str,
    more: tuple[str, ...],
) -> None:
    """Measure tokens/s of completions with FILE for several users, and of one user by the length
    of the prompt.

    Each round asks for one reply of each user at each sampling, the servers in turns. A rate counts
    the tokens of all replies over the time from the first request to the end of the last; printed
    are the median of the rounds and, in brackets, the median of its ratio to the rate at
    temperature 0 in the same round. For each length of prompt (--depths, in tokens, about): the
    median seconds to the first token, and tokens/s behind it. MORE are further options of `dovetail
    serve`, behind `--`.
    """
    ours = [sys.executable, "-P", "-m", "dovetail.launch.cli", "serve", str(file)]
    crowds = [int(count) for count in users.split(",")]
    services = {"dovetail": ([*ours, "--target.context", str(ROOM), *more], "--http.port")}
    if peer:
        theirs = [peer, "-m", str(file), "-np", str(max(crowds)), "-c", str(2 * ROOM), "-kvu"]
        services["llama-server"] = ([*theirs, "--host", "127.0.0.1"], "--port")
    with ExitStack() as opened:
        given = own_places(opened.enter_context(tempfile.TemporaryDirectory()))
        sites = {
            name: WebServer(
                opened.enter_context(served(*service, given))[1], "", silence_s=PATIENCE_S
            )
            for name, service in services.items()
        }
        texts = prompts(30)

        def load(
            site: WebServer, text: Iterator[str], users: int, count: int, body: Any
        ) -> LoadRun:
            """Send completions of different prompts, `users` at a time."""
            bodies = [
                {"prompt": next(text), "max_tokens": tokens, "ignore_eos": True, **body}
                for _ in range(count)
            ]
            found = run(
                lambda n: ask(site, bodies[n], n, path=PLAIN_PATH), count, users, lambda: None
            )
            if failed := next((reply for reply in found.replies if reply.error), None):
                raise click.ClickException(f"{site.url}: {failed.error}: {failed.words}")
            return found

        for site in sites.values():
            load(site, texts, 1, 1, SAMPLINGS["T 0"])
        rates: dict[tuple[str, int, str], list[float]] = defaultdict(list)
        for _, crowd, (sampling, body), (name, site) in itertools.product(
            range(rounds), crowds, SAMPLINGS.items(), sites.items()
        ):
            found = load(site, texts, crowd, crowd, body)
            written = sum(reply.output_tokens for reply in found.replies)
            rates[name, crowd, sampling].append(written / found.seconds)
        print_table(
            ["service", "users", *SAMPLINGS],
            [
                [name, str(crowd), *(_of(rates, name, crowd, sampling) for sampling in SAMPLINGS)]
                for crowd, name in itertools.product(crowds, sites)
            ],
        )
        if not depths:
            return
        rows = []
        for depth, (name, site) in itertools.product(depths.split(","), sites.items()):
            replies = load(site, prompts(int(depth)), 1, rounds, SAMPLINGS["T 0"]).replies
            rows.append([name, *_by_depth(replies)])
        print_table(["service", "prompt, tokens", "to the first, s", "tokens/s"], rows)


def _of(
    rates: Mapping[tuple[str, int, str], Sequence[float]], name: str, users: int, sampling: str
) -> str:
    """Return the median of rates, and that of their shares of the rates at temperature 0."""
    found, plain = rates[name, users, sampling], rates[name, users, "T 0"]
    share = statistics.median(rate / one for rate, one in zip(found, plain, strict=True))
    return f"{statistics.median(found):.0f} ({share:.2f})"


def _by_depth(replies: tuple[Reply, ...]) -> list[str]:
    """Return the tokens of the prompt, the seconds to the first token, and the rate behind it."""
    first = statistics.median(reply.ttft_s or 0.0 for reply in replies)
    rate = statistics.median(1.0 / (reply.tpot_s or float("inf")) for reply in replies)
    return [f"{replies[0].prompt_tokens:,}", f"{first:.2f}", f"{rate:.0f}"]
