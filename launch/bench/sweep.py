"""`dovetail bench --sweep`: one size of the tree for a list of values, as in Figure 3 of the
Dovetail paper (gamma) and Figure 6 of SubSpec (depth). Every value is a method, and all share
processes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dovetail.launch.bench.figures import interval, number, share
from dovetail.launch.bench.methods import NONE, Method
from dovetail.launch.console.terminal import print_table
from dovetail.launch.files.charts import Bar, Curve, Group, Panel, draw_bars, draw_panels
from dovetail.launch.settings.configure import parse_setting
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import MAX_GAMMA, Settings

VALUES = {"gamma": "1,2,4,6,8,12,16,24,32,48,63", "depth": "1,2,3,4,6,8,12,16,24,32,48"}
"""Swept setting -> default values: gamma to the last tree of 64 rows, depth to SubSpec's."""
TAKEN = (
    *("prompts", "temperature"),
    *("tau", "tokens_per_s", "speedup", "speedup_low", "speedup_high", "hit_rate"),
    *("calls", "verified_tokens", "draft_failures"),
)
"""Fields of a row that belong to a point."""


@dataclass(frozen=True)
class Sweep:
    """The swept setting, and its values."""

    name: str
    values: tuple[int, ...]

    @property
    def setting(self) -> str:
        return f"tree.{self.name}"

    def varies(self, method: Method) -> bool:
        return method.ours and method.drafts

    def points(self, method: Method) -> list[Method]:
        """The method with each of the values, named in the form of `--method`."""
        if method.configuration.origins[self.setting].startswith("--method"):
            raise UserError(
                f"--method {method.name} sets {self.setting}, which --sweep {self.name} varies"
            )
        tree, by_file = method.configuration.settings.tree, method.configuration.thresholds
        if self.name == "depth" and tree.traits.by_entropy and isinstance(by_file, str):
            raise UserError(
                f"--sweep depth: the thresholds of heterospec ({method.name}) hold for one depth, "
                f"here {tree.depth}: sweep gamma, use another policy, or give them as numbers"
            )
        return [self._point(method, value) for value in self.values]

    def _point(self, method: Method, value: int) -> Method:
        """A beam offers all its levels, so more levels mean more nodes."""
        tree = method.configuration.settings.tree
        values = {self.setting: value}
        if self.name == "depth" and tree.traits.full_levels:
            values["tree.gamma"] = min(MAX_GAMMA, value * tree.width)
        name = ",".join((method.name, *(f"{setting}={value}" for setting, value in values.items())))
        return replace(
            method,
            name=name,
            configuration=method.configuration.over("--sweep", values),
            shares=method.name,
        )


def read_sweep(name: str, values: str | None) -> Sweep:
    """The sweep on the command line; `UserError` for an invalid value."""
    texts = [text.strip() for text in (values or VALUES[name]).split(",") if text.strip()]
    numbers = tuple(parse_setting(f"tree.{name}", text, "--values") for text in texts)
    if not numbers or 0 in numbers or len(set(numbers)) < len(numbers):
        raise UserError(
            f"--values {values!r}: write different whole numbers above 0, such as 1,4,16"
        )
    return Sweep(name, tuple(sorted(numbers)))


def points_of(sweep: Sweep, methods: Sequence[Method]) -> list[Method]:
    """All methods of a run, swept ones once per value, in order; `UserError` if there is nothing to
    sweep."""
    if not any(map(sweep.varies, methods)):
        raise UserError(f"--sweep {sweep.name} needs a method that drafts, such as --method small")
    return [
        point
        for method in methods
        for point in (sweep.points(method) if sweep.varies(method) else [method])
    ]


def swept(
    sweep: Sweep, methods: Sequence[Method], result: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The points of the curves, from the rows of a result: a line for each method, value, set of
    prompts and temperature."""
    varied = [method for method in methods if sweep.varies(method)]
    places = {
        point.name: (method.name, value)
        for method in varied
        for point, value in zip(sweep.points(method), sweep.values, strict=True)
    }
    told = []
    for row, passes in zip(result["rows"], result["passes"], strict=True):
        if row["method"] in places:
            method, value = places[row["method"]]
            costs = {name: passes[name] for name in ("verify_ms", "ratio", "draft_ms")}
            rest = {name: row[name] for name in TAKEN}
            told.append({"method": method, "value": value, **costs, **rest})
    return told


def show_sweep(sweep: Sweep, points: Sequence[Mapping[str, Any]]) -> None:
    costs = ("T_V ms", "T_V/T_T", "rows", "draft ms", "tau", "tokens/s", "speed-up", "hit")
    headings = ("method", "prompts", "T", sweep.name, *costs)
    print_table(headings, [_line(told) for told in points], keys=4, whole=True)


def _line(told: Mapping[str, Any]) -> tuple[object, ...]:
    rows = told["verified_tokens"] / told["calls"] if told["calls"] else None
    passes = (number(told["verify_ms"], 2), number(told["ratio"], 2))
    costs = (*passes, number(rows, 1), number(told["draft_ms"], 2))
    rates = (number(told["tau"], 2), f"{told['tokens_per_s']:.1f}")
    gains = (*rates, interval(told), share(told["hit_rate"]))
    return (told["method"], told["prompts"], told["temperature"], told["value"], *costs, *gains)


def draw_sweep(sweep: Sweep, methods: Sequence[Method], points: Sequence[Mapping[str, Any]]) -> str:
    """The figure: small charts over the same values, with a curve for each method, set of prompts
    and temperature, and a subtitle with their origin."""
    across = {"gamma": "gamma, nodes verified a round", "depth": "levels of the tree"}[sweep.name]
    gains = _curves(points, "speedup", ("speedup_low", "speedup_high"))
    waits = _curves(points, "draft_ms")
    panels = (
        Panel("Target pass, T_V", across, "milliseconds", _curves(points, "verify_ms")),
        Panel("Drafting that rounds wait for", across, "milliseconds a round", waits),
        Panel("Acceptance length, tau", across, "tokens a round", _curves(points, "tau")),
        Panel("Speed-up over the target alone", across, "times", gains, level=1.0),
    )
    varied = [method.configuration.settings for method in methods if sweep.varies(method)]
    origin = origin_of(varied, points)
    return draw_panels(f"What {sweep.name} brings\n{origin}", panels)


def origin_of(settings: Sequence[Settings], rows: Sequence[Mapping[str, Any]]) -> str:
    """Describe the measurement: targets, drafts and policies, each once, and the temperature if it
    is common."""
    targets = (f"{_named(one.target.model) or 'demo'} ({one.target.weights})" for one in settings)
    kinds = [(one.draft.kind.replace("auto", ""), _named(one.draft.model)) for one in settings]
    drafts = (" ".join(filter(None, kind)) or "demo" for kind in kinds)
    told = {"target": targets, "draft": drafts, "policy": (one.tree.policy for one in settings)}
    heats = {row["temperature"] for row in rows}
    same = [f"T {heat:g}" for heat in heats if len(heats) == 1]
    return " · ".join(
        (*(f"{name} {', '.join(dict.fromkeys(values))}" for name, values in told.items()), *same)
    )


def _named(model: str) -> str:
    return Path(model).name if Path(model).is_dir() else model


def _curves(
    points: Sequence[Mapping[str, Any]], name: str, band: tuple[str, str] | None = None
) -> list[Curve]:
    return [
        Curve(
            line,
            [(told["value"], told[name]) for told in group],
            band=[(told[band[0]], told[band[1]]) for told in group] if band else (),
        )
        for line, group in _lines(points, name)
    ]


def _lines(
    points: Sequence[Mapping[str, Any]], name: str
) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """The points with the figure, by curve, under the shortest distinguishing names."""
    keys = ("method", "prompts", "temperature")
    varying = [key for key in keys if len({told[key] for told in points}) > 1]
    for place in dict.fromkeys(tuple(told[key] for key in keys) for told in points):
        group = [
            told
            for told in points
            if tuple(told[key] for key in keys) == place and told[name] is not None
        ]
        words = [
            f"T {value:g}" if key == "temperature" else str(value)
            for key, value in zip(keys, place, strict=True)
            if key in varying or key == "method"
        ]
        if group:
            yield " ".join(words), group


def draw_speedups(methods: Sequence[Method], result: Mapping[str, Any]) -> str:
    known = [row for row in result["rows"] if row["method"] != NONE and row["speedup"] is not None]
    several = len({row["temperature"] for row in known}) > 1
    groups = []
    for prompts, temperature in dict.fromkeys(
        (row["prompts"], row["temperature"]) for row in known
    ):
        bars = [
            Bar(row["method"], row["speedup"], row["speedup_low"], row["speedup_high"])
            for row in known
            if (row["prompts"], row["temperature"]) == (prompts, temperature)
        ]
        groups.append(Group(f"{prompts}, T {temperature:g}" if several else prompts, bars))
    ours = [method.configuration.settings for method in methods if method.ours and method.drafts]
    origin = origin_of(ours or [method.configuration.settings for method in methods], known)
    return draw_bars(
        f"Speed-up over the target alone\n{origin}",
        "times; lines: 95 % interval over prompts",
        groups,
        level=1.0,
    )
