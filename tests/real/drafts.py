"""Rates of chats with a draft head, the look-up, plain decoding and llama-server."""

import itertools
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import click

from dovetail.launch.bench.load.served import ask
from dovetail.launch.chat.web import WebServer
from dovetail.launch.console.terminal import print_table
from real.servers import PATIENCE_S, own_places, served

LOOK_UPS = ("none", "ngram-simple", "ngram-mod")
"""The values of llama-server's --spec-type that need no second model."""


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument(
    "prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    nargs=-1,
    required=True,
)
@click.option("--draft", "drafts", multiple=True, default=("none", "ngram", "auto"))
@click.option("--llama-server", "peer", help="A llama-server to measure in alternation.")
@click.option("--tokens", default=96, show_default=True, help="Tokens of a reply.")
@click.option("--limit", default=2, show_default=True, help="Prompts of each file.")
@click.option("--temperatures", default="0,1", show_default=True)
def drafts(
    file: Path,
    prompts: tuple[Path, ...],
    drafts: tuple[str, ...],
    peer: str | None,
    tokens: int,
    limit: int,
    temperatures: str,
) -> None:
    """Measure tokens/s of chats with FILE, one user, with each draft and with llama-server.

    PROMPTS are JSON lines with `turns`, of which the first is sent. Every prompt is sent to each
    service in turn, at each temperature; llama-server runs alone and with each of its look-ups. A
    rate is all tokens of a reply over the time since the request. The output has the median of each
    file's prompts, the median of the files, and its ratio to the first draft's.
    """
    ours = [sys.executable, "-P", "-m", "dovetail.launch.cli", "serve", str(file)]
    services = {draft: ([*ours, "--draft", draft], "--http.port") for draft in drafts}
    if peer:
        theirs = [peer, "-m", str(file), "-np", "1", "-c", "4096", "--host", "127.0.0.1"]
        services |= {
            f"llama-server {name}": ([*theirs, "--spec-type", name], "--port") for name in LOOK_UPS
        }
    chats = {
        path.stem: [json.loads(line)["turns"][0] for line in path.read_text("utf-8").splitlines()]
        for path in prompts
    }
    rates: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    texts: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    with ExitStack() as opened:
        sites = {}
        for name, service in services.items():
            given = own_places(opened.enter_context(tempfile.TemporaryDirectory()))
            address = opened.enter_context(served(*service, given))[1]
            sites[name] = WebServer(address, "", silence_s=PATIENCE_S)
        for (kind, chat), temperature in itertools.product(
            ((kind, chat) for kind, some in chats.items() for chat in some[:limit]),
            temperatures.split(","),
        ):
            for number, (name, site) in enumerate(sites.items()):
                body = {
                    "messages": [{"role": "user", "content": chat}],
                    "max_tokens": tokens,
                    "temperature": float(temperature),
                    "seed": 0,
                }
                reply = ask(site, body, number)
                if reply.error:
                    raise click.ClickException(f"{name}: {reply.error}: {reply.words}")
                rates[name, kind, temperature].append(reply.output_tokens / reply.latency_s)
                if name in drafts:
                    texts[kind, chat, temperature].add(reply.text)
    for temperature in temperatures.split(","):
        click.echo(f"temperature {temperature}, tokens/s")
        found = {
            (name, kind): statistics.median(rates[name, kind, temperature])
            for name, kind in itertools.product(sites, chats)
        }
        print_table(["service", *chats, "median", "ratio"], _lines(found, [*sites], [*chats]))
    differ = sum(len(found) > 1 for found in texts.values())
    click.echo(f"{differ} of {len(texts)} replies differ between drafts")


def _lines(
    found: Mapping[tuple[str, str], float], names: Sequence[str], kinds: Sequence[str]
) -> list[list[str]]:
    """Return the lines of a table: tokens/s by service and kind of prompt, the median of all kinds,
    and its ratio to the first service's."""
    whole = {name: statistics.median(found[name, kind] for kind in kinds) for name in names}
    return [
        [
            name,
            *(f"{found[name, kind]:.0f}" for kind in kinds),
            f"{whole[name]:.0f}",
            f"{whole[name] / whole[names[0]]:.2f}",
        ]
        for name in names
    ]
