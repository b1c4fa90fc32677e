"""The command `beginnings`: requests at once whose prompts begin alike and end in a few tokens of
their own, with that beginning shared and not, over HTTP.

A real `dovetail serve` with copies of the embedded pair that have a longer context, in turn with
`--coordinator.reuse true` and `false`. The times to the first token are compared.
"""

import concurrent.futures
import time
from collections.abc import Sequence
from typing import Any

import click
import httpx
import numpy as np

from benchmarks.gaps import PATIENCE_S, order, server, words
from benchmarks.options import Command, option, options, report
from dovetail.launch.console.terminal import print_table, progress_bar

OWN = 8
"""Tokens of each request behind the beginning that all have in common."""


@click.command(cls=Command)
@option("--prompt", "tokens", type=click.IntRange(min=1), default=1500, help="Tokens shared.")
@option("--requests", type=click.IntRange(min=1), default=8, help="Requests at once.")
@option("--pairs", type=click.IntRange(min=1), default=3, help="Runs of each, in turn.")
@option("--inflate", default="256MiB", help="Size to which the target is inflated.")
@option(
    "--draft", default="dovetail", help="Draft of the embedded pair: small, dovetail, eagle, none."
)
@options("json")
def beginnings(
    tokens: int, requests: int, pairs: int, inflate: str, draft: str, as_json: bool
) -> None:
    """Time to first token of requests at once that begin alike, with that beginning shared and
    not."""
    found: dict[str, list[dict[str, float]]] = {"shared": [], "not": []}
    with progress_bar(2 * pairs, "runs") as step:
        for pair in range(pairs):
            for name, reuse in (("not", "false"), ("shared", "true")):
                with server(draft, [f"--coordinator.reuse={reuse}"], inflate) as url:
                    found[name].append(run(url, tokens, requests, seed=pair))
                step("")
    whole = {name: medians(runs) for name, runs in found.items()}
    report(whole, as_json, lambda: show(whole, tokens, requests))


def run(url: str, tokens: int, requests: int, *, seed: int) -> Any:
    """Return the seconds to the first token, median and last of the requests, and the seconds until
    all are answered."""
    begins = words(tokens, seed)
    prompts = [[*begins, *words(OWN, 100 + number)] for number in range(requests)]
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
        client.post("/v1/completions", json=order(words(8, 7), 16)).raise_for_status()
        began_s = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(requests) as pool:
            first = [told - began_s for told in pool.map(lambda p: first_s(client, p), prompts)]
        whole_s = time.monotonic() - began_s
    return {"median_s": float(np.median(first)), "last_s": max(first), "whole_s": whole_s}


def first_s(client: httpx.Client, prompt: Sequence[int]) -> float:
    """Return the time of a request's first token; the reply is read to its end."""
    told_s = 0.0
    body = {**order(prompt, 16), "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            raise click.ClickException(reply.read().decode())
        for line in reply.iter_lines():
            if line.startswith("data: {") and not told_s:
                told_s = time.monotonic()
    return told_s


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.median([one[name] for one in runs])) for name in runs[0]}


def show(found: dict[str, dict[str, float]], tokens: int, requests: int) -> None:
    rows = [
        (name, *(f"{found[name][key]:.2f}" for key in ("median_s", "last_s", "whole_s")))
        for name in found
    ]
    heading = f"{tokens} tokens, {requests} requests"
    print_table((heading, "first token, median s", "last s", "all answered s"), rows)
