"""The command `gains`: whether the advice of `dovetail profile` holds.

In some situations that leave something to be gained, the profile is taken, the changes that it
advises are carried out, and what they brought is compared with what was predicted: replies with the
settings as they were and as they were changed, in turns.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from benchmarks.measure import ratio_of_sums
from benchmarks.options import Command, option, options, report, settings_of
from dovetail.launch.bench.contenders import Contender, Ours, contenders
from dovetail.launch.bench.methods import NONE, Method, read_prompt_set
from dovetail.launch.bench.turns import prepare, rotated
from dovetail.launch.console.terminal import note, print_table
from dovetail.launch.files.prompts import Prompt
from dovetail.launch.settings.configure import Configuration, parse_setting
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.errors import UserError
from support.inflated import models_at

AS_IT_WAS, STACK = "as it was", "the pair"
SITUATIONS: Mapping[str, Mapping[str, Any]] = {
    "too many nodes": {
        "tree.policy": "dynamic",
        "tree.insist": True,
        "tree.gamma": 63,
        "tree.depth": 8,
        "tree.width": 10,
        "draft.ahead": False,
    },
    "too few nodes": {
        "tree.policy": "dynamic",
        "tree.insist": True,
        "tree.gamma": 2,
        "tree.depth": 2,
        "tree.width": 2,
        "draft.ahead": False,
    },
    "too many levels": {
        "tree.policy": "dynamic",
        "tree.insist": True,
        "tree.gamma": 15,
        "tree.depth": 24,
        "tree.width": 4,
        "draft.ahead": False,
    },
    "no draft": {"draft.kind": NONE},
}
"""Name -> settings that leave something to be gained, with the embedded pair."""
MOST = 3
"""Changes that are carried out in each."""
Share = tuple[float, float]
"""Tokens and seconds of a reply."""


@click.command(cls=Command)
@option(
    "--situation",
    "names",
    multiple=True,
    type=click.Choice(list(SITUATIONS)),
    help="Can be repeated.  [default: all]",
)
@option(
    "--draft", default="small", help="A kind of draft that comes with the program, or a folder."
)
@option("--inflate", default="512MiB", help="Size to which the target is inflated.")
@option(
    "--prompts",
    type=click.Path(dir_okay=False, path_type=Path),
    default=DEMO_FOLDER / "prompts.jsonl",
    help="File of prompts.",
)
@option("--limit", type=click.IntRange(min=2), default=6, help="Prompts taken of it.")
@option("--max-tokens", type=click.IntRange(min=2), default=96, help="Tokens of a reply.")
@option("--temperature", type=float, default=0.0, help="Temperature of the sampling.")
@options("json")
def gains(names: tuple[str, ...], as_json: bool, **settings: Any) -> None:
    """Compare what `dovetail profile` predicts of its advice with what the advice brings."""
    rows = [row for name in names or SITUATIONS for row in situation(name, settings)]
    report(
        {"settings": {**settings, "prompts": str(settings["prompts"])}, "rows": rows},
        as_json,
        lambda: show(rows),
    )


def situation(name: str, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Profile it, carry the advice out, and compare."""
    base = settings_of(
        {
            **models_at(settings["inflate"], settings["draft"]),
            **SITUATIONS[name],
            **_sampling(settings),
        }
    )
    note(f"{name}: profiling")
    advice = chosen(profile(base, settings["prompts"], settings["limit"])["advice"])
    if not advice:
        note(f"{name}: nothing is advised, the profile finds no gain")
        return
    note(f"{name}: carrying out {', '.join(' '.join(one['flags']) for one in advice)}")
    shares = taken(base, [one["flags"] for one in advice], settings)
    for one in advice:
        changed = shares[" ".join(one["flags"])]
        found = ratio_of_sums(changed, shares[AS_IT_WAS])
        off = one["gain"] / found.median - 1.0
        yield {
            "situation": name,
            "change": " ".join(one["flags"]),
            "predicted": one["gain"],
            "outcome": found.as_json(),
            "off": off,
            "pairs": len(changed),
        }


def _sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sampling.max_tokens": settings["max_tokens"],
        "sampling.temperature": settings["temperature"],
    }


def profile(base: Configuration, prompts: Path, limit: int) -> dict[str, Any]:
    """Return what `dovetail profile` finds with these settings."""
    flags = [
        flag
        for section in ("target", "draft", "tree", "sampling")
        for flag in base.arguments(section)
    ]
    with TemporaryDirectory(prefix="dovetail-profile-") as folder:
        command = [
            sys.executable,
            "-P",
            "-m",
            "dovetail.launch.cli",
            "profile",
            f"--prompts={prompts}",
            f"--limit={limit}",
            f"--out={folder}",
            "--json",
        ]
        done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"dovetail profile failed: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def chosen(advice: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the best change of each kind that changes no token."""
    by_name: dict[str, Mapping[str, Any]] = {}
    for one in advice:
        if one["same"] and one["gain"] >= 1.02:
            by_name.setdefault(one["name"], one)
    return sorted(by_name.values(), key=lambda one: -one["gain"])[:MOST]


def taken(
    base: Configuration, changes: Sequence[Sequence[str]], settings: Mapping[str, Any]
) -> dict[str, list[Share]]:
    """Replies to all prompts with the settings as they were and with each change, in turns; what a
    request can say shares a stack of processes."""
    methods = [_method(AS_IT_WAS, base, ())] + [
        _method(" ".join(flags), base, flags) for flags in changes
    ]
    alone = Method(NONE, base.over(NONE, {"draft.kind": NONE}), shares=STACK)
    shares: dict[str, list[Share]] = {method.name: [] for method in methods}
    with contenders([alone, *methods]) as found:
        lone = found[NONE]
        assert isinstance(lone, Ours)
        for number, prompt in enumerate(
            read_prompt_set(settings["prompts"], settings["limit"]).prompts
        ):
            for method, share in _bout(
                found,
                lone,
                prompt,
                settings["temperature"],
                number,
                [method.name for method in methods],
            ):
                shares[method].append(share)
    return shares


def _method(name: str, base: Configuration, flags: Sequence[str]) -> Method:
    pairs = [flag.removeprefix("--").partition("=")[::2] for flag in flags]
    values = {_full(key): parse_setting(_full(key), text, name) for key, text in pairs}
    own = any(key.startswith("target.") for key in values)
    return Method(name, base.over(name, values), shares="" if own else STACK)


def _full(name: str) -> str:
    return {"draft": "draft.kind"}.get(name, name)


def _bout(
    found: Mapping[str, Contender],
    lone: Ours,
    prompt: Prompt,
    heat: float,
    turn: int,
    names: Sequence[str],
) -> list[tuple[str, Share]]:
    """One reply of each; nothing where it has a single token."""
    task = prepare(lone.connection, lone.method, prompt, heat, 0)
    runs = {name: found[name].decode(task, heat, 0) for name in rotated(list(names), turn)}
    shares: list[tuple[str, Share]] = [
        (name, (run.decoded_tokens, run.decode_s)) for name, run in runs.items()
    ]
    return shares if all(tokens > 0 for _, (tokens, _) in shares) else []


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    headings = (
        "situation",
        "change",
        "predicted",
        "outcome",
        "95 % interval",
        "predicted / outcome",
        "replies",
    )
    cells = [
        (
            row["situation"],
            row["change"],
            f"{row['predicted']:.2f}",
            f"{row['outcome']['median']:.2f}",
            f"{row['outcome']['low']:.2f}-{row['outcome']['high']:.2f}",
            f"{1 + row['off']:.2f}",
            row["pairs"],
        )
        for row in rows
    ]
    print_table(headings, cells)
