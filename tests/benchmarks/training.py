"""The command `training`: tokens a second that a head learns from, forward and backward, with
features from files."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import click
import torch

from benchmarks.measure import estimate
from benchmarks.options import Command, option, options, pin, report
from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.workers.training.data.features import open_features
from dovetail.workers.training.folder import shape_for
from dovetail.workers.training.recipes import plan_for
from dovetail.workers.training.target_parts import read_target
from dovetail.workers.training.trainer import train_head

KINDS: Mapping[str, Mapping[str, Any]] = {
    "eagle": {},
    "dovetail 1 block": {"blocks": 1},
    "dovetail 2 blocks": {"blocks": 2},
    "dovetail 3 blocks": {"blocks": 3},
    "eagle3": {},
    "jakiro 2 experts": {"experts": 2},
    "jakiro 4 experts": {"experts": 4},
}
"""The heads to train, with their options; the kind is the first word of the name."""
UNTIMED = 2
"""The first and the last step of a run, after which the head is measured."""


@click.command(cls=Command)
@option(
    "--features",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="What `dovetail features` has written.",
)
@option(
    "--kind",
    "names",
    type=click.Choice(tuple(KINDS)),
    multiple=True,
    default=tuple(KINDS),
    help="Can be repeated.",
)
@option("--steps", type=click.IntRange(min=1), default=8, help="Steps that are timed.")
@option(
    "--number",
    type=click.Choice(("fp32", "bf16")),
    default="fp32",
    help="What matrix products are computed in.",
)
@option("--device", default="cpu", help="cpu or cuda:N.")
@options("threads", "clock", "json")
def training(
    features: Path,
    names: Sequence[str],
    steps: int,
    number: Literal["fp32", "bf16"],
    device: str,
    threads: int,
    clock: str,
    as_json: bool,
) -> None:
    """Training tokens a second of each kind of head, with the losses and batches of its preset:
    those of a step over the median time of one."""
    pin(threads)
    torch.set_num_threads(threads)
    now = time.perf_counter if clock == "wall" else time.process_time
    stored = open_features(features)
    target = read_target(stored.origin.target)
    rows = []
    with progress_bar(len(names), "heads") as step:
        for name in names:
            step(name)
            kind: Any = name.split()[0]
            plan = plan_for(kind, target.frozen.embedding.shape[1])
            pace = replace(plan.pace, steps=steps + UNTIMED, device=device)
            times: list[tuple[float, int]] = []
            trained = train_head(
                shape_for(kind, target, context=stored.origin.context, **KINDS[name]),
                stored,
                target.frozen,
                replace(plan, pace=pace, number=number, checks=1, check_rows=1),
                progress=lambda run, times=times: times.append((now(), run.tokens)),  # type: ignore[misc]
            )
            rows.append({"head": name, "parameters": trained.outcome.parameters, **rate_of(times)})
    report(
        {"device": device, "threads": threads, "number": number, "clock": clock, "rows": rows},
        as_json,
        lambda: show(rows),
    )


def rate_of(times: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """Tokens a second of the steps between the ends of the first and the last but one; `times` are
    the ends and the tokens by then."""
    rates = [
        (after - before) / (end - begin) for (begin, before), (end, after) in pairwise(times[:-1])
    ]
    return {"tokens_per_s": estimate(rates).as_json()}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    cells = [
        (
            row["head"],
            row["parameters"],
            round(row["tokens_per_s"]["median"]),
            "{low:.0f}-{high:.0f}".format(**row["tokens_per_s"]),
        )
        for row in rows
    ]
    print_table(("head", "parameters", "tokens/s", "95 %"), cells)
