"""The command `masks`: what a constraint costs, and how many tokens a pass commits under one."""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import click

from dovetail.launch.console.terminal import print_table, progress_bar
from real.servers import ask, own_places, served

ANYTHING = {"regex": r"(.|\n)*"}
"""Allows every text: all tokens but special ones and those that are no UTF-8."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 40},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 5},
    },
    "required": ["name", "age", "city", "likes"],
    "additionalProperties": False,
}
QUESTION = "Describe a person: name, age, city, and five things that the person likes."


@click.command("masks")
@click.argument("file", default="")
@click.option("--tokens", default=96, show_default=True, help="Tokens of a free reply.")
@click.option("--runs", type=click.IntRange(min=1), default=8, show_default=True)
@click.argument("more", nargs=-1)
def masks(file: str, tokens: int, runs: int, more: tuple[str, ...]) -> None:
    """Measure completions with FILE (default: the embedded target) without a draft: free, and under
    a grammar that allows every text, in alternation; the difference is the cost of masks. Then
    measure tau with trees of a fixed size, free and under a JSON schema. MORE are further options
    of `dovetail serve`, behind `--`.
    """
    command = [sys.executable, "-P", "-m", "dovetail.launch.cli", "serve"]
    whole = ("--tree.policy=budget", "--tree.insist=true")  # else a draft that is too slow rests
    command += [*([file] if file else []), *whole, *more]
    costs, rows = [], []
    with (
        tempfile.TemporaryDirectory(prefix="dovetail-real-") as folder,
        served(command, "--http.port", own_places(folder)) as (_, address, _),
        progress_bar(runs, "runs") as step,
    ):

        def reply(run: int, temperature: float, **fields: Any) -> Mapping[str, Any]:
            body = {"prompt": QUESTION, "seed": run, "temperature": temperature, **fields}
            return ask(f"{address}/v1/completions", body)

        free = {"max_tokens": tokens, "min_tokens": tokens, "dovetail": {"speculate": False}}
        bound = {**free, "structured_outputs": ANYTHING}
        reply(0, 0.0, **free)
        began_s = time.monotonic()
        reply(0, 0.0, **bound)  # builds the vocabulary of grammars in each process
        first_s = time.monotonic() - began_s
        for run in range(runs):
            pair = [reply(run, 1.0, **fields) for fields in (bound, free)]
            costs.append([1e3 / one["metrics"]["tokens_per_s"] for one in pair])
            step("")
        for temperature in (0.0, 1.0):
            with_schema = {"max_tokens": 200, "structured_outputs": {"json": SCHEMA}}
            found = [
                [reply(run, temperature, **fields) for run in range(runs)]
                for fields in ({"max_tokens": tokens}, with_schema)
            ]
            valid = sum(is_json(one["choices"][0]["text"]) for one in found[1])
            taus = [f"{statistics.mean(tau(one) for one in side):.2f}" for side in found]
            rows.append([temperature, *taus, f"{valid} of {runs}"])
    masked, plain = map(statistics.median, zip(*costs, strict=True))
    share = statistics.median(1 - own / other for other, own in costs)
    print_table(
        ["free, ms a token", "under a grammar", "masks", "first reply under one, s"],
        [[f"{plain:.2f}", f"{masked:.2f}", f"{100 * share:.1f} %", f"{first_s:.2f}"]],
    )
    print_table(["T", "tau, free", "under the schema", "valid JSON"], rows)


def tau(reply: Mapping[str, Any]) -> float:
    """Return the tokens a round of a reply."""
    return float(reply["metrics"]["completion_tokens"] / max(1, reply["metrics"]["rounds"]))


def is_json(text: str) -> bool:
    """Return whether a text is a whole JSON document."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
