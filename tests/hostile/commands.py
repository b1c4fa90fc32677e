"""The command line: what is hostile, thrown at what has to bear it, and a table of what became of
it."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.protocol.settings import DraftSettings, TargetSettings
from hostile.checkpoints import BAD, HARMLESS, good_folders
from hostile.codec import KindFound, siege_codec
from hostile.coordinators import siege_by_target, siege_coordinator
from hostile.found import Found
from hostile.loaded import Tried, loading
from hostile.requests import WRONG, try_request
from hostile.templates import EVIL, try_template
from hostile.wire import siege_handshakes, siege_wire
from hostile.workers import siege_worker
from support.web import api, backend

STEPS = 100
"""Steps of the progress bar, for each victim."""
OF_A_LYING_TARGET, OVER_IPC, OVER_TCP = 100, 100, 1000
"""One message in so many: a lie takes sessions that come to it, and a socket a process beside this
one."""
VICTIMS = ("codec", "coordinator", "lying-target", "target", "small", "ngram", "head", "ipc", "tcp")
INPUTS = ("models", "templates", "requests")

Step = Callable[[int], None]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--messages",
    default=1_000_000,
    show_default=True,
    type=click.IntRange(min=1000),
    help="Messages at the codec, a coordinator, and each kind of worker.",
)
@click.option("--seed", default=1, show_default=True, help="Seed of the messages.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice((*VICTIMS, *INPUTS)),
    help="These alone; can be repeated.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on stdout instead of tables."
)
def main(messages: int, seed: int, only: tuple[str, ...], as_json: bool) -> None:
    """Throw hostile messages, model folders, chat templates and requests at what has to bear them.

    Over sockets come a hundredth of the messages, and as many lies of a target. Ends with 1 if
    anything crashed, grew, was executed or disturbed the healthy.
    """
    chosen = only or (*VICTIMS, *INPUTS)
    found, kinds = throw(messages, seed, [victim for victim in VICTIMS if victim in chosen])
    tried = try_inputs([kind for kind in INPUTS if kind in chosen])
    if as_json:
        shown = {name: asdict(kind) for name, kind in kinds.items()}
        victims = [{**asdict(each), "passed": each.passed} for each in found]
        click.echo(
            json.dumps(
                {"victims": victims, "kinds": shown, "inputs": [asdict(each) for each in tried]}
            )
        )
    else:
        show(found, kinds, tried)
    sys.exit(0 if all(each.passed for each in (*found, *tried)) else 1)


def throw(
    count: int, seed: int, victims: Sequence[str]
) -> tuple[list[Found], Mapping[str, KindFound]]:
    """Messages at each of the victims in turn, and what the codec made of each kind."""
    found: list[Found] = []
    kinds: Mapping[str, KindFound] = {}
    with (
        tempfile.TemporaryDirectory(prefix="dovetail-hostile-") as name,
        progress_bar(STEPS * len(victims), "steps") as step,
    ):
        folder = Path(name)
        good = good_folders(folder / "good")
        for victim in victims:
            if victim == "codec":
                codec, kinds = siege_codec(count, seed, _stepping(step, victim, count))
                found.append(codec)
            else:
                found.append(_siege(victim, count, seed, step, good, folder))
    return found, kinds


def _siege(
    victim: str,
    count: int,
    seed: int,
    step: Callable[[str], None],
    good: Mapping[str, Path],
    folder: Path,
) -> Found:
    shares = {"lying-target": OF_A_LYING_TARGET, "ipc": OVER_IPC, "tcp": OVER_TCP}
    share = max(10, count // shares.get(victim, 1))
    stepping = _stepping(step, victim, share)
    match victim:
        case "coordinator":
            return siege_coordinator(share, seed, stepping)
        case "lying-target":
            return siege_by_target(share, seed, stepping)
        case "ipc":
            return siege_wire(share, seed, stepping)
        case "tcp":
            return siege_handshakes(share, folder / "keys", stepping)
    return siege_worker(
        f"{victim} worker" if victim == "target" else f"draft worker, {victim}",
        _open(victim, good),
        share,
        seed,
        stepping,
    )


def _open(victim: str, good: Mapping[str, Path]) -> Any:
    """A worker with a tiny model."""
    from dovetail.workers.drafters.registry import open_draft_worker
    from dovetail.workers.serving.open_target import open_target_worker

    target = str(good["target"])
    if victim == "target":
        return open_target_worker(TargetSettings(model=target), name=victim, threads=1)
    models = {
        "small": DraftSettings(model=target, device="cpu"),
        "ngram": DraftSettings(kind="ngram"),
        "head": DraftSettings(model=str(good["draft"]), device="cpu"),
    }
    return open_draft_worker(models[victim], name=victim, threads=1, target=target)


def _stepping(step: Callable[[str], None], victim: str, count: int) -> Step:
    """Takes a step of the bar for each hundredth of the messages."""
    taken = 0

    def stepping(messages: int) -> None:
        nonlocal taken
        while taken < min(STEPS, STEPS * messages // count):
            taken += 1
            step(victim)

    return stepping


def try_inputs(kinds: Sequence[str]) -> list[Tried]:
    """Every bad input of these kinds, one after the other."""
    total = sum(
        {
            "models": sum(map(len, BAD.values())) + len(HARMLESS),
            "templates": sum(map(len, EVIL.values())),
            "requests": len(WRONG),
        }[kind]
        for kind in kinds
    )
    with progress_bar(total, "inputs") as step:
        tried = []
        for kind in kinds:
            for each in {"models": _models, "templates": _templates, "requests": _requests}[kind]():
                tried.append(each)
                step(each.name)
    return tried


def _models() -> Iterator[Tried]:
    with loading() as loader:
        yield from (loader.refused(kind, bad) for kind, bads in BAD.items() for bad in bads)
        yield from (loader.ignored("of no effect", bad) for bad in HARMLESS)


def _templates() -> Iterator[Tried]:
    yield from (
        try_template(kind, name, template)
        for kind, templates in EVIL.items()
        for name, template in templates.items()
    )


def _requests() -> Iterator[Tried]:
    with _server() as server:
        yield from (try_request(server, wrong) for wrong in WRONG)


@contextmanager
def _server() -> Iterator[Any]:
    with backend() as house, api(house.address, "--policy=dynamic", "--tree.insist=true") as server:
        yield server


def show(found: Sequence[Found], kinds: Mapping[str, KindFound], tried: Sequence[Tried]) -> None:
    if found:
        headings = (
            "victim",
            "messages",
            "refused",
            "hung up",
            "faults",
            "healthy",
            "disturbed",
            "slowest s",
            "MiB grown",
            "seconds",
            "ok",
        )
        rows = [
            (
                f.victim,
                f.messages,
                f.refused,
                f.hung_up,
                len(f.faults),
                f.asked,
                f.disturbed,
                f.slowest_s,
                round(f.grown_mib, 1),
                round(f.seconds, 1),
                f.passed,
            )
            for f in found
        ]
        print_table(headings, rows)
    if kinds:
        shown = [
            (n, k.messages, k.refused, 1e6 * k.seconds / max(1, k.messages), 1e3 * k.slowest_s)
            for n, k in kinds.items()
        ]
        print_table(
            ("kind of message, at the codec", "messages", "refused", "mean us", "slowest ms"), shown
        )
    if tried:
        print_table(
            ("kind", "bad input", "what it got", "CPU s", "MiB", "ok"),
            [(t.kind, t.name, t.got, t.seconds, round(t.grown_mib), t.passed) for t in tried],
        )
    for each in found:
        for fault in each.faults[:3]:
            click.echo(f"{each.victim}: {fault}", err=True)
