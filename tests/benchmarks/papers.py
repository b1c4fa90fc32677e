"""The command `papers`: a table like the papers' (Dovetail's Tables 3 and 6, Jakiro's 3 and 4) from
heads that were trained for one small target.

Every row is a method of `dovetail bench`, through real processes and in turns, all with the same
tree. What the heads are: `HEADS`.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import click

from benchmarks.coupling import PROMPTS
from benchmarks.measure import estimate, ratio_of_sums
from benchmarks.options import Command, Numbers, option, options, report
from dovetail.launch.bench.contenders import Contender, Ours, contenders
from dovetail.launch.bench.figures import baseline, row
from dovetail.launch.bench.methods import NONE, Method, PromptSet, read_method, tree_of
from dovetail.launch.bench.turns import Cell, measure
from dovetail.launch.console.terminal import note
from dovetail.launch.files.charts import Curve, check_charts, draw
from dovetail.launch.files.prompts import Prompt, read_prompts
from dovetail.launch.settings.configure import Configuration, configure
from dovetail.launch.settings.embedded import DEMO_FOLDER
from dovetail.protocol.errors import UserError
from support.inflated import kept_pair

PASSES, ROUND = ("root", "level"), "draft"
"""Spans of a draft worker: levels, and the whole of a round."""


@dataclass(frozen=True)
class Head:
    """A row of the table: what it is called, where its weights are, and how they come about."""

    name: str
    folder: str
    family: str
    """Rows of a family are a curve of the plot."""
    training: str
    """The arguments of `dovetail train` that train it."""
    settings: Mapping[str, Any]
    foretells: bool = False
    """True if the last level of a tree needs no pass."""


HEADS = (
    Head("EAGLE-2", "eagle", "EAGLE-2", "eagle", {}),
    Head("w/ DGF (Dovetail)", "dovetail-1", "Dovetail", "dovetail --blocks 1", {}),
    Head("w/ DGF + 1", "dovetail-2", "Dovetail", "dovetail --blocks 2", {}),
    Head("w/ DGF + 2", "dovetail-3", "Dovetail", "dovetail --blocks 3", {}),
    Head("EAGLE-3", "eagle3", "EAGLE-3", "eagle3", {}),
    Head("Jakiro", "jakiro-2", "Jakiro", "jakiro --experts 2", {}, foretells=True),
    Head(
        "Jakiro w/o contrast",
        "jakiro-2-plain",
        "w/o contrast",
        "jakiro --experts 2 --no-contrast",
        {},
    ),
    Head(
        "Jakiro w/o parallel last step",
        "jakiro-2",
        "w/o parallel step",
        "jakiro --experts 2",
        {"draft.contrast": False},
    ),
    Head("Jakiro, 3 experts", "jakiro-3", "Jakiro", "jakiro --experts 3", {}, foretells=True),
    Head("Jakiro, 4 experts", "jakiro-4", "Jakiro", "jakiro --experts 4", {}, foretells=True),
)
SMALL = "small model"
FINDINGS = (
    ("w/ DGF (Dovetail)", "EAGLE-2", "gated fusion over concatenation"),
    ("w/ DGF + 1", "w/ DGF (Dovetail)", "a second block"),
    ("w/ DGF + 2", "w/ DGF + 1", "a third block"),
    ("EAGLE-3", "EAGLE-2", "three residual streams over the last state"),
    ("Jakiro w/o contrast", "EAGLE-2", "experts"),
    ("Jakiro w/o parallel last step", "Jakiro w/o contrast", "training with the contrast"),
    ("Jakiro", "Jakiro w/o parallel last step", "the last level without its pass"),
    ("Jakiro, 3 experts", "Jakiro", "a third expert"),
    ("Jakiro, 4 experts", "Jakiro, 3 experts", "a fourth expert"),
)
"""(row, the row that it is compared with, what they differ in): what the papers report on, about 1
for the last level, above 1 else."""


@click.command(cls=Command)
@option(
    "--heads",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder that holds the heads: " + ", ".join(h.folder for h in HEADS) + ".",
)
@option("--small", default=str(DEMO_FOLDER / "draft"), help="Folder of the small model.")
@option("--target", default="", help="Folder of the target.  [default: the embedded one]")
@option("--inflate", default="", help="Size to which the target is inflated, such as 512MiB.")
@option(
    "--prompts",
    "files",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    default=(PROMPTS,),
    help="File of prompts; can be repeated.",
)
@option("--limit", type=click.IntRange(min=1), help="Prompts taken of each file.  [default: all]")
@option("--max-tokens", type=click.IntRange(min=2), default=192, help="Tokens of a reply.")
@option(
    "--temperature",
    "temperatures",
    multiple=True,
    type=float,
    default=(0.0, 1.0),
    help="Can be repeated.",
)
@option("--tree", type=Numbers(3), default="15,8,10", help="gamma, depth, width.")
@option(
    "--repeat",
    type=click.IntRange(min=1),
    default=1,
    help="Times that every prompt is decoded with every method.",
)
@option("--seed", type=click.IntRange(min=0), default=0, help="Seed of every reply.")
@option(
    "--only", multiple=True, help="Rows to take, by the beginning of their names; can be repeated."
)
@option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for papers.md, papers.json and a plot for each temperature.",
)
@options("json")
def papers(
    heads: Path,
    files: Sequence[Path],
    limit: int | None,
    temperatures: Sequence[float],
    repeat: int,
    seed: int,
    only: Sequence[str],
    out: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """tau, tokens/s and the cost of drafting of every kind of head, side by side: DGF, blocks,
    taps, experts, contrast, the parallel last step."""
    if out is not None:
        check_charts("the plots of --out")
    base = configuration(**settings)
    methods, missing = rows_of(base, heads, settings["small"], only)
    sets = [PromptSet(path.stem, tuple(read_prompts(path)[:limit])) for path in files]
    with contenders([read_method(base, NONE), *(method for method, _ in methods)]) as found:
        cells = list(measure(found, sets, temperatures, repeat, seed))
        heads_of = {method.label: head for method, head in methods}
        told = [
            Row.of(
                cell,
                baseline(cells, cell),
                found[cell.method.label],
                seed,
                heads_of[cell.method.label],
            )
            for cell in cells
            if cell.method.name != NONE
        ]
        findings = [found for temperature in temperatures for found in compared(cells, temperature)]
        passes = {
            method.name: draft_passes(found[method.label], head, sets[0].prompts[0], seed)
            for method, head in methods
        }
    result = {
        "tree": settings["tree"],
        "inflate": settings["inflate"],
        "prompts": {s.name: len(s.prompts) for s in sets},
        "rows": [{**r.as_json(), **passes[r.name]} for r in told],
        "findings": findings,
        "missing": missing,
    }
    text = markdown(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "papers.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
        (out / "papers.md").write_text(text, encoding="utf-8")
        for temperature in temperatures:
            (out / f"papers-t{temperature:g}.svg").write_text(
                plot(result["rows"], temperature), encoding="utf-8"
            )
    report(result, as_json, lambda: click.echo(text))
    for line in missing:
        note(line)


# -- rows ------------------------------------------------------------------------------------------


def configuration(
    *, target: str, inflate: str, max_tokens: int, tree: tuple[int, int, int], small: str
) -> Configuration:
    """The settings that all rows share. As in the papers nothing is fitted to what the target
    accepts, and a draft waits while its target verifies."""
    gamma, depth, width = tree
    values = {
        "target.model": target or (str(kept_pair(inflate) / "target") if inflate else ""),
        "draft.model": small,
        "draft.device": "cpu",
        "draft.ahead": False,
    }
    shape = {
        **tree_of("dynamic"),
        "tree.gamma": gamma,
        "tree.depth": depth,
        "tree.width": width,
        "tree.sharpening": 1.0,
    }
    return configure(environment={}).over(
        "papers", {**values, **shape, "sampling.max_tokens": max_tokens}
    )


def rows_of(
    base: Configuration, heads: Path, small: str, only: Sequence[str]
) -> tuple[list[tuple[Method, Head | None]], list[str]]:
    """The rows whose heads are there, and for each of the others how to make it."""
    chosen: list[tuple[Method, Head | None]] = []
    missing = []
    if _wanted(SMALL, only):
        chosen.append((replace(read_method(base, small), name=SMALL), None))
    for head in HEADS:
        folder = heads / head.folder
        if not _wanted(head.name, only):
            continue
        if (folder / "config.json").is_file():
            method = read_method(base, str(folder))
            chosen.append(
                (Method(head.name, method.configuration.over("papers", head.settings)), head)
            )
        else:
            missing.append(
                f"{head.name}: {folder} is missing; make it with dovetail train "
                f"{head.training} --features FOLDER --out {folder}"
            )
    if not chosen:
        raise UserError(
            f"there is nothing to measure in {heads}: "
            + "; ".join(missing or ["no row begins with what --only says"])
        )
    return chosen, missing


def _wanted(name: str, only: Sequence[str]) -> bool:
    return not only or any(name.startswith(beginning) for beginning in only)


@dataclass(frozen=True)
class Row:
    """A method on a set of prompts at a temperature."""

    name: str
    family: str
    measured: Mapping[str, Any]
    parameters: int
    trained: Mapping[str, Any]
    draft_ms: float
    """Milliseconds of a round from the verdict's arrival at the draft worker to the proposal's
    departure."""

    @classmethod
    def of(
        cls, cell: Cell, alone: Cell, contender: Contender, seed: int, head: Head | None
    ) -> "Row":
        folder = Path(cell.method.configuration.settings.draft.model)
        results = [run.finished.result for run in cell.runs]
        draft_ms = (
            1e3 * sum(r.draft_exposed_s for r in results) / max(1, sum(r.rounds for r in results))
        )
        return cls(
            cell.method.name,
            head.family if head else SMALL,
            row(cell, alone, contender, seed),
            parameters(folder),
            training_of(folder),
            draft_ms,
        )

    def as_json(self) -> dict[str, Any]:
        return {
            **self.measured,
            "method": self.name,
            "family": self.family,
            "parameters": self.parameters,
            "draft_ms": self.draft_ms,
            "trained": self.trained,
        }


def compared(cells: Sequence[Cell], temperature: float) -> Iterator[dict[str, Any]]:
    """The ratios of tau that the papers report on, prompt by prompt over all sets."""
    rounds: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        if cell.temperature == temperature:
            rounds.setdefault(cell.method.name, []).extend(
                (run.decoded_tokens, run.finished.result.rounds) for run in cell.runs
            )
    for name, other, what in FINDINGS:
        if name in rounds and other in rounds:
            ratio = ratio_of_sums(rounds[name], rounds[other])
            yield {
                "what": what,
                "method": name,
                "against": other,
                "temperature": temperature,
                "tau": ratio.as_json(),
            }


def parameters(folder: Path) -> int:
    """Numbers in the checkpoint: what was learned, since heads leave out what is their target's."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        total += sum(
            prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"
        )
    return total


def training_of(folder: Path) -> dict[str, Any]:
    """Return what the head's folder says of its training (steps, tokens, minutes), or nothing."""
    file = folder / "training.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))["outcome"]) if file.is_file() else {}


def draft_passes(
    contender: Contender, head: Head | None, prompt: Prompt, seed: int
) -> dict[str, float | None]:
    """Passes of the draft a round and milliseconds of one, from the spans of a reply of its own
    that is timed for nothing else."""
    assert isinstance(contender, Ours)
    settings, client = contender.method.configuration.settings, contender.connection.client
    sampling = settings.sampling
    request = client.submit(
        turns=prompt.turns[:1],
        sampling=sampling,
        tree=settings.tree,
        max_tokens=sampling.max_tokens,
        seed=seed,
        trace=True,
    )
    spans = [
        (seen.span[0], seen.span[2])
        for seen in client.complete(request).spans
        if seen.process == "draft"
    ]
    passes = list(
        passes_of(spans, settings.tree.depth if head is not None and head.foretells else 0)
    )
    milliseconds = [duration / 1e6 for one_round in passes for duration in one_round]
    if not milliseconds:
        return {"passes": None, "pass_ms": None}
    return {"passes": len(milliseconds) / len(passes), "pass_ms": estimate(milliseconds).median}


def passes_of(spans: Sequence[tuple[str, int]], foretold: int) -> Iterator[list[int]]:
    """Nanoseconds of the passes of each round; the level number `foretold`, if there is one, needs
    none. A round's own span ends it."""
    passes: list[int] = []
    for name, duration in spans:
        if name in PASSES:
            passes.append(duration)
        elif name == ROUND:
            yield passes[: foretold - 1] if foretold else passes
            passes = []


# -- how it is told --------------------------------------------------------------------------------


def markdown(result: Mapping[str, Any]) -> str:
    """The table: a line for each row, columns for each set of prompts and temperature."""
    rows: Sequence[Mapping[str, Any]] = result["rows"]
    where = list(dict.fromkeys((told["prompts"], told["temperature"]) for told in rows))
    titles = [
        "method",
        "parameters",
        "passes",
        "ms a pass",
        *(
            f"{prompts} T={t:g} {what}"
            for prompts, t in where
            for what in ("tau", "tokens/s", "speed-up")
        ),
    ]
    lines = [_line(titles), _line(["---", *["---:"] * (len(titles) - 1)])]
    for name in dict.fromkeys(told["method"] for told in rows):
        own = {
            (told["prompts"], told["temperature"]): told for told in rows if told["method"] == name
        }
        first = next(iter(own.values()))
        cells = [
            name,
            f"{first['parameters']:,}",
            _number(first["passes"], 1),
            _number(first["pass_ms"], 2),
        ]
        for at in where:
            cells += [
                _number(own[at]["tau"], 2),
                _number(own[at]["tokens_per_s"], 1),
                _interval(own[at]),
            ]
        lines.append(_line(cells))
    gamma, depth, width = result["tree"]
    about = f"Tree {gamma}/{depth}/{width}; " + (
        f"target inflated to {result['inflate']}; " if result["inflate"] else ""
    )
    sets = ", ".join(f"{name} ({count})" for name, count in result["prompts"].items())
    notes = (
        f"{about}prompts: {sets}. Speed-up over the target alone, with the 95 % interval "
        "of a bootstrap over prompts."
    )
    return "\n".join((*lines, "", notes, "", *_findings(result["findings"]), ""))


def _findings(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table of the ratios of tau: a line for each pair of rows, a column for each temperature."""
    heats = list(dict.fromkeys(found["temperature"] for found in findings))
    yield _line(["what differs", "rows", *(f"ratio of tau at T={t:g} (95 %)" for t in heats)])
    yield _line(["---", "---", *["---:"] * len(heats)])
    for what in dict.fromkeys(found["what"] for found in findings):
        same = [found for found in findings if found["what"] == what]
        ratios = ["{median:.3f} ({low:.3f}-{high:.3f})".format(**found["tau"]) for found in same]
        yield _line([what, f"{same[0]['method']} against {same[0]['against']}", *ratios])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _interval(told: Mapping[str, Any]) -> str:
    return (
        "-"
        if told["speedup"] is None
        else f"{told['speedup']:.2f} ({told['speedup_low']:.2f}-{told['speedup_high']:.2f})"
    )


def plot(rows: Sequence[Mapping[str, Any]], temperature: float) -> str:
    """tau against the size of the draft, averaged over the sets of prompts; a curve for each
    family."""
    points: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for told in rows:
        if told["temperature"] == temperature and told["tau"] is not None:
            points.setdefault(told["family"], {}).setdefault(told["method"], []).append(told)
    curves = []
    for family, methods in points.items():
        middles = [
            (sets[0]["parameters"] / 1e6, sum(told["tau"] for told in sets) / len(sets))
            for sets in methods.values()
        ]
        curves.append(Curve(family, sorted(middles)))
    return draw(
        f"Committed tokens a round at temperature {temperature:g}",
        "parameters of the draft (millions)",
        "tau",
        curves,
    )
