"""A chart of bars is an SVG that any browser shows."""

import pytest

from dovetail.launch.bench.methods import read_method
from dovetail.launch.bench.sweep import draw_speedups
from dovetail.launch.files.charts import COLOURS, LETTER, Bar, Group, draw_bars, shortened
from dovetail.launch.settings.configure import configure
from support.charts import shapes_of, size_of, texts_of

LONG = "a,very.long=method,with.settings=appended"
GROUPS = [
    Group("easy & short", [Bar("small", 3.0, 2.5, 3.4), Bar(LONG, 1.0)]),
    Group("hard", [Bar("small", 0.5, 0.4, 0.6)]),
]


def test_a_bar_is_as_long_as_its_value_and_has_the_colour_of_its_name() -> None:
    bars = shapes_of(draw_bars("t", "times", GROUPS, level=1.0), "bar")
    widths = [max(x for x, _ in points) - min(x for x, _ in points) for _, points in bars]
    assert [width / widths[1] for width in widths] == pytest.approx([3.0, 1.0, 0.5], abs=0.01)
    colours = [style.removeprefix("fill: ") for style, _ in bars]
    assert colours == [COLOURS[0], COLOURS[1], COLOURS[0]]


def test_all_of_it_lies_on_the_page_and_an_interval_is_drawn_where_there_is_one() -> None:
    svg = draw_bars("t", "times", GROUPS, level=1.0)
    assert {"easy & short", "hard", "3.00 (2.50-3.40)", "1.00", "0.50 (0.40-0.60)", "times"} <= set(
        texts_of(svg)
    )
    (width, height), levels = size_of(svg), shapes_of(svg, "level")
    assert len(levels) == 1
    for _, points in (*levels, *shapes_of(svg, "bar")):
        assert all(0 < x < width and 0 < y < height for x, y in points)


@pytest.mark.parametrize("value", [0.1, 0.0])
def test_a_level_beyond_all_bars_lies_on_the_page_too(value: float) -> None:
    svg = draw_bars("t", "times", [Group("slow", [Bar("small", value)])], level=1.0)
    ((_, points),) = shapes_of(svg, "level")
    assert all(0 < x < size_of(svg)[0] for x, _ in points)


def test_a_name_that_is_too_long_keeps_its_beginning_and_its_end() -> None:
    assert shortened("small", 200.0) == "small"
    short = shortened("dovetail,tree.policy=goodput,tree.gamma=12", 130.0)
    assert short.startswith("dovetail")
    assert short.endswith("gamma=12")
    assert len(short) * LETTER <= 130.0


def row(method: str, prompts: str, temperature: float, speedup: float | None) -> dict[str, object]:
    ends = {"speedup_low": speedup and speedup - 0.1, "speedup_high": speedup and speedup + 0.1}
    return {
        "method": method,
        "prompts": prompts,
        "temperature": temperature,
        "speedup": speedup,
        **ends,
    }


def test_speed_ups_are_drawn_by_set_and_temperature_without_none_and_without_what_is_not_known() -> (  # noqa: E501
    None
):
    base = configure(environment={})
    methods = [read_method(base, "none"), read_method(base, "small")]
    rows = [
        row("none", "a", 0.0, 1.0),
        row("small", "a", 0.0, 2.0),
        row("small", "a", 1.0, 1.5),
        row("small", "b", 0.0, None),
    ]
    texts = texts_of(draw_speedups(methods, {"rows": rows}))
    assert {"a, T 0", "a, T 1", "2.00 (1.90-2.10)"} <= set(texts)
    assert not {"none", "b", "b, T 0"} & set(texts)
    assert any("target demo" in text for text in texts)
