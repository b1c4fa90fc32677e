"""The commands about the pages: taking the documentation's pictures, and measuring what looking at
the dashboard costs.

A real coordinator with the embedded pair decodes all the while. For the pictures its target is
inflated, so that the page shows what a real one would; for the costs requests go to the coordinator
itself, so that the HTTP process does nothing but answer those who look.
"""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import httpx
import psutil
from rich.console import Console
from rich.terminal_theme import MONOKAI

from benchmarks.measure import Estimate, estimate
from dashboard.talking import talking
from dovetail.launch.console.screen import Standing, page
from dovetail.launch.console.terminal import note, print_table, progress_bar
from dovetail.launch.processes.stack import Stack
from dovetail.runtime.http.pages.watch import EVERY_S, STATE_PATH
from support.browser import Page, chromium, find_chromium
from support.inflated import inflated
from support.patience import PATIENCE_S
from support.stacks import PROMPTS, complete_all, started
from support.web import Api, api

ROOT = Path(__file__).resolve().parent.parent.parent
WARM_S = 25.0
"""Seconds of decoding before the picture is taken."""
CHATS = {
    "chat-light": (1000, 640, False),
    "chat-dark": (1000, 640, True),
    "chat-phone": (360, 640, False),
}
DASHBOARDS = {
    "dashboard-light": (1000, 1500, False),
    "dashboard-dark": (1000, 1500, True),
    "dashboard-phone": (360, 900, False),
}
"""Width, height and whether it is dark."""
LIVE = "document.querySelectorAll('#tree .node.a').length > 1"
MESSAGES = (
    "Could you tell me a story about a young hedgehog who lost his red balloon?",
    "Could you tell me a story about a brave otter who found a lantern?",
)
READY = "document.getElementById('model').textContent !== ''"
ENDED = "document.getElementById('stop').hidden"
TINTED = "document.querySelectorAll('.drafted').length > 60"
TEMPLATE_FONTS = "@font-face"


@click.group()
def main() -> None:
    """The pages: pictures of them, and what the dashboard costs."""


@main.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=ROOT / "launch" / "pictures",
    show_default=True,
    help="Folder.",
)
@click.option("--inflate", default="256MiB", show_default=True, help="Size of the target.")
@click.option("--whole", is_flag=True, help="The whole page instead of what a window shows of it.")
def pictures(out: Path, inflate: str, whole: bool) -> None:
    """Make the documentation's pictures of the pages and of `dovetail top`."""
    program = find_chromium()
    if program is None:
        raise click.ClickException("no Chromium is installed here (Debian: apt install chromium)")
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as opened:
        step = opened.enter_context(progress_bar(len(CHATS) + len(DASHBOARDS) + 2, "pictures"))
        step("decoding")
        stack, _ = opened.enter_context(started({"draft.device": "cpu", **inflated(inflate)}))
        server = opened.enter_context(
            api(stack.address, "--policy=dynamic", "--tree.insist=true", "--http.model=demo")
        )
        browser = opened.enter_context(chromium(program))
        for name, (width, height, dark) in CHATS.items():
            step(name)
            tab = browser.page()
            tab.open(server.url, width=width, height=height, dark=dark)
            _chat(tab)
            tab.small_picture(out / f"{name}.png", whole=whole)
            tab.close()
        opened.enter_context(talking(server.url))
        time.sleep(WARM_S)
        for name, (width, height, dark) in DASHBOARDS.items():
            step(name)
            tab = browser.page()
            tab.open(f"{server.url}/dashboard", width=width, height=height, dark=dark)
            tab.until(LIVE)  # a round with an accepted path
            tab.small_picture(out / f"{name}.png", whole=whole)
            tab.close()
        step("top")
        (out / "top.svg").write_text(
            _terminal(server.client.get(STATE_PATH).json()), encoding="utf-8"
        )
    note(f"written to {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")


def _chat(tab: Page) -> None:
    """Send two messages; return while the second reply is written."""
    tab.until(READY)
    for number, message in enumerate(MESSAGES):
        tab.until(ENDED)
        tab.value("document.getElementById('input').focus()")
        tab.type(message)
        tab.press("Enter")
        tab.until(f"document.querySelectorAll('.assistant').length > {number}")
    tab.until(TINTED)


def _terminal(picture: dict[str, Any]) -> str:
    console = Console(
        width=80,
        height=30,
        record=True,
        force_terminal=True,
        color_system="truecolor",
        file=_Nowhere(),
        legacy_windows=False,
    )
    console.print(page(picture, Standing(), console), end="")
    drawn = console.export_svg(title="dovetail top", theme=MONOKAI)
    return "".join(
        part.partition("}")[2] if place else part
        for place, part in enumerate(drawn.split(TEMPLATE_FONTS))
    )  # fonts from elsewhere


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """There is nothing."""


# -- costs -----------------------------------------------------------------------------------------


@main.command()
@click.option(
    "--seconds",
    type=click.FloatRange(min=2.0),
    default=12.0,
    show_default=True,
    help="Seconds of each measurement.",
)
@click.option(
    "--turns",
    type=click.IntRange(min=2),
    default=6,
    show_default=True,
    help="With so many pages and without any, in turns.",
)
@click.option(
    "--pages", type=click.IntRange(min=1), default=1, show_default=True, help="Pages that are open."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def cost(seconds: float, turns: int, pages: int, as_json: bool) -> None:
    """Measure what open pages cost the HTTP process and the coordinator while two sessions decode,
    and what is paid when nobody looks."""
    with (
        progress_bar(2 * turns, "measurements") as step,
        started({"draft.device": "cpu"}) as (stack, client),
    ):
        coordinator = psutil.Process(client.status().pid)
        with api(stack.address) as server, _decoding(stack):
            processes = {"http": psutil.Process(server.process.pid), "coordinator": coordinator}
            shares: dict[str, list[float]] = {
                name: []
                for name in (
                    "http, nobody",
                    "http, looking",
                    "coordinator, nobody",
                    "coordinator, looking",
                )
            }
            rounds = []
            for _ in range(turns):
                for looking in (0, pages):
                    step(f"{looking} pages")
                    before = client.status().rounds
                    with _pages(server, looking):
                        for name, share in _busy(processes, seconds).items():
                            shares[f"{name}, {'looking' if looking else 'nobody'}"].append(share)
                    rounds.append((client.status().rounds - before) / seconds)
            size = len(server.client.get(STATE_PATH).content)
    found = {name: estimate([100 * share for share in of]) for name, of in shares.items()}
    paid = estimate(
        [
            100 * (late - early)
            for early, late in zip(shares["http, nobody"], shares["http, looking"], strict=True)
        ]
    )
    asked = estimate(
        [
            100 * (late - early)
            for early, late in zip(
                shares["coordinator, nobody"], shares["coordinator, looking"], strict=True
            )
        ]
    )
    _report(pages, found, paid, asked, size, sum(rounds) / len(rounds), as_json=as_json)


def _report(
    pages: int,
    found: dict[str, Estimate],
    paid: Estimate,
    asked: Estimate,
    size: int,
    rounds_per_s: float,
    *,
    as_json: bool,
) -> None:
    rows = {**found, f"http: {pages} open": paid, f"coordinator: {pages} open": asked}
    if as_json:
        told = {name: value.as_json() for name, value in rows.items()}
        click.echo(
            json.dumps(
                {
                    "pages": pages,
                    "percent_of_a_core": told,
                    "bytes_an_answer": size,
                    "rounds_per_s": rounds_per_s,
                }
            )
        )
        return
    print_table(
        ("per cent of a core", "median", "low", "high"),
        [(name, *value.as_json().values()) for name, value in rows.items()],
    )
    note(f"{size} bytes an answer, one a page and {EVERY_S:g} s; {rounds_per_s:.0f} rounds/s")


def _busy(processes: dict[str, psutil.Process], seconds: float) -> dict[str, float]:
    """The share of a core that each process has taken for so long."""

    def used() -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}

    began_s, before = time.monotonic(), used()
    time.sleep(seconds)
    after, took_s = used(), time.monotonic() - began_s
    return {name: (after[name] - before[name]) / took_s for name in processes}


@contextmanager
def _pages(server: Api, number: int) -> Iterator[None]:
    """Have so many pages ask as a browser does, each over a connection of its own."""
    with ExitStack() as opened:
        for _ in range(number):
            opened.enter_context(_beside(lambda ended: _ask(server.url, ended)))
        yield


def _ask(url: str, ended: threading.Event) -> None:
    with httpx.Client(base_url=url, trust_env=False) as client:
        while not ended.wait(EVERY_S):
            client.get(STATE_PATH)


@contextmanager
def _decoding(stack: Stack) -> Iterator[None]:
    """Two sessions decode all the time, over the coordinator itself."""

    def decode(ended: threading.Event) -> None:
        with stack.connect() as client:
            for number in itertools.count():
                chosen = [PROMPTS[(2 * number + place) % len(PROMPTS)][:1] for place in range(2)]
                complete_all(
                    client,
                    [client.submit(turns=turns, max_tokens=200, seed=number) for turns in chosen],
                )
                if ended.is_set():
                    return

    with _beside(decode):
        yield


@contextmanager
def _beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(PATIENCE_S)
