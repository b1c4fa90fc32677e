"""The command `reliability`: whether a draft is right as often as its scores say.

Every node that was offered below one that the target reached came with a probability - its score
less its parent's - and turned out to be the target's choice or not. Sorted into bins by the
probability, its mean and the share of these that were the choice should be the same. The prompts
are halved in turns: of the first half the draft learns its scales
(`workers/speculation/score_calibration.py`), on the second, with what it learned held fast, it is
judged; beside it, on the same prompts, a draft of a fixed sharpening, and the draft that goes on
learning: each of its guesses was made before its outcome was learned from. Both workers are in one
process (`duet.py`); no figure here is a time.

Which nodes are offered depends on the scores, so the logarithmic losses are over other nodes, and
compare only where the tree is `static`.
"""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.coupling import PROMPTS, list_keys
from benchmarks.duet import Duet, Reply, open_draft, open_target
from benchmarks.options import Command, Numbers, option, options, pin, report
from dovetail.launch.console.terminal import note, print_table, progress_bar
from dovetail.launch.files.charts import Curve, Panel, check_charts, draw_panels
from dovetail.launch.files.prompts import read_prompts
from dovetail.launch.settings.embedded import DEMO_FOLDER
from dovetail.protocol.errors import UserError
from dovetail.protocol.policies import POLICIES
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.text.tokenizer import TextCodec

SMALLEST = 1e-6
"""No guess counts as less likely, or as surer, in the logarithmic loss."""
FEWEST = 20
"""Guesses in a bin that is drawn."""
NORMAL = 1.96


@dataclass(frozen=True)
class Bin:
    """Guesses of about the same probability: the mean of it, and the share of them that were
    right."""

    predicted: float
    observed: float
    count: int

    @property
    def band(self) -> tuple[float, float]:
        """The 95 % interval of the observed share (Wilson's)."""
        square, share = NORMAL**2 / self.count, self.observed
        middle, half = (
            share + square / 2,
            NORMAL * ((share * (1 - share) + square / 4) / self.count) ** 0.5,
        )
        return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


@dataclass(frozen=True)
class Reliability:
    """Guesses, judged. `error`: the mean distance between predicted and observed over the bins,
    each with the weight of its guesses."""

    bins: tuple[Bin, ...]
    error: float
    log_loss: float

    @classmethod
    def of(cls, guesses: Sequence[tuple[float, bool]], bins: int) -> "Reliability":
        """`guesses` are log-probabilities with outcomes, at least one; bins of equal width, the
        empty ones left out."""
        predicted = np.exp([score for score, _ in guesses])
        right = np.array([was for _, was in guesses], float)
        which = np.minimum((predicted * bins).astype(int), bins - 1)
        found = tuple(
            Bin(float(predicted[there].mean()), float(right[there].mean()), int(there.sum()))
            for there in _each(which, bins)
        )
        error = sum(bin_.count * abs(bin_.predicted - bin_.observed) for bin_ in found) / len(
            guesses
        )
        sure = np.clip(predicted, SMALLEST, 1 - SMALLEST)
        return cls(found, error, float(-np.where(right > 0, np.log(sure), np.log1p(-sure)).mean()))

    @property
    def count(self) -> int:
        return sum(bin_.count for bin_ in self.bins)

    def curve(self, name: str) -> Curve:
        drawn = [bin_ for bin_ in self.bins if bin_.count >= FEWEST]
        return Curve(
            name,
            [(bin_.predicted, bin_.observed) for bin_ in drawn],
            band=[bin_.band for bin_ in drawn],
        )


def _each(which: NDArray[np.int_], bins: int) -> list[NDArray[np.bool_]]:
    return [there for number in range(bins) if (there := which == number).any()]


@dataclass(frozen=True)
class Judged:
    """A draft on the second half of the prompts."""

    name: str
    tau: float
    reliability: Reliability

    @classmethod
    def of(cls, name: str, replies: Sequence[Reply], bins: int) -> "Judged":
        """`UserError` where nothing was offered."""
        guesses = [guess for reply in replies for guess in reply.guesses]
        if not guesses:
            raise UserError(
                f"no node was offered in {len(replies)} replies: take more prompts, or a "
                "higher --max-tokens"
            )
        return cls(
            name,
            sum(r.decoded for r in replies) / sum(r.rounds for r in replies),
            Reliability.of(guesses, bins),
        )

    def as_json(self) -> dict[str, Any]:
        found = self.reliability
        bins = [
            {
                "predicted": b.predicted,
                "observed": b.observed,
                "low": b.band[0],
                "high": b.band[1],
                "count": b.count,
            }
            for b in found.bins
        ]
        return {
            "name": self.name,
            "tau": self.tau,
            "nodes": found.count,
            "error": found.error,
            "log_loss": found.log_loss,
            "bins": bins,
        }


@dataclass(frozen=True)
class Comparison:
    """A draft at a temperature: what it learned - (sharpening, share of the noise, nodes) of each
    depth class -, and how it is judged."""

    draft: str
    temperature: float
    learned: tuple[tuple[float, float, int], ...]
    judged: tuple[Judged, ...]

    def as_json(self) -> dict[str, Any]:
        learned = [
            {"sharpening": sharpening, "noise_share": share, "nodes": nodes}
            for sharpening, share, nodes in self.learned
        ]
        return {
            "draft": self.draft,
            "temperature": self.temperature,
            "learned": learned,
            "judged": [judged.as_json() for judged in self.judged],
        }

    def panel(self) -> Panel:
        curves = [judged.reliability.curve(judged.name) for judged in self.judged]
        ideal = Curve("as predicted", [(0.0, 0.0), (1.0, 1.0)], dashed=True)
        return Panel(
            f"{Path(self.draft).name}, temperature {self.temperature:g}",
            "predicted probability",
            "share that was right",
            [*curves, ideal],
        )


@click.command(cls=Command)
@option(
    "--draft",
    "drafts",
    multiple=True,
    default=(str(DEMO_FOLDER / "draft"),),
    help="Folder of a draft or head; can be repeated.",
)
@option("--target", default=str(DEMO_FOLDER / "target"), help="Folder of their target.")
@option(
    "--prompts",
    "files",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    default=(PROMPTS,),
    help="File of prompts; can be repeated.",
)
@option("--limit", type=click.IntRange(min=2), default=16, help="Prompts taken of each file.")
@option("--max-tokens", type=click.IntRange(min=2), default=128, help="Tokens of a reply.")
@option(
    "--keys",
    type=click.IntRange(min=1),
    default=2,
    help="Keys of the noise: replies to each prompt above temperature 0.",
)
@option(
    "--temperature",
    "temperatures",
    multiple=True,
    type=click.FloatRange(min=0.0),
    default=(0.0, 1.0),
    help="Can be repeated.",
)
@option("--tree", type=Numbers(3), default="15,8,10", help="gamma, depth, width.")
@option(
    "--policy",
    type=click.Choice(tuple(POLICIES)),
    default="dynamic",
    help="How the tree is shaped; static offers nearly the same nodes by every scale.",
)
@option(
    "--sharpening",
    type=click.FloatRange(min=0.0, min_open=True),
    default=1.0,
    help="The fixed one.",
)
@option("--bins", type=click.IntRange(min=2), default=10, help="Bins of equal width.")
@option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for reliability.json and reliability.svg.",
)
@options("json")
def reliability(
    drafts: tuple[str, ...],
    target: str,
    files: Sequence[Path],
    limit: int,
    max_tokens: int,
    keys: int,
    temperatures: Sequence[float],
    tree: tuple[int, int, int],
    policy: str,
    sharpening: float,
    bins: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Compare how often nodes are accepted with what their scores say: fitted scales against a
    fixed sharpening, on prompts outside the fit."""
    if out is not None:
        check_charts("the plot of --out")
    pin(1)
    shape = TreeSettings(policy=policy, gamma=tree[0], depth=tree[1], width=tree[2])
    found = []
    with progress_bar(len(drafts) * len(temperatures) * 4, "halves") as step:
        for draft in drafts:
            for temperature in temperatures:
                trial = Trial(
                    Duet(open_target(target), open_draft(draft, target)),
                    Sampling(temperature=temperature),
                    shape,
                    files,
                    limit,
                    max_tokens,
                    keys,
                )
                found.append(compare(draft, trial, sharpening, bins, step))
    result = {
        "tree": tree,
        "policy": policy,
        "prompts": [str(path) for path in files],
        "limit": limit,
        "comparisons": [comparison.as_json() for comparison in found],
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "reliability.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
        (out / "reliability.svg").write_text(
            draw_panels("Predicted and observed acceptance of a node", [c.panel() for c in found]),
            encoding="utf-8",
        )
        note(f"{out / 'reliability.json'} and reliability.svg are written")
    report(result, as_json, lambda: show(found))


def compare(
    draft: str, trial: "Trial", sharpening: float, bins: int, step: Callable[[str], None]
) -> Comparison:
    """Learn on the first half, judge on the second: what was learned, the fixed sharpening, and
    learning that goes on."""
    step("learns")
    trial.replies(0, trial.shape, learn=True)
    engine: Any = trial.duet.draft.engine
    sampled = trial.sampling.temperature > 0
    score_calibration = deepcopy(
        engine.score_calibration
        # what the held-fast one sees waits to be learned from, and it sees the prompts that are to
        # come
    )
    learned = tuple(
        (s.sharpening, s.noise_share, nodes)
        for s, nodes in zip(
            score_calibration.scales(sampled=sampled),
            score_calibration.nodes(sampled=sampled),
            strict=True,
        )
    )
    fixed = trial.shape.model_copy(update={"sharpening": sharpening})
    judged = []
    for name, tree, learn in (
        ("fitted", trial.shape, False),
        (f"fixed at {sharpening:g}", fixed, False),
        ("learning on", trial.shape, True),
    ):
        step(name)
        engine.score_calibration = score_calibration if learn else engine.score_calibration
        judged.append(Judged.of(name, trial.replies(1, tree, learn=learn), bins))
    return Comparison(draft, trial.sampling.temperature, learned, tuple(judged))


@dataclass(frozen=True)
class Trial:
    """Two workers and what they decode."""

    duet: Duet
    sampling: Sampling
    shape: TreeSettings
    files: Sequence[Path]
    limit: int
    max_tokens: int
    keys: int

    def replies(self, half: int, tree: TreeSettings, *, learn: bool = False) -> list[Reply]:
        """Decode a reply to every second prompt of each file."""
        codec, duet = TextCodec(self.duet.tokenizer, self.duet.vocabulary), self.duet
        prompts = [
            prompt for path in self.files for prompt in read_prompts(path)[: self.limit][half::2]
        ]
        return [
            duet.decode(
                codec.encode_turns(prompt.turns[:1])[: duet.context - self.max_tokens],
                key=key,
                sampling=self.sampling,
                tree=tree,
                max_tokens=self.max_tokens,
                learn=learn,
            )
            for prompt in prompts
            for key in list_keys(prompt.id, self.keys if self.sampling.temperature > 0 else 1)
        ]


def show(found: Sequence[Comparison]) -> None:
    for comparison in found:
        scales = ", ".join(
            f"{sharpening:.2f} / {share:g} ({nodes})"
            for sharpening, share, nodes in comparison.learned
        )
        click.echo(
            f"{comparison.draft} at temperature {comparison.temperature:g}: sharpening / noise "
            f"share (nodes) on levels 1, 2, 3-4, 5-: {scales}"
        )
        bins = [
            (judged.name, bin_) for judged in comparison.judged for bin_ in judged.reliability.bins
        ]
        print_table(
            ("scales", "predicted", "observed", "95 %", "nodes"),
            [_cells(name, bin_) for name, bin_ in bins],
        )
    rows = [_summary(comparison, judged) for comparison in found for judged in comparison.judged]
    print_table(
        ("draft", "temperature", "scales", "calibration error", "log loss", "tau", "nodes"), rows
    )


def _cells(name: str, bin_: Bin) -> tuple[str | int, ...]:
    low, high = bin_.band
    return (
        name,
        f"{bin_.predicted:.3f}",
        f"{bin_.observed:.3f}",
        f"{low:.3f}-{high:.3f}",
        bin_.count,
    )


def _summary(comparison: Comparison, judged: Judged) -> tuple[str | int, ...]:
    found = judged.reliability
    shown = (f"{found.error:.4f}", f"{found.log_loss:.4f}", f"{judged.tau:.2f}")
    return (
        Path(comparison.draft).name,
        f"{comparison.temperature:g}",
        judged.name,
        *shown,
        found.count,
    )
