"""The command `goodput`: whether a tree sized by what pays is as good as the best of fixed size,
and never worse than none.

Fixed trees of all sizes of a grid (`dynamic`), the papers' preset, `heterospec`, `goodput` and the
target alone take turns, reply by reply, on one stack of processes. The best fixed tree is picked on
one half of the prompts of a set and judged on the other, both ways round; `goodput` is told no size
but the largest. A draft that guesses at random shows what speculation costs where it cannot pay.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from benchmarks.adversary import write_adversary
from benchmarks.coupling import PROMPTS
from benchmarks.duels import Bout, Fights, as_json, bout_of, rate_ratio, ring, settings_of
from benchmarks.figures import ADVERSARY, BEST_FIXED, RIVALS
from benchmarks.ledger import Ledger
from benchmarks.measure import Estimate, ratio
from benchmarks.options import Command, Numbers, option, options, report
from dovetail.launch.bench.methods import NONE, PromptSet, read_prompt_set, tree_of
from dovetail.launch.console.terminal import note, print_table
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.embedded import DEMO_FOLDER
from dovetail.protocol.errors import UserError
from support.inflated import models_at

GOODPUT, PRESET, HETEROSPEC = "goodput", "preset", "heterospec"
ADVERSARIAL = "random draft"
Shape = tuple[int, int, int]


@click.command(cls=Command)
@option(
    "--draft",
    default="small",
    help="Folder of a draft or head, or a kind that comes with the program.",
)
@option("--target", default="", help="Folder of the target.  [default: the embedded one]")
@option("--weights", default="fp32", help="Weights of the target.")
@option(
    "--inflate", default="512MiB", help="Size to which the target is inflated; empty: as it is."
)
@option(
    "--prompts",
    "files",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    default=(PROMPTS,),
    help="File of prompts; can be repeated.",
)
@option("--limit", type=click.IntRange(min=2), help="Prompts taken of each file.  [default: all]")
@option("--max-tokens", type=click.IntRange(min=2), default=96, help="Tokens of a reply.")
@option(
    "--temperature",
    "temperatures",
    multiple=True,
    type=float,
    default=(0.0,),
    help="Can be repeated.",
)
@option(
    "--repeat",
    type=click.IntRange(min=1),
    default=1,
    help="Times that every prompt is decoded with every method.",
)
@option("--gammas", type=Numbers(), default="2,4,8,15,31", help="Gammas of the fixed trees.")
@option(
    "--depths",
    type=Numbers(),
    default="2,4,8",
    help="Depths of the fixed trees; those above gamma are left out.",
)
@option("--widths", type=Numbers(), default="4,10", help="Widths of the fixed trees.")
@option(
    "--preset",
    type=Numbers(3),
    default="15,8,10",
    help="gamma, depth, width of the papers' preset.",
)
@option(
    "--heterospec",
    type=Numbers(3),
    default="15,8,4",
    help="gamma, depth, width of heterospec; those of its thresholds.",
)
@option(
    "--most",
    type=Numbers(3),
    default="63,16,10",
    help="gamma, depth, width that goodput may not exceed.",
)
@option(
    "--no-heterospec",
    is_flag=True,
    help="Leave heterospec out, for a draft that has no thresholds.",
)
@option("--no-adversary", is_flag=True, help="Leave the random draft out.")
@option(
    "--ledger",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File that keeps what has been measured; a run that was interrupted goes on.",
)
@options("json")
def goodput(
    files: Sequence[Path],
    temperatures: Sequence[float],
    ledger: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Tokens/s of goodput over those of the best fixed tree, the preset and heterospec on each set
    of prompts, and of a random draft over none."""
    sets = [read_prompt_set(path, settings["limit"]) for path in files]
    kept = Ledger(ledger, {**settings, "files": [str(path) for path in files]})
    every = variants(settings)
    with ring(configuration(settings), every) as found:
        bouts = taken(Fights(found), sets, temperatures, settings["repeat"], kept)
    fixed = [name for name in every if name not in (GOODPUT, PRESET, HETEROSPEC)]
    rows = [
        {"prompts": name, "temperature": heat, **judged(those, fixed)}
        for (name, heat), those in bouts.items()
    ]
    random = [] if settings["no_adversary"] else adversarial(settings, sets, temperatures, kept)
    report(
        {"settings": settings, "rows": rows, "adversary": random},
        as_json,
        lambda: show(rows, random),
    )


# -- what is measured ------------------------------------------------------------------------------


def configuration(settings: Mapping[str, Any]) -> Configuration:
    """Return the settings that all methods share."""
    target = {
        "target.model": settings["target"],
        "target.weights": settings["weights"],
    }
    inflate = "" if settings["target"] else settings["inflate"]
    models = models_at(inflate, settings["draft"])
    return settings_of({**target, **models, "sampling.max_tokens": settings["max_tokens"]})


def variants(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The methods by name: fixed trees as gamma/depth/width, and those that they are held
    against."""
    shapes = [
        shape
        for shape in product(settings["gammas"], settings["depths"], settings["widths"])
        if shape[1] <= shape[0]
    ]
    found = {"/".join(map(str, shape)): tree("dynamic", shape) for shape in shapes}
    found[PRESET] = tree("dynamic", settings["preset"])
    if not settings["no_heterospec"]:
        found[HETEROSPEC] = tree("heterospec", settings["heterospec"])
    found[GOODPUT] = tree("goodput", settings["most"])
    return found


def tree(policy: str, shape: Shape) -> dict[str, Any]:
    gamma, depth, width = shape
    return {**tree_of(policy), "tree.gamma": gamma, "tree.depth": depth, "tree.width": width}


Place = tuple[str, float]
"""Set of prompts and temperature."""


def taken(
    fights: Fights,
    sets: Sequence[PromptSet],
    temperatures: Sequence[float],
    repeat: int,
    kept: Ledger,
    prefix: str = "",
) -> dict[Place, list[list[Bout]]]:
    """The bouts of every set and temperature, prompt by prompt; those in the ledger are not fought
    again."""
    found: dict[Place, list[list[Bout]]] = {}
    for prompts, heat in product(sets, temperatures):
        for number, prompt in enumerate(prompts.prompts):
            name = f"{prefix}{prompts.name} T {heat:g} {prompt.id}"
            if name not in kept:
                fought = [
                    fights.bout(prompts, prompt, heat, turn, number + turn)
                    for turn in range(repeat)
                ]
                kept.add(name, [as_json(bout) for bout in fought if bout is not None])
                note(f"{name}: {number + 1} of {len(prompts.prompts)}")
            found.setdefault((prompts.name, heat), []).append(
                [bout_of(bout) for bout in kept.found[name]]
            )
    return found


def adversarial(
    settings: Mapping[str, Any],
    sets: Sequence[PromptSet],
    temperatures: Sequence[float],
    kept: Ledger,
) -> list[dict[str, Any]]:
    """goodput with a draft that guesses at random, over the target alone."""
    target = Path(settings["target"] or DEMO_FOLDER / "target")
    if not (target / "config.json").is_file():
        note(f"no random draft is made: the target {settings['target']} is no folder")
        return []
    with TemporaryDirectory(prefix="dovetail-benchmark-") as folder:
        draft = str(write_adversary(Path(folder) / "draft", target))
        with ring(
            configuration({**settings, "draft": draft}),
            {GOODPUT: tree("goodput", settings["most"])},
        ) as found:
            bouts = taken(
                Fights(found), sets, temperatures, settings["repeat"], kept, f"{ADVERSARIAL} "
            )
    return [
        {"prompts": name, "temperature": heat, **against_none(flat(those))}
        for (name, heat), those in bouts.items()
        if flat(those)
    ]


# -- what came of it -------------------------------------------------------------------------------


def judged(prompts: Sequence[Sequence[Bout]], fixed: Sequence[str]) -> dict[str, Any]:
    """goodput against the others; `prompts`: the bouts of each prompt of a set; `UserError` if
    fewer than two have any."""
    answered = [bouts for bouts in prompts if bouts]
    if len(answered) < 2:
        raise UserError(
            f"{len(answered)} of {len(prompts)} prompts have a reply of several tokens, and "
            "two are needed to pick on one half and judge on the other"
        )
    halves = [answered[half::2] for half in (0, 1)]
    picked = [best_on(flat(half), fixed) for half in halves]
    pairs = [
        (bout[GOODPUT].rate, bout[best].rate)
        for half, best in zip(halves, reversed(picked), strict=True)
        for bout in flat(half)
    ]
    everything = flat(prompts)
    best = ratio([ours for ours, _ in pairs], [theirs for _, theirs in pairs])
    told: dict[str, Any] = {
        "pairs": len(pairs),
        "tokens_per_s": {name: rate_of(everything, name) for name in everything[0]},
        "tau": {name: tau_of(everything, name) for name in everything[0]},
        "plain_share": plain_share(everything),
        "picked": picked,
        "best_fixed": {**best.as_json(), "holds": best.reaches(BEST_FIXED)},
    }
    for rival in (PRESET, HETEROSPEC):
        if rival in everything[0]:
            found = rate_ratio(everything, GOODPUT, rival)
            told[rival] = {**found.as_json(), "holds": found.reaches(RIVALS)}
    return {**told, **against_none(everything)}


def best_on(bouts: Sequence[Bout], names: Sequence[str]) -> str:
    """The method with the most tokens in its time."""
    return max(names, key=lambda name: rate_of(bouts, name))


def against_none(bouts: Sequence[Bout]) -> dict[str, Any]:
    """goodput over the target alone: what holds where speculation cannot pay holds anywhere."""
    found = rate_ratio(bouts, GOODPUT, NONE)
    return {
        "alone": {**found.as_json(), "holds": found.reaches(ADVERSARY)},
        "plain_share": plain_share(bouts),
    }


def rate_of(bouts: Sequence[Bout], name: str) -> float:
    return sum(bout[name].tokens for bout in bouts) / sum(bout[name].seconds for bout in bouts)


def tau_of(bouts: Sequence[Bout], name: str) -> float:
    return sum(bout[name].tokens for bout in bouts) / sum(bout[name].rounds for bout in bouts)


def plain_share(bouts: Sequence[Bout]) -> float:
    """The rounds of goodput in which nothing was drafted."""
    return sum(bout[GOODPUT].plain for bout in bouts) / sum(bout[GOODPUT].rounds for bout in bouts)


def flat(prompts: Sequence[Sequence[Bout]]) -> list[Bout]:
    return [bout for bouts in prompts for bout in bouts]


# -- how it is told --------------------------------------------------------------------------------


def show(rows: Sequence[Mapping[str, Any]], random: Sequence[Mapping[str, Any]]) -> None:
    headings = (
        "prompts",
        "T",
        "pairs",
        "goodput tokens/s",
        "tau",
        "plain",
        "picked",
        "/ best fixed",
        "/ preset",
        "/ heterospec",
        "/ alone",
    )
    print_table(headings, [(*_place(told), *_line(told)) for told in rows])
    if random:
        print_table(
            ("random draft", "T", "/ alone", "plain"),
            [
                (*_place(told), _cell(told, "alone"), f"{told['plain_share']:.0%}")
                for told in random
            ],
        )


def _place(told: Mapping[str, Any]) -> tuple[str, str]:
    return told["prompts"], f"{told['temperature']:g}"


def _line(told: Mapping[str, Any]) -> Iterator[object]:
    yield told["pairs"]
    yield f"{told['tokens_per_s'][GOODPUT]:.1f}"
    yield f"{told['tau'][GOODPUT]:.2f}"
    yield f"{told['plain_share']:.0%}"
    yield ", ".join(dict.fromkeys(told["picked"]))
    yield from (_cell(told, name) for name in ("best_fixed", PRESET, HETEROSPEC, "alone"))


def _cell(told: Mapping[str, Any], name: str) -> str:
    if name not in told:
        return "-"
    figures = {key: value for key, value in told[name].items() if key != "holds"}
    return f"{Estimate(**figures)} {'yes' if told[name]['holds'] else 'NO'}"
