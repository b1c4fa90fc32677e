"""The commands `replicas`, two services behind the router over one of them, and `ray`, a service
that Ray has placed beside one that `serve` starts itself.

Real `dovetail serve` processes of the embedded pair. A replica is bound to one core, with all of
its processes; so is the one that it is compared with.
"""

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import click

from benchmarks.coupling import PROMPTS
from benchmarks.measure import ratio, take_turns
from benchmarks.options import Command, option, options, report
from dovetail.launch.bench.load.measured import run
from dovetail.launch.bench.load.served import PATH, Reply, ask
from dovetail.launch.bench.methods import read_prompt_set
from dovetail.launch.chat.web import WebServer
from dovetail.launch.console.terminal import note, print_table
from dovetail.protocol.errors import UserError
from support.inflated import as_flags, inflated

COMMAND = (sys.executable, "-P", "-m", "dovetail.launch.cli")
MOST_ROUND, MOST_START_S = 1.02, 10.0
"""The goal: a round under Ray over one without it, and the seconds that it adds to the start."""


SETTLE_S = 1.0
"""Seconds in which a router hears that what it did not send has ended."""


@dataclass(frozen=True)
class Started:
    """A command that says its URL on stdout."""

    url: str
    pid: int
    ready_s: float
    """Seconds until it did."""


@contextmanager
def started(*arguments: str, cores: str = "") -> Iterator[Started]:
    """Run a command until it says its URL, and end it with the block."""
    bound = ["taskset", "--cpu-list", cores] if cores else []
    began_s = time.perf_counter()
    with subprocess.Popen(
        [*bound, *COMMAND, *arguments, "--http.port=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise UserError(f"{' '.join(arguments)} has not started: run it by itself")
            yield Started(url, process.pid, time.perf_counter() - began_s)
        finally:
            process.send_signal(signal.SIGINT)


def rate(
    url: str, requests: int, streams: int, tokens: int, *, whole: bool = False
) -> tuple[float, dict[int, str]]:
    """Tokens a second of chats, so many at a time, and their texts; `whole`: each reply comes in
    one piece, so that client and router take next to nothing of the cores."""
    time.sleep(SETTLE_S)
    site = WebServer(url, "")
    turns = [prompt.turns[0] for prompt in read_prompt_set(PROMPTS, None).prompts]

    def one(number: int) -> Reply:
        said = [{"role": "user", "content": turns[number % len(turns)]}]
        body = {"messages": said, "max_tokens": tokens, "min_tokens": tokens, "seed": number}
        return in_one_piece(site, body, number) if whole else ask(site, body, number)

    loaded = run(one, requests, streams, lambda: None)
    if errors := {reply.error for reply in loaded.replies if reply.error}:
        raise UserError(f"requests failed: {', '.join(errors)}")
    written = sum(reply.output_tokens for reply in loaded.replies)
    return written / loaded.seconds, {reply.number: reply.text for reply in loaded.replies}


def in_one_piece(site: WebServer, body: Mapping[str, Any], number: int) -> Reply:
    """Ask for a chat completion that is not streamed."""
    reply = Reply(number, time.perf_counter())
    with site.asked("POST", PATH, json.dumps(body).encode()) as response:
        answer = json.loads(response.read())
    reply.ended_s = time.perf_counter()
    reply.usage, reply.text = answer["usage"], answer["choices"][0]["message"]["content"]
    return reply


@click.command(cls=Command)
@option("--inflate", default="64MiB", help="Size to which the targets are inflated; 0B: not.")
@option("--draft", default="none", help="Kind of the draft.")
@option("--streams", type=click.IntRange(min=1), default=4, help="A replica, at a time.")
@option("--requests", type=click.IntRange(min=2), default=16, help="A replica, in a turn.")
@option("--max-tokens", "tokens", type=click.IntRange(min=8), default=96)
@option("--repeat", type=click.IntRange(min=1), default=5, help="Pairs of turns.")
@option("--cores", default="0,1", help="One for each of the two replicas.")
@option("--whole", is_flag=True, help="Replies in one piece instead of streams.")
@options("json")
def replicas(
    inflate: str,
    draft: str,
    streams: int,
    requests: int,
    tokens: int,
    repeat: int,
    cores: str,
    whole: bool,
    as_json: bool,
) -> None:
    """Two replicas on separate cores behind the router over one of them, each with as many
    streams: the ratio of their rates, and that of two which are asked without the router, which is
    what the machine has for two."""
    models = as_flags(inflated("" if inflate == "0B" else inflate, draft))
    with ExitStack() as opened:
        urls = [
            opened.enter_context(started("serve", *models, cores=core)).url
            for core in cores.split(",")
        ]
        flags = [f"--connect={url}" for url in urls]
        both = opened.enter_context(started("router", *flags)).url
        texts: dict[str, dict[int, str]] = {}

        def asked(url: str) -> float:
            count = len(urls) if url == both else 1
            rated, texts[url] = rate(url, requests * count, streams * count, tokens, whole=whole)
            return rated

        def direct() -> float:
            with ThreadPoolExecutor(len(urls)) as pool:
                return sum(pool.map(asked, urls))

        sides = (lambda: asked(both), direct, lambda: asked(urls[0]))
        for side in sides:
            side()
        two, beside, one = zip(*(take_turns(sides, turn) for turn in range(repeat)), strict=True)
    differ = sum(texts[both][number] != text for number, text in texts[urls[0]].items())
    row = {
        "target": inflate,
        "draft": draft,
        "whole" if whole else "streams": streams,
        "tokens/s, 1": statistics.median(one),
        "tokens/s, 2": statistics.median(two),
        "ratio": str(ratio(two, one)),
        "without the router": str(ratio(beside, one)),
        "differ": differ,
    }
    report({"replicas": [row]}, as_json, lambda: shown([row]))


@click.command(cls=Command)
@option("--inflate", default="64MiB", help="Size to which the target is inflated.")
@option("--max-tokens", "tokens", type=click.IntRange(min=8), default=128)
@option("--requests", type=click.IntRange(min=1), default=12, help="One after the other, a start.")
@option("--repeat", type=click.IntRange(min=1), default=3, help="Starts of each.")
@options("json")
def ray(inflate: str, tokens: int, requests: int, repeat: int, as_json: bool) -> None:
    """A service that Ray has placed on this machine beside one that `serve` starts itself, in turn:
    seconds until ready, and milliseconds a round."""
    flags = ["serve", *as_flags(inflated(inflate)), "--target.threads=1", "--policy=dynamic"]
    flags.append("--tree.insist=true")
    begun: dict[str, list[float]] = {"ray": [], "local": []}
    rounds: dict[str, list[float]] = {"ray": [], "local": []}
    said: dict[str, Any] = {}

    def side(engine: str) -> float:
        with started(*flags, f"--engine={engine}") as found:
            begun[engine].append(found.ready_s)
            round_s, said[engine] = rounds_of(found.url, requests, tokens)
            rounds[engine].append(round_s)
            note(f"{engine}: ready after {found.ready_s:.1f} s, {1e3 * round_s:.2f} ms a round")
        return round_s

    pairs = [take_turns((lambda: side("ray"), lambda: side("local")), n) for n in range(repeat)]
    over = ratio([with_ray for with_ray, _ in pairs], [local for _, local in pairs])
    row = {
        "ms a round, local": 1e3 * statistics.median(rounds["local"]),
        "ray": 1e3 * statistics.median(rounds["ray"]),
        "ratio": str(over),
        "ready after s, local": statistics.median(begun["local"]),
        "ready, ray": statistics.median(begun["ray"]),
        "equal": said["ray"] == said["local"],
    }
    report({"ray": [row]}, as_json, lambda: shown([row]))


def shown(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table, numbers with three digits."""
    cells = [
        [f"{cell:.3g}" if isinstance(cell, float) else cell for cell in row.values()]
        for row in rows
    ]
    print_table([*rows[0]], cells)


def rounds_of(url: str, requests: int, tokens: int) -> tuple[float, Sequence[str]]:
    """Seconds of a round, prefill left out, and the texts."""
    site = WebServer(url, "")
    turns = [prompt.turns[0] for prompt in read_prompt_set(PROMPTS, None).prompts]
    spent_s, count, texts = 0.0, 0, []
    for number in range(-2, requests):
        said = [{"role": "user", "content": turns[number % len(turns)]}]
        body = {"messages": said, "max_tokens": tokens, "min_tokens": tokens, "seed": 1}
        with site.asked("POST", PATH, json.dumps(body).encode()) as response:
            answer = json.loads(response.read())
        told = answer["metrics"]
        if number >= 0:  # before, it warms up
            spent_s += told["wall_s"] - told["time_to_first_token_s"]
            count += told["rounds"] - 1
            texts.append(answer["choices"][0]["message"]["content"])
    return spent_s / count, texts
