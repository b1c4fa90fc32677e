"""The command `users`: many users with a few API keys, over HTTP, for a minute or more: how long
each key waits, what fails, and whether memory grows.

A real `dovetail serve` of the embedded pair. Every user asks again as soon as it has its reply.
"""

import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import click
import psutil

from benchmarks.coupling import PROMPTS
from benchmarks.gaps import server
from benchmarks.options import Command, option, options, report
from dovetail.launch.bench.load.served import Reply, ask
from dovetail.launch.bench.methods import read_prompt_set
from dovetail.launch.chat.web import WebServer
from dovetail.launch.console.terminal import print_table, progress_bar

MOST_SHARE = 2.0
"""The goal: the longest wait for a first token over the mean wait, at most; both leave out the
first request of each user."""
FULL = "HTTP 429"
WARM_SHARE = 0.25
"""The share of the time after which memory is first measured."""
MOST_GROWTH = 1.05
"""The most by which the memory of all processes may grow from then to the end, as a factor."""


@dataclass
class User:
    """Somebody who asks, and asks again once the reply is there."""

    key: str
    site: WebServer
    replies: list[Reply] = field(default_factory=list)

    def ask(self, turns: Sequence[str], tokens: int, number: int, model: str) -> None:
        turn = turns[number % len(turns)]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": turn}],
            "max_tokens": tokens,
            "seed": number,
        }
        self.replies.append(ask(self.site, body, number))


@click.command(cls=Command)
@option("--users", "together", type=click.IntRange(min=1), default=100, help="Users at once.")
@option("--keys", type=click.IntRange(min=1), default=10, help="API keys, divided among the users.")
@option("--seconds", type=click.IntRange(min=10), default=60, help="Seconds that they ask for.")
@option("--max-tokens", "tokens", type=click.IntRange(min=1), default=32, help="Tokens a reply.")
@option("--inflate", default="32MiB", help="Size to which the target is inflated.")
@option("--serve", "flags", multiple=True, help="A further option of `dovetail serve`.")
@options("json")
def users(
    together: int,
    keys: int,
    seconds: int,
    tokens: int,
    inflate: str,
    flags: Sequence[str],
    as_json: bool,
) -> None:
    """Many users with a few keys: no key waits long, nothing fails except what the queue refuses,
    and memory does not grow. Exit code 1 if one of these does not hold."""
    turns = [prompt.turns[0] for prompt in read_prompt_set(PROMPTS, None).prompts]
    named = [f"{random.Random(number).randbytes(16).hex()}" for number in range(keys)]
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("\n".join(named))
        file.flush()
        chosen = [f"--http.api_key_file={file.name}", *flags]
        with server("small", chosen, inflate) as url:
            crowd = [
                User(named[n % keys], WebServer(url, named[n % keys])) for n in range(together)
            ]
            rss = run(crowd, turns, tokens, seconds)
    found = {"seconds": seconds, "rss_mb": rss, **figures(crowd)}
    found["holds"] &= rss[-1] <= MOST_GROWTH * rss[0]
    report(found, as_json, lambda: show(found))
    raise SystemExit(not found["holds"])


def run(crowd: Sequence[User], turns: Sequence[str], tokens: int, seconds: int) -> list[float]:
    """Have all users ask for so many seconds; return the memory of the server's processes, early
    and at the end, in 10^6 bytes."""
    model = crowd[0].site.get("/v1/models")["data"][0]["id"]
    numbers, over, rss = count(), threading.Event(), []

    def use(user: User) -> None:
        while not over.is_set():
            user.ask(turns, tokens, next(numbers), model)

    threads = [threading.Thread(target=use, args=(user,)) for user in crowd]
    for thread in threads:
        thread.start()
    with progress_bar(seconds, "seconds") as step:
        for second in range(seconds):
            time.sleep(1.0)
            step("")
            if second == int(seconds * WARM_SHARE):
                rss.append(resident_mb())
    rss.append(resident_mb())
    over.set()
    for thread in threads:
        thread.join()
    return rss


def resident_mb() -> float:
    """Return the memory of the processes that were started here, in 10^6 bytes."""
    taken = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            taken += child.memory_info().rss
    return taken / 1e6


def figures(crowd: Sequence[User]) -> dict[str, Any]:
    """Return how long each key waited for first tokens, and what failed. The first request of each
    user counts only for errors: all come at once, and wait between nothing and a whole turn.
    """
    replies = [reply for user in crowd for reply in user.replies]
    errors = Counter(reply.error for reply in replies if reply.error)
    waits: dict[str, list[float]] = {}
    for user in crowd:
        later = user.replies[1:]
        told = [reply.ttft_s for reply in later if not reply.error]
        waits.setdefault(user.key, []).extend(wait for wait in told if wait is not None)
    every = [wait for own in waits.values() for wait in own]
    mean_s = sum(every) / len(every) if every else float("nan")
    longest_s = [max(own, default=float("inf")) for own in waits.values()]
    return {
        "requests": len(replies),
        "answered": [len(own) for own in waits.values()],
        "errors": dict(errors),
        "mean_wait_s": mean_s,
        "longest_wait_s": longest_s,
        "share": max(longest_s) / mean_s,
        "holds": max(longest_s) <= MOST_SHARE * mean_s and not {*errors} - {FULL},
    }


def show(found: dict[str, Any]) -> None:
    rows = [
        (key, answered, f"{longest:.2f}")
        for key, (answered, longest) in enumerate(
            zip(found["answered"], found["longest_wait_s"], strict=True)
        )
    ]
    print_table(("key", "answered", "longest wait s"), rows)
    click.echo(
        f"{found['requests']} requests in {found['seconds']} s, errors {found['errors'] or 'none'};"
        f" mean wait {found['mean_wait_s']:.2f} s, the longest {found['share']:.2f} times that (at "
        f"most {MOST_SHARE:g}); memory {found['rss_mb'][0]:.0f} -> {found['rss_mb'][-1]:.0f} MB"
    )
