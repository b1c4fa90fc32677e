"""A chart is an SVG that any browser shows."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from dovetail.launch.files.chart import (
    COLOURS,
    Curve,
    Panel,
    check_chart,
    draw,
    draw_panels,
    ticks_to,
)
from dovetail.protocol.errors import UserError

SVG = "{http://www.w3.org/2000/svg}"


def test_every_curve_and_name_is_drawn_within_the_page() -> None:
    curves = [
        Curve("one & two", [(1, 2.0), (64, 30.0)]),
        Curve("limit", [(1, 1.0), (32, 4.0), (64, 9.0)], dashed=True),
    ]
    root = ElementTree.fromstring(draw("a <title>", "M", "ms", curves))
    lines = root.findall(f"{SVG}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [2, 3]
    assert [("stroke-dasharray" in line.attrib) for line in lines] == [False, True]
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert {"a <title>", "M", "ms", "one & two", "limit"} <= set(texts)
    points = [
        tuple(map(float, point.split(",")))
        for line in lines
        for point in line.attrib["points"].split()
    ]
    assert all(
        0 <= x <= float(root.attrib["width"]) and 0 <= y <= float(root.attrib["height"])
        for x, y in points
    )
    assert points[0][1] > points[1][1], "larger values stand higher"


@pytest.mark.parametrize(
    ("most", "ticks"),
    [
        (10.0, [0, 2, 4, 6, 8, 10]),
        (0.9, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, [0]),
        (64.0, [0, 20, 40, 60, 80]),
    ],
)
def test_ticks_are_round_numbers_that_reach_the_largest(most: float, ticks: list[float]) -> None:
    assert ticks_to(most) == pytest.approx(ticks)


def test_another_format_is_refused_with_the_name_that_works() -> None:
    check_chart(Path("a.svg"))
    check_chart(None)
    with pytest.raises(UserError, match=r"a\.png does not end in \.svg: name a\.svg"):
        check_chart(Path("a.png"))


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
    root = ElementTree.fromstring(draw_panels("both", [rate, tau, tau]))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    lines = root.findall(f"{SVG}polyline")
    assert [line.attrib["class"] for line in lines] == ["line0", "line1", "line1", "line1"]
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert [texts.count(name) for name in ("a", "b", "Rate", "tau", "both")] == [1, 1, 1, 2, 1]
    (band,) = root.findall(f"{SVG}polygon")
    points = [
        tuple(map(float, point.split(",")))
        for part in (*lines, band)
        for point in part.attrib["points"].split()
    ]
    assert len(band.attrib["points"].split()) == 4
    assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
    assert (
        max(float(text.attrib["y"]) for text in root.findall(f"{SVG}text") if "y" in text.attrib)
        < height
    )


def test_what_a_title_is_too_long_for_stands_in_a_second_smaller_line() -> None:
    def lines(title: str) -> list[tuple[str, float]]:
        texts = ElementTree.fromstring(draw(title, "x", "y", [Curve("a", [(1, 1.0)])])).findall(
            f"{SVG}text"
        )
        return [
            (text.text or "", float(text.attrib["font-size"]))
            for text in texts
            if "font-size" in text.attrib
        ]

    words = "a machine of that kind and a target of that size "
    assert lines("short") == [("short", 15.0)]
    assert lines("short\nwhose it is") == [("short", 15.0), ("whose it is", 12.0)]
    (first, _), (second, size) = lines(3 * words)
    assert f"{first} {second}" == (3 * words).strip()
    assert size == 12.0
    assert lines(9 * words)[1][1] < 9.0


def test_a_level_to_compare_with_is_a_line_across_the_chart() -> None:
    def dashes(level: float | None) -> int:
        lines = ElementTree.fromstring(
            draw("t", "x", "y", [Curve("a", [(1, 3.0)])], level=level)
        ).findall(f"{SVG}line")
        return sum(line.attrib.get("stroke-dasharray") == "3 3" for line in lines)

    assert (dashes(None), dashes(1.0)) == (0, 1)


def test_a_chart_of_nothing_but_zeros_can_be_drawn() -> None:
    root = ElementTree.fromstring(draw("none", "x", "y", [Curve("zero", [(0, 0.0)])]))
    assert len(root.findall(f"{SVG}polyline")) == 1


def test_a_dark_page_has_a_colour_for_every_colour_of_a_light_one() -> None:
    text = draw("t", "x", "y", [Curve(str(index), [(1, 1.0)]) for index in range(len(COLOURS))])
    style = text[text.index("<style>") : text.index("</style>")]
    assert all(
        f".line{index}{{" in style and f".area{index}{{" in style for index in range(len(COLOURS))
    )
