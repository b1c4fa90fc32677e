"""The command `parallel`: several requests at once, of `dovetail serve` and of llama-server, with
the same GGUF files on the same cores, over HTTP.

Both servers stand side by side and take turns, load by load: ours, without its draft and with it,
and llama-server. Neither keeps anything of prompts that it has read.
"""

import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks.coupling import PROMPTS
from benchmarks.measure import Estimate, ratio
from benchmarks.options import Command, Numbers, option, options, pin, report
from benchmarks.same_file import write_pair
from dovetail.launch.bench.load.crew import Load
from dovetail.launch.bench.load.figures import row
from dovetail.launch.bench.load.measured import Plan, measure
from dovetail.launch.bench.load.served import (
    DRAFTED,
    OTHER,
    PLAIN,
    SILENCE_S,
    Served,
    served,
)
from dovetail.launch.bench.methods import read_prompt_set
from dovetail.launch.bench.turns import rotated
from dovetail.launch.chat.web import Site
from dovetail.launch.console.terminal import note, print_table
from dovetail.launch.settings.configure import configure
from dovetail.protocol.errors import DovetailError, UserError

CONTEXT = 512
"""Tokens of a request, prompt and reply, for which llama-server is given room."""
START_S = 120.0
TIMES = ("median_ttft_ms", "median_itl_ms", "p99_itl_ms")
Loads = dict[tuple[str, int], list[Load]]


@click.command(cls=Command)
@option(
    "--llama-server",
    "program",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="The program; build-llama makes it.",
)
@option(
    "--llama-flag", "flags", multiple=True, help="A further word for llama-server, such as -fa=off."
)
@option("--streams", type=Numbers(), default="1,2,4,8,16", help="Requests at once.")
@option("--kind", default="Q4_0", help="Type of both files: F16, Q8_0 or Q4_0.")
@option("--inflate", default="3GiB", help="fp32 size of the target.")
@option("--requests", type=click.IntRange(min=1), default=12, help="Requests of a load, at least.")
@option("--max-tokens", type=click.IntRange(min=2), default=40, help="Tokens of every reply.")
@option("--repeat", type=click.IntRange(min=1), default=3, help="Turns at a load.")
@options("json")
def parallel(
    program: Path,
    flags: Sequence[str],
    streams: Sequence[int],
    kind: str,
    inflate: str,
    requests: int,
    max_tokens: int,
    repeat: int,
    as_json: bool,
) -> None:
    """Requests at once: tokens a second of `dovetail serve` over those of llama-server with the
    same files. Exit code 1 if llama-server is ahead at any load."""
    pin(2)
    prompts = read_prompt_set(PROMPTS, None)
    plan = Plan(
        turns=tuple(prompt.turns[0] for prompt in prompts.prompts),
        prompts=prompts.name,
        levels=(),
        requests=requests,
        repeat=1,
        max_tokens=max_tokens,
        temperature=0.0,
        seed=0,
    )
    found: Loads = {}
    with tempfile.TemporaryDirectory() as scratch:
        target, draft = write_pair(Path(scratch), inflate, kind)
        models = {"target.model": str(target), "draft.model": str(draft)}
        settings = configure(flags=models, environment={})
        most = max(streams)
        with served(settings, None) as ours, llama(program, target, most, flags) as theirs:
            for place, level in enumerate(streams):
                for turn in range(repeat):
                    for server in rotated((ours, theirs), place + turn):
                        run(server, replace(plan, levels=(level,)), found)
                note(f"{level} at once: {over_theirs(found, level, DRAFTED)}")
    rows = [row(method, level, loads) for (method, level), loads in found.items()]
    over = {level: over_theirs(found, level, DRAFTED) for level in streams}
    told = {level: estimate.as_json() for level, estimate in over.items()}
    result = {"kind": kind, "inflate": inflate, "rows": rows, "over_llama_server": told}
    report(result, as_json, lambda: show(rows, found))
    raise SystemExit(0 if all(estimate.median > 1.0 for estimate in over.values()) else 1)


def run(server: Served, plan: Plan, found: Loads) -> None:
    """Add a load with each method of a server. `UserError` if a request fails, since the seconds of
    a load would then be those of fewer tokens."""
    ended = measure(server, plan)
    if ended.interrupted or ended.lost:
        raise UserError(ended.lost or "interrupted")
    for key, loads in ended.loads.items():
        for reply in (reply for load in loads for reply in load.replies if reply.error):
            raise UserError(f"{server.site.url} failed a request: {reply.error}: {reply.words}")
        found.setdefault(key, []).extend(loads)


def over_theirs(found: Loads, level: int, method: str) -> Estimate:
    """Return our tokens a second with a method over those of llama-server, turn by turn."""
    ours, theirs = ([rate(load) for load in found[name, level]] for name in (method, OTHER))
    return ratio(ours, theirs)


def rate(load: Load) -> float:
    """Return output tokens a second."""
    return sum(reply.output_tokens for reply in load.replies) / load.seconds


@contextmanager
def llama(program: Path, model: Path, streams: int, flags: Sequence[str]) -> Iterator[Served]:
    """Yield a llama-server with two threads and a slot for each stream, which reads every prompt
    anew."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ["--host", "127.0.0.1", "--port", str(port), "--offline", "--no-ui", "-dev", "none"]
    slots = ["-np", str(streams), "-c", str(streams * CONTEXT), "-cram", "0"]
    how = ["-t", "2", "-tb", "2", "-fa", "on", *slots, *flags]
    with subprocess.Popen(
        [str(program), "-m", str(model), *where, *how],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            site = Site(f"http://127.0.0.1:{port}", "", silence_s=SILENCE_S)
            wait(process, site)
            yield Served(site, model.stem, (OTHER,), {"cache_prompt": False})
        finally:
            process.terminate()


def wait(process: subprocess.Popen[bytes], site: Site) -> None:
    """Wait until llama-server is ready. `UserError` if it ends, or takes too long."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise UserError(f"llama-server ended with exit code {process.returncode}")
        with suppress(DovetailError):
            site.get("/health")
            return
        time.sleep(0.1)
    raise UserError(f"llama-server was not ready after {START_S:g} s")


def show(rows: Sequence[Mapping[str, Any]], found: Loads) -> None:
    """Print a row for each load and method."""
    headings = ("at once", "server", "tokens/s", "over llama-server", "TTFT ms", "ITL ms", "p99")
    names = {PLAIN: "ours alone", DRAFTED: "ours with the draft", OTHER: "llama-server"}
    print_table(
        headings,
        [
            (
                row["max_concurrency"],
                names[row["method"]],
                f"{row['output_throughput']:.1f}",
                ""
                if row["method"] == OTHER
                else str(over_theirs(found, row["max_concurrency"], row["method"])),
                *(f"{row[name]:.1f}" for name in TIMES),
            )
            for row in rows
        ],
        keys=2,
    )
