"""The command `ahead`: what it brings that a draft goes on while its target verifies, over how long
drafting takes beside a pass of the target, T_D/T_V.

The same requests with `draft.ahead` true and false take turns on one stack of processes, the draft
on one core and the target on another. A ratio is made real by the size of the target: with
`draft.ahead` false a tree's drafting and a pass are timed at some sizes of the inflation, and the
size is searched at which they stand as is wanted. T_D is the drafting that a round waits for, T_V
the pass, both means over the rounds with `draft.ahead` false.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.coupling import PROMPTS
from benchmarks.duels import (
    Bout,
    Fights,
    Share,
    as_json,
    bout_of,
    rate_ratio,
    ring,
    settings_of,
)
from benchmarks.figures import ahead_figure
from benchmarks.ledger import Ledger
from benchmarks.measure import Estimate, ratio_of_sums
from benchmarks.options import Command, Numbers, option, options, report
from dovetail.launch.bench.methods import read_prompt_set, tree_of
from dovetail.launch.console.terminal import note, print_table
from dovetail.launch.files.charts import Curve, Panel, check_chart, draw_panels
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import byte_count
from support.inflated import models_at

MIB = 1 << 20
WAITS, GOES_ON = "waits", "goes on"
PROBED = 4
"""Replies from which a size's T_D and T_V are taken."""
CLOSE, TRIES = 0.1, 3
"""A size is good enough when its ratio is so near to the one wanted; else it is searched on, so
many times in all."""


class Ratios(click.ParamType):
    """0.1,0.5: positive numbers."""

    name = "R,R,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(float(part) for part in value.split(",") if part)
        except ValueError:
            found = ()
        if not found or not all(0 < number < 1000 for number in found):
            self.fail(f"{value!r} is no list of positive ratios such as 0.1,0.5,1", param, ctx)
        return found


@click.command(cls=Command)
@option(
    "--draft",
    default="small",
    help="Folder of a draft or head, or a kind that comes with the program.",
)
@option("--target", default="", help="Folder of the target.  [default: the embedded one]")
@option(
    "--weights",
    default="fp32",
    help="Weights of the target; with int8 a pass is short, and larger ratios are within reach.",
)
@option("--ratios", type=Ratios(), default="0.1,0.5,0.75,1,2", help="T_D/T_V wanted.")
@option(
    "--policy",
    "policies",
    multiple=True,
    default=("dynamic", "goodput"),
    help="Policy of the tree; can be repeated. Sizes are found with the first.",
)
@option("--tree", type=Numbers(3), default="15,8,10", help="gamma, depth, width.")
@option(
    "--pairs",
    type=click.IntRange(min=2),
    default=20,
    help="Pairs of replies for each ratio and policy.",
)
@option(
    "--prompts",
    type=click.Path(dir_okay=False, path_type=Path),
    default=PROMPTS,
    help="File of prompts, taken in turn.",
)
@option("--limit", type=click.IntRange(min=1), help="Prompts taken of it.  [default: all]")
@option("--max-tokens", type=click.IntRange(min=2), default=128, help="Tokens of a reply.")
@option(
    "--temperature",
    type=click.FloatRange(min=0.0),
    default=0.0,
    help="Temperature of the sampling.",
)
@option(
    "--smallest", default="32MiB", help="Least inflation; below it the target is taken as it is."
)
@option("--largest", default="1GiB", help="Greatest inflation.")
@option(
    "--ledger",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File that keeps what has been measured; a run that was interrupted goes on.",
)
@option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="SVG file of the ratios over T_D/T_V.",
)
@options("json")
def ahead(
    ratios: tuple[float, ...],
    ledger: Path | None,
    plot: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Tokens/s, tau and exposed drafting with draft.ahead true over those with false, at several
    T_D/T_V."""
    check_chart(plot)
    pair = Pair(settings, Ledger(ledger, {**settings, "prompts": str(settings["prompts"])}))
    found = [row for wanted in ratios for row in pair.rows(wanted)]
    if plot is not None:
        plot.write_text(draw(found), encoding="utf-8")
    report(
        {"settings": {**settings, "prompts": str(settings["prompts"])}, "rows": found},
        as_json,
        lambda: show(found),
    )


# -- sizes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """Milliseconds of a round's drafting that is waited for and of a pass, with a target of so many
    bytes; 0: as it is."""

    size: int
    draft_ms: float
    verify_ms: float

    @property
    def ratio(self) -> float:
        return self.draft_ms / self.verify_ms

    @classmethod
    def of(cls, size: int, shares: Sequence[Share]) -> "Probe":
        rounds, drafted = (
            sum(share.rounds for share in shares),
            sum(share.rounds - share.plain for share in shares),
        )
        return cls(
            size,
            1e3 * sum(share.exposed_s for share in shares) / max(1, drafted),
            1e3 * sum(share.verify_s for share in shares) / rounds,
        )


def size_for(wanted: float, probes: Sequence[Probe], smallest: int, largest: int) -> int:
    """The bytes at which T_D/T_V should be as wanted, in whole MiB: T_V on the straight line
    through the two probes nearest to it, T_D that of the nearest.

    0, the target as it is, where even the smallest inflation is too much; `largest` where no size
    is enough. At least two probes of different sizes.
    """
    near, next_to = sorted(probes, key=lambda probe: abs(probe.ratio / wanted - 1))[:2]
    slope = (next_to.verify_ms - near.verify_ms) / (next_to.size - near.size)
    if slope <= 0:  # noise: the pass does not grow with its bytes between these two
        return near.size
    size = near.size + (near.draft_ms / wanted - near.verify_ms) / slope
    return 0 if size < smallest else min(largest, round(size / MIB) * MIB)


def first_sizes(smallest: int, largest: int) -> tuple[int, ...]:
    """Return the sizes that are probed first: the smallest and a larger one, if there is any."""
    larger = largest // 4 if largest // 4 > smallest else largest
    return tuple(dict.fromkeys((smallest, larger)))


class Pair:
    """A draft and a target whose size can be chosen."""

    def __init__(self, settings: Mapping[str, Any], ledger: Ledger) -> None:
        self._settings, self._ledger = settings, ledger
        self._smallest, self._largest = (
            byte_count(settings[name]) for name in ("smallest", "largest")
        )
        self._prompts = read_prompt_set(settings["prompts"], settings["limit"])

    def rows(self, wanted: float) -> list[dict[str, Any]]:
        """Return the findings at the size whose ratio comes nearest to the one wanted, one for each
        policy."""
        probe = self._nearest(wanted)
        if abs(probe.ratio / wanted - 1) > 2 * CLOSE:
            note(
                f"T_D/T_V {wanted:g} is out of reach: the nearest is {probe.ratio:.2f} "
                f"({told_size(probe.size)}); other --weights or another --tree moves it"
            )
        bouts = self._bouts(probe.size)
        return [
            {"wanted": wanted, "size": probe.size, "policy": policy, **judged(bouts, policy)}
            for policy in self._settings["policies"]
        ]

    def _nearest(self, wanted: float) -> Probe:
        probes = [self._probe(size) for size in first_sizes(self._smallest, self._largest)]
        for _ in range(TRIES if len(probes) > 1 else 0):
            if min(abs(probe.ratio / wanted - 1) for probe in probes) <= CLOSE:
                break
            size = size_for(wanted, probes, self._smallest, self._largest)
            if any(probe.size == size for probe in probes):
                break
            probes.append(self._probe(size))
        return min(probes, key=lambda probe: abs(probe.ratio / wanted - 1))

    def _probe(self, size: int) -> Probe:
        name = f"probe {size}"
        if name not in self._ledger:
            policy = self._settings["policies"][0]
            with ring(self._configuration(size), {WAITS: _wish(policy, goes_on=False)}) as found:
                shares = [bout[WAITS] for bout in self._take(Fights(found), PROBED)]
            probe = Probe.of(size, shares)
            self._ledger.add(name, asdict(probe))
            note(
                f"{told_size(size)}: T_D {probe.draft_ms:.2f} ms, T_V {probe.verify_ms:.2f} "
                f"ms, T_D/T_V {probe.ratio:.2f}"
            )
        return Probe(**self._ledger.found[name])

    def _bouts(self, size: int) -> list[Bout]:
        name = f"bouts {size}"
        if name not in self._ledger:
            policies = self._settings["policies"]
            variants = {
                _name(policy, goes_on): _wish(policy, goes_on=goes_on)
                for policy in policies
                for goes_on in (False, True)
            }
            with ring(self._configuration(size), variants) as found:
                bouts = self._take(Fights(found), self._settings["pairs"])
            self._ledger.add(name, [as_json(bout) for bout in bouts])
            note(f"{told_size(size)}: {len(bouts)} pairs")
        return [bout_of(bout) for bout in self._ledger.found[name]]

    def _take(self, fights: Fights, count: int) -> list[Bout]:
        """Take so many bouts, the prompts in turn, each time round with another seed; prompts that
        are answered by one token are passed over."""
        prompts, bouts = self._prompts, list[Bout]()
        for number in range(2 * count):
            turn, place = divmod(number, len(prompts.prompts))
            bout = fights.bout(
                prompts, prompts.prompts[place], self._settings["temperature"], turn, number
            )
            bouts += [bout] if bout is not None else []
            if len(bouts) == count:
                break
        if not bouts:
            raise UserError(
                f"no prompt of {self._settings['prompts']} has a reply of several tokens: "
                "choose others, or a larger --max-tokens"
            )
        return bouts

    def _configuration(self, size: int) -> Configuration:
        settings = self._settings
        gamma, depth, width = settings["tree"]
        target = {
            "target.model": settings["target"],
            "target.weights": settings["weights"],
        }
        shape = {
            "tree.gamma": gamma,
            "tree.depth": depth,
            "tree.width": width,
            "sampling.max_tokens": settings["max_tokens"],
        }
        inflate = f"{size // MIB}MiB" if size and not settings["target"] else ""
        models = models_at(inflate, settings["draft"])
        return settings_of({**target, **shape, **models})


def _name(policy: str, goes_on: bool) -> str:
    return f"{policy} {GOES_ON if goes_on else WAITS}"


def _wish(policy: str, *, goes_on: bool) -> dict[str, Any]:
    return {**tree_of(policy), "draft.ahead": goes_on}


def told_size(size: int) -> str:
    return f"inflated to {size // MIB} MiB" if size else "as it is"


# -- what came of it -------------------------------------------------------------------------------


def judged(bouts: Sequence[Bout], policy: str) -> dict[str, Any]:
    """The ratios of a policy, and whether they are as they should be."""
    waits, goes_on = ([bout[_name(policy, ahead)] for bout in bouts] for ahead in (False, True))
    probe = Probe.of(0, waits)
    rate = rate_ratio(bouts, _name(policy, True), _name(policy, False))
    tau = ratio_of_sums(
        [(s.tokens, s.rounds) for s in goes_on], [(s.tokens, s.rounds) for s in waits]
    )
    exposed = ratio_of_sums(
        [(s.exposed_s, s.tokens) for s in goes_on], [(s.exposed_s, s.tokens) for s in waits]
    )
    drafted = sum(s.rounds - s.plain for s in goes_on)
    return {
        "pairs": len(bouts),
        "t_d_ms": probe.draft_ms,
        "t_v_ms": probe.verify_ms,
        "ratio": probe.ratio,
        "tokens_per_s": [
            sum(s.tokens for s in side) / sum(s.seconds for s in side) for side in (waits, goes_on)
        ],
        "rate": rate.as_json(),
        "tau": tau.as_json(),
        "exposed": exposed.as_json(),
        "hit_rate": sum((s.hit_rate or 0.0) * (s.rounds - s.plain) for s in goes_on) / drafted
        if drafted
        else None,
        "grown": sum(s.grown for s in goes_on),
        "ahead": sum(s.ahead for s in goes_on),
        "wasted": sum(s.wasted for s in goes_on),
        "holds": holds(probe.ratio, rate, tau, exposed),
    }


def holds(drafting: float, rate: Estimate, tau: Estimate, exposed: Estimate) -> bool:
    """Return whether the figure for this T_D/T_V is reached."""
    figure = ahead_figure(drafting)
    reached = rate.reaches(figure.rate) and (figure.tau is None or tau.reaches(figure.tau))
    return reached and (figure.exposed is None or exposed.holds(figure.exposed))


def show(found: Sequence[Mapping[str, Any]]) -> None:
    cells = []
    for told in found:
        ratios = (str(Estimate(**told[name])) for name in ("rate", "tau", "exposed"))
        rates = " / ".join(f"{rate:.1f}" for rate in told["tokens_per_s"])
        nodes = f"{told['grown']} / {told['ahead']} / {told['wasted']}"
        hits = "-" if told["hit_rate"] is None else f"{told['hit_rate']:.0%}"
        where = (
            told["policy"],
            f"{told['ratio']:.2f}",
            told_size(told["size"]),
            f"{told['t_d_ms']:.2f}",
            f"{told['t_v_ms']:.2f}",
            told["pairs"],
        )
        cells.append((*where, rates, *ratios, hits, nodes, "yes" if told["holds"] else "NO"))
    about = ("policy", "T_D/T_V", "target", "T_D ms", "T_V ms", "pairs", "tokens/s waiting / ahead")
    print_table(
        (*about, "rate", "tau", "exposed", "hits", "exposed / ahead / wasted nodes", "holds"), cells
    )


def draw(found: Sequence[Mapping[str, Any]]) -> str:
    """Ahead over waiting, against T_D/T_V: a curve for each policy."""
    across = "T_D/T_V, drafting over a pass of the target"
    panels = (
        Panel("Tokens per second", across, "ahead over waiting", _curves(found, "rate"), level=1.0),
        Panel(
            "Tokens a round, tau", across, "ahead over waiting", _curves(found, "tau"), level=1.0
        ),
        Panel(
            "Drafting that is waited for",
            across,
            "ahead over waiting",
            _curves(found, "exposed"),
            level=1.0,
        ),
        Panel("Rounds whose root had been foreseen", across, "share", _curves(found, "hit_rate")),
    )
    return draw_panels("Drafting while the target verifies", panels)


def _curves(found: Sequence[Mapping[str, Any]], name: str) -> list[Curve]:
    curves = []
    for policy in dict.fromkeys(told["policy"] for told in found):
        rows = sorted(
            (told for told in found if told["policy"] == policy and told[name] is not None),
            key=lambda told: float(told["ratio"]),
        )
        if name == "hit_rate":
            curves.append(Curve(policy, [(told["ratio"], told[name]) for told in rows]))
        else:
            band = [(told[name]["low"], told[name]["high"]) for told in rows]
            curves.append(
                Curve(policy, [(told["ratio"], told[name]["median"]) for told in rows], band=band)
            )
    return curves
