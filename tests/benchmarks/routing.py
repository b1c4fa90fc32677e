"""The command `routing`: how near predicted passes of a mixture of experts come to measured ones,
for a cost model of rows and experts and for one of rows alone."""

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch

from benchmarks.large import MIXTURE
from benchmarks.options import Command, option, options, pin, report
from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.protocol.calibration import ContextCurve, ExpertCosts
from dovetail.runtime.costs.passes import RowCosts
from dovetail.workers import kernels
from dovetail.workers.calibration.passes import Passes
from dovetail.workers.calibration.target import expert_seconds
from dovetail.workers.models.loading import random_language_model

SMALL = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_attention_heads": 8}
SMALL |= {"num_hidden_layers": 6, "num_experts": 64, "num_experts_per_tok": 4, "head_dim": 64}
POOLS = (2, 8192, 12, 8192)
"""The number of different tokens in each stretch of text: few where it repeats itself."""
ROWS = (1, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
CONTEXT = 64
PROFILE_S = 4.0
MODELS = ("rows alone", "rows and experts, predicted", "rows and experts, counted")
WARM_UP = 24
"""The first passes, whose predictions do not count."""


@click.command(cls=Command)
@option("--passes", type=click.IntRange(min=2 * WARM_UP), default=480, help="Passes in all.")
@option("--stretch", type=click.IntRange(min=1), default=40, help="Passes over one kind of text.")
@options("threads", "json")
def routing(passes: int, stretch: int, threads: int, as_json: bool) -> None:
    """Passes of a random mixture of experts over trees of changing size, in stretches of text that
    repeat themselves more or less. Each is predicted, and then both cost models learn it; the
    figure is the median of |predicted / measured - 1|.

    "Predicted": the number of experts is predicted, too, as it has to be before a round; "counted":
    it is known, so that the error is that of the cost of an expert. The profile is what `dovetail
    calibrate` measures, with random tokens.
    """
    pin(threads)
    torch.set_num_threads(threads)
    kernels.set_threads(threads)
    with TemporaryDirectory(prefix="dovetail-benchmark-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MIXTURE | SMALL), encoding="utf-8")
        model = random_language_model(folder, weights="half")
        assert model.routing is not None
        over = Passes(model, CONTEXT + max(ROWS))
        over.fill(CONTEXT)
        known = ExpertCosts(routing=model.routing)
        curve = ContextCurve(context=CONTEXT, t_v=over.curve(sorted({*ROWS}), PROFILE_S))
        profile = ExpertCosts(
            routing=model.routing,
            expert_s=expert_seconds(over, PROFILE_S),
            passes=tuple(over.experts.items()),
        )
        costs = {
            ("rows", "nothing"): RowCosts(),
            ("rows", "a profile"): RowCosts([curve]),
            ("experts", "nothing"): RowCosts(experts=known),
            ("experts", "a profile"): RowCosts([curve], profile),
        }
        errors: dict[str, dict[str, list[float]]] = {told: defaultdict(list) for told in MODELS}
        for number, (rows, tokens) in enumerate(_passes(passes, stretch)):
            seconds, experts = over.counted(rows, tokens)
            for (by, begun), one in costs.items():
                if number >= WARM_UP:
                    for told, predicted in _predictions(by, one, rows, experts):
                        errors[told][begun].append(abs(predicted / seconds - 1.0))
                one.observe(rows, seconds, CONTEXT, experts)
    learned = costs["experts", "nothing"].experts
    assert learned is not None
    result = {
        "experts": model.routing.model_dump(),
        "expert_us": learned.expert_s * 1e6,
        "profile_expert_us": profile.expert_s * 1e6,
        "row_ms": costs["rows", "nothing"].at(1, CONTEXT) * 1e3,
        "passes": passes - WARM_UP,
        "median_error": {
            told: {begun: median(these) for begun, these in errors[told].items()} for told in MODELS
        },
    }
    report(result, as_json, lambda: _show(result))


def _passes(count: int, stretch: int) -> Iterator[tuple[int, int]]:
    """Yield rows, and among how many tokens theirs are drawn."""
    generator = random.Random(1)
    with progress_bar(count, "passes") as step:
        for number in range(count):
            step("")
            yield generator.choice(ROWS), POOLS[number // stretch % len(POOLS)]


def _predictions(by: str, costs: RowCosts, rows: int, experts: int) -> Iterator[tuple[str, float]]:
    """Yield what a cost model says of a pass before it has learned it."""
    alone, to_come, counted = MODELS
    yield (alone if by == "rows" else to_come), costs.at(rows, CONTEXT)
    if by == "experts":
        yield counted, costs.at(rows, CONTEXT, experts)


def _show(result: Mapping[str, Any]) -> None:
    experts = result["experts"]
    click.echo(
        f"{experts['row']} of {experts['most']} experts a row; a pass over one row takes "
        f"{result['row_ms']:.2f} ms, a further expert {result['expert_us']:.0f} us "
        f"({result['profile_expert_us']:.0f} by the profile)"
    )
    cells: Sequence[tuple[object, ...]] = [
        (told, f"{error['nothing']:.1%}", f"{error['a profile']:.1%}")
        for told, error in result["median_error"].items()
    ]
    click.echo(f"median error of {result['passes']} passes, each predicted before it is learned:")
    print_table(("cost model", "without a profile", "with a profile"), cells)
