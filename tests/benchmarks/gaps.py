"""The command `gaps`: how long a stream pauses between two tokens while a long prompt of another
client is prefilled, compared with its pauses without one, over HTTP.

A real `dovetail serve` with copies of the embedded pair that have a longer context. One client
streams a reply, and meanwhile another one sends a prompt of random tokens, which no prefix cache
has, and asks for one token. Pauses of the stream while such a prompt runs are compared with those
before and after it, and the prompt with one that is read while nobody streams, in turns. Streams
answer real prompts, are short and have no end token within, since a pause is told by text: what a
model says beyond its own context has many tokens that are no whole characters.
"""

import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import click
import httpx
import numpy as np

from benchmarks.coupling import PROMPTS
from benchmarks.measure import Estimate, ratio
from benchmarks.options import Command, option, options, report
from dovetail.launch.bench.methods import read_prompt_set
from dovetail.launch.console.terminal import print_table, progress_bar
from support.inflated import kept_pair

CONTEXT = 16384
WORDS = 4000
"""Tokens of the demonstration vocabulary that prompts are drawn from."""
MOST_SHARE = 3.0
"""The figure: the 99th percentile of the pauses beside a prompt over that without one."""
MOST_LONGER = 1.05
"""The figure: the seconds of a prompt beside streams over those of one with nobody else running."""
LEAST_S = 1.0
"""The least seconds that streams are watched by themselves before each prompt, and behind it."""
PATIENCE_S = 600.0


@click.command(cls=Command)
@option("--prompt", "tokens", type=click.IntRange(min=1), default=2000, help="Tokens of a prompt.")
@option("--prompts", type=click.IntRange(min=1), default=5, help="Prompts, one after the other.")
@option("--streams", type=click.IntRange(min=1), default=1, help="Streams beside the prompts.")
@option("--inflate", default="256MiB", help="Size to which the target is inflated.")
@option("--weights", default="fp32", help="Type of its weights.")
@option(
    "--draft", default="small", help="Draft of the embedded pair: small, dovetail, eagle, none."
)
@option("--serve", "flags", multiple=True, help="A further option of `dovetail serve`.")
@options("json")
def gaps(
    tokens: int,
    prompts: int,
    streams: int,
    inflate: str,
    weights: str,
    draft: str,
    flags: Sequence[str],
    as_json: bool,
) -> None:
    """Pauses of a stream while prompts are prefilled, over those without, and how much longer the
    prompts take."""
    chosen = [f"--target.weights={weights}", *flags]
    alone, beside = list[float](), list[float]()
    texts = [prompt.turns[0] for prompt in read_prompt_set(PROMPTS, None).prompts]
    quiet_s, busy_s = list[float](), list[float]()
    with (
        server(draft, chosen, inflate) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client,
        progress_bar(prompts, "prompts") as step,
    ):
        prompt_s(client, tokens, seed=1)  # warms up
        for seed in range(prompts):
            if seed % 2 == 0:
                quiet_s.append(prompt_s(client, tokens, seed=1000 + seed))
            asked = [texts[(streams * seed + n) % len(texts)] for n in range(streams)]
            began_s, ended_s, pauses = beside_streams(
                [Watched(url, text) for text in asked],
                lambda seed=seed: prompt_s(client, tokens, seed=2000 + seed),
            )
            if seed % 2:
                quiet_s.append(prompt_s(client, tokens, seed=1000 + seed))
            busy_s.append(ended_s - began_s)
            for before_s, after_s in pauses:
                during = before_s < ended_s and after_s > began_s
                (beside if during else alone).append(after_s - before_s)
            step("")
    longer_by = ratio(busy_s, quiet_s)
    found = {
        "alone": figures(alone),
        "beside": figures(beside),
        "share": percentile(beside, 99) / percentile(alone, 99),
        "prompt_s": {"quiet": median(quiet_s), "beside": median(busy_s)},
        "prompt_longer_by": longer_by.as_json(),
    }
    report(found, as_json, lambda: show(found, tokens, longer_by))


def beside_streams(
    watched: Sequence["Watched"], read: Callable[[], object]
) -> tuple[float, float, list[tuple[float, float]]]:
    """Have a prompt read while streams run, which then end. Return when that began and ended, and
    the pauses of all streams: from when to when."""
    watch(watched, LEAST_S)
    began_s = time.monotonic()
    read()
    ended_s = time.monotonic()
    watch(watched, LEAST_S)
    for stream in watched:
        stream.end()
    return began_s, ended_s, [pause for stream in watched for pause in pairwise(stream.told_s)]


class Watched:
    """A streamed reply, and the times of its chunks on the clock of this process."""

    def __init__(self, url: str, prompt: str) -> None:
        self.told_s: list[float] = []
        self._url, self._prompt = url, prompt
        self._ended, self._fault = False, "it ended"
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self._begun.wait(PATIENCE_S)

    def _read(self) -> None:
        body = {**order(self._prompt, CONTEXT // 2), "stream": True}
        try:
            with httpx.stream(
                "POST",
                f"{self._url}/v1/completions",
                json=body,
                timeout=PATIENCE_S,
                trust_env=False,
            ) as reply:
                for line in reply.iter_lines():
                    if self._ended:
                        return
                    if not line.startswith("data: {"):
                        continue
                    if (error := json.loads(line[6:]).get("error")) is not None:
                        self._fault = str(error)
                        return
                    self.told_s.append(time.monotonic())
                    self._begun.set()
        finally:
            self._begun.set()

    def check(self) -> None:
        """`ClickException` if the reply is over."""
        if not self._thread.is_alive():
            raise click.ClickException(f"a stream did not last: {self._fault}")

    def end(self) -> None:
        self.check()
        self._ended = True
        self._thread.join()


def watch(streams: Sequence[Watched], seconds: float) -> None:
    """Let the streams run by themselves for so long."""
    time.sleep(seconds)
    for stream in streams:
        stream.check()


@contextmanager
def server(draft: str, flags: Sequence[str], inflate: str) -> Iterator[str]:
    """Yield the URL of a `dovetail serve` of the pair at a size with a longer context."""
    pair = kept_pair(inflate)
    with tempfile.TemporaryDirectory() as folder:
        models = [f"--target.model={longer(pair / 'target', Path(folder) / 'target')}"]
        if draft == "small":
            models.append(f"--draft.model={longer(pair / 'draft', Path(folder) / 'draft')}")
        elif draft == "none":
            models.append("--draft.kind=none")
        else:
            models.append(f"--draft.model={pair / 'heads' / draft}")
        command = [sys.executable, "-P", "-m", "dovetail.launch.cli", "serve", "--http.port=0"]
        with subprocess.Popen(
            [*command, *models, *flags], stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                yield next(
                    word.rstrip(".,;")
                    for line in process.stdout
                    for word in line.split()
                    if word.startswith("http://")
                )
            finally:
                process.terminate()


def longer(model: Path, copy: Path) -> Path:
    """Return a copy of a model with a context of `CONTEXT` tokens; its text beyond its own context
    is nonsense."""
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    return copy


def words(count: int, seed: int) -> list[int]:
    """Return random tokens, which no prefix cache has."""
    drawn = random.Random(seed)
    return [drawn.randrange(2, WORDS) for _ in range(count)]


def order(prompt: str | Sequence[int], tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "min_tokens": tokens}


def prompt_s(client: httpx.Client, tokens: int, *, seed: int) -> float:
    """Return the seconds until a prompt is answered with one token. The client is made before,
    since that takes time from the threads that watch streams."""
    began_s = time.monotonic()
    reply = client.post("/v1/completions", json=order(words(tokens, seed), 1))
    if reply.status_code != 200:
        raise click.ClickException(reply.text)
    return time.monotonic() - began_s


def percentile(pauses: Sequence[float], share: float) -> float:
    return float(np.percentile(pauses, share))


def figures(pauses: Sequence[float]) -> dict[str, float]:
    """Return the count of pauses, and their percentiles in ms."""
    return {
        "count": len(pauses),
        "median_ms": 1e3 * percentile(pauses, 50),
        "p99_ms": 1e3 * percentile(pauses, 99),
        "most_ms": 1e3 * max(pauses),
    }


def show(found: dict[str, Any], tokens: int, longer_by: Estimate) -> None:
    rows = [
        (name, *(f"{found[name][key]:.1f}" for key in ("median_ms", "p99_ms", "most_ms")))
        for name in ("alone", "beside")
    ]
    print_table(("stream", "median ms", "p99 ms", "longest ms"), rows)
    seconds = found["prompt_s"]
    click.echo(
        f"p99 beside a prompt of {tokens} tokens over p99 alone: {found['share']:.2f}, at most "
        f"{MOST_SHARE:g} is wanted; such a prompt takes {seconds['quiet']:.2f} s with nobody else "
        f"running, {seconds['beside']:.2f} s beside a stream: {longer_by} times as long, at most "
        f"{MOST_LONGER:g} is wanted"
    )
