"""The command `prompts`: the first token of a long prompt, read and restored from disk after a
restart."""

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import click

from benchmarks.options import Numbers
from dovetail.launch.console.terminal import print_table
from real.servers import ask, own_places, served

SETTLED_S = 0.2  # seconds between two looks at the folder of cached prompts


@click.command("prompts")
@click.argument("file", default="")
@click.option("--tokens", type=Numbers(), default="4000", show_default=True)
@click.option("--largest", default=20000, show_default=True, help="The largest token id.")
@click.option("--runs", type=click.IntRange(min=1), default=3, show_default=True)
@click.argument("more", nargs=-1)
def prompts(file: str, tokens: list[int], largest: int, runs: int, more: tuple[str, ...]) -> None:
    """Measure the time to the first token of prompts of random TOKENS with FILE (default: the
    embedded pair), and again after a restart with `--cache.disk`. MORE are further options of
    `dovetail serve`, behind `--`. The texts of both replies must be equal.
    """
    rows = []
    for count in tokens:
        found: list[tuple[float, float]] = []
        for run in range(runs):
            rng = random.Random(run)
            prompt = [rng.randrange(1, largest) for _ in range(count)]
            body = {"prompt": prompt, "max_tokens": 8, "seed": 1, "ignore_eos": True}
            with tempfile.TemporaryDirectory(prefix="dovetail-real-") as folder:
                command = [sys.executable, "-P", "-m", "dovetail.launch.cli", "serve"]
                command += [*([file] if file else []), "--cache.disk=20GB", *more]
                given, replies = own_places(folder), []
                for again in (False, True):
                    with served(command, "--http.port", given) as (_, address, _):
                        warm = [1 + place % (largest - 1) for place in range(40)]
                        ask(f"{address}/v1/completions", {**body, "prompt": warm})
                        replies.append(ask(f"{address}/v1/completions", body))
                        if not again:
                            wait_until_written(Path(folder, "cache", "dovetail", "prompts"))
                first, second = (reply["metrics"] for reply in replies)
                if replies[0]["choices"][0]["text"] != replies[1]["choices"][0]["text"]:
                    raise click.ClickException(f"the replies to {count} tokens differ")
                found.append((first["time_to_first_token_s"], second["time_to_first_token_s"]))
        cold, restored = map(statistics.median, zip(*found, strict=True))
        share, source = f"{100 * restored / cold:.1f} %", second["reused_from"]
        row = [count, f"{cold:.2f}", f"{restored:.3f}", share, second["reused_tokens"], source]
        rows.append(row)
    print_table(["tokens", "read, s", "restored, s", "share", "reused", "from"], rows)


def wait_until_written(folder: Path) -> None:
    """Wait until no block has been written for a while."""
    before, since = -1, time.monotonic()
    while time.monotonic() - since < 10 * SETTLED_S:
        if (there := sum(1 for _ in folder.rglob("*.safetensors"))) != before:
            before, since = there, time.monotonic()
        time.sleep(SETTLED_S)
