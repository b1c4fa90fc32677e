"""A chart is an SVG that any browser shows."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dovetail.launch import cli
from dovetail.launch.bench.methods import read_method
from dovetail.launch.bench.sweep import draw_speedups
from dovetail.launch.files.charts import (
    AT_NIGHT,
    COLOURS,
    LETTER,
    MARGIN,
    PANEL_HEIGHT,
    WIDTH,
    Bar,
    Curve,
    Group,
    Panel,
    check_chart,
    draw,
    draw_bars,
    draw_panels,
    heading_lines,
    plain,
    shortened,
)
from dovetail.launch.settings.configure import configure
from dovetail.protocol.errors import UserError
from support.charts import SVG, shapes_of, size_of, texts_of

ROOM = WIDTH - 2 * MARGIN


def test_every_curve_and_name_is_drawn_within_the_page() -> None:
    curves = [
        Curve("one & two", [(1, 2.0), (64, 30.0)]),
        Curve("limit", [(1, 1.0), (32, 4.0), (64, 9.0)], dashed=True),
    ]
    svg = draw("a <title>", "M", "ms", curves)
    lines = shapes_of(svg, "curve")
    assert [len(points) for _, points in lines] == [2, 3]
    assert [("stroke-dasharray" in style) for style, _ in lines] == [False, True]
    assert {"a <title>", "M", "ms", "one & two", "limit"} <= set(texts_of(svg))
    (width, height), points = size_of(svg), [point for _, line in lines for point in line]
    assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
    assert points[0][1] > points[1][1], "larger values stand higher"


def test_axes_begin_at_zero_and_end_at_a_round_number_that_reaches_the_largest() -> None:
    texts = texts_of(draw("t", "x", "y", [Curve("a", [(1, 5.0), (64, 26.0)])]))
    assert {"0", "30"} <= set(texts)
    assert "40" not in texts[texts.index("x") :]


def test_another_format_is_refused_with_the_name_that_works() -> None:
    check_chart(Path("a.svg"))
    check_chart(None)
    with pytest.raises(UserError, match=r"a\.png does not end in \.svg: name a\.svg"):
        check_chart(Path("a.png"))


def test_a_missing_matplotlib_is_asked_for_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    check_chart(None)
    with pytest.raises(
        UserError, match=r"a\.svg needs matplotlib.*pip install 'dovetail-llm\[plot\]'"
    ):
        check_chart(Path("a.svg"))


def test_small_charts_share_a_legend_and_a_curve_has_one_colour_in_all_of_them() -> None:
    rate = Panel(
        "Rate",
        "gamma",
        "tokens/s",
        [
            Curve("a", [(1, 5.0), (4, 9.0)]),
            Curve("b", [(1, 4.0), (4, 6.0)], band=[(3.0, 5.0), (5.0, 12.0)]),
        ],
        level=8.0,
    )
    tau = Panel("tau", "gamma", "tokens", [Curve("b", [(1, 1.5), (4, 2.5)])])
    svg = draw_panels("both", [rate, tau, tau])
    colours = [next(c for c in COLOURS if c in style) for style, _ in shapes_of(svg, "curve")]
    assert colours == [COLOURS[0], *[COLOURS[1]] * 3]
    texts = texts_of(svg)
    assert [texts.count(name) for name in ("a", "b", "Rate", "tau", "both")] == [1, 1, 1, 2, 1]
    assert svg.count('class="band"') == svg.count('class="level"') == 1
    assert size_of(svg)[1] > 2 * PANEL_HEIGHT, "three charts stand in two lines"


def test_what_a_title_is_too_long_for_stands_in_a_second_smaller_line() -> None:
    words = "a machine of that kind and a target of that size "
    assert heading_lines("short", ROOM) == ("short", "", 12.0)
    assert heading_lines("short\nwhose it is", ROOM) == ("short", "whose it is", 12.0)
    first, second, size = heading_lines(3 * words, ROOM)
    assert f"{first} {second}" == (3 * words).strip()
    assert size == 12.0
    assert heading_lines(9 * words, ROOM)[2] < 9.0
    assert {first, second} <= set(texts_of(draw(3 * words, "x", "y", [])))


def test_a_level_to_compare_with_is_a_line_across_the_chart() -> None:
    curves = [Curve("a", [(1, 3.0)])]
    assert not shapes_of(draw("t", "x", "y", curves), "level")
    ((style, points),) = shapes_of(draw("t", "x", "y", curves, level=1.0), "level")
    assert "stroke-dasharray: 3,3" in style
    assert points[0][1] == points[1][1]


def test_a_chart_of_nothing_but_zeros_can_be_drawn() -> None:
    assert len(shapes_of(draw("none", "x", "y", [Curve("zero", [(0, 0.0)])]), "curve")) == 1


@pytest.mark.parametrize(
    "name", ["a\x00b\x1b[31m", "<script>", "$x_1$", "\N{CJK UNIFIED IDEOGRAPH-4E2D}", "\ud800"]
)
def test_a_name_is_drawn_as_it_is_or_with_a_sign_for_what_no_document_can_hold(name: str) -> None:
    svg = draw(name, name, name, [Curve(name, [(1, 1.0)])])
    ElementTree.fromstring(svg)
    shown = plain(name)
    assert all(map(str.isprintable, shown))
    assert texts_of(svg).count(shown) == 4


def test_a_dark_page_has_a_colour_for_every_colour_of_a_light_one() -> None:
    curves = [Curve(str(index), [(1, 1.0)]) for index in range(len(COLOURS))]
    svg = draw("t", "x", "y", curves, level=1.0)
    style = ElementTree.fromstring(svg).findtext(f"{SVG}style") or ""
    assert "prefers-color-scheme:dark" in style
    assert all(f"{day}" in style and night in style for day, night in AT_NIGHT.items())


def test_a_chart_of_the_same_figures_is_the_same_file() -> None:
    first, second = (draw("t", "x", "y", [Curve("a", [(1, 1.0), (2, 3.0)])]) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    "command",
    [
        ("profile", "--out", "{}"),
        ("calibrate", "--plot", "{}/t.svg"),
        ("train", "dovetail", "--features", "{}", "--out", "{}/head"),
    ],
    ids=" ".join,
)
def test_a_long_command_asks_for_matplotlib_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: tuple[str, ...],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.run([argument.format(tmp_path) for argument in command]) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert "pip install 'dovetail-llm[plot]'" in complaint
    assert not list(tmp_path.iterdir())


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
