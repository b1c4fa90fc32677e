"""The picture of a run without a sweep: a bar for each method's speed-up over the target alone, by
set of prompts and temperature."""

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.launch.bench.methods import NONE, Method
from dovetail.launch.bench.sweep import origin_of
from dovetail.launch.files.bars import Bar, Group, draw_bars


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
