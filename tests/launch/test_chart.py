"""A chart is an SVG that any browser shows."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from dovetail.launch.chart import Curve, check_chart, draw, ticks_to
from dovetail.protocol.errors import UserError

SVG = "{http://www.w3.org/2000/svg}"


def test_every_curve_and_name_is_drawn_within_the_page() -> None:
    curves = [Curve("one & two", [(1, 2.0), (64, 30.0)]), Curve("limit", [(1, 1.0), (32, 4.0), (64, 9.0)], dashed=True)]
    root = ElementTree.fromstring(draw("a <title>", "M", "ms", curves))
    lines = root.findall(f"{SVG}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [2, 3]
    assert [("stroke-dasharray" in line.attrib) for line in lines] == [False, True]
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert {"a <title>", "M", "ms", "one & two", "limit"} <= set(texts)
    points = [tuple(map(float, point.split(","))) for line in lines for point in line.attrib["points"].split()]
    assert all(0 <= x <= float(root.attrib["width"]) and 0 <= y <= float(root.attrib["height"]) for x, y in points)
    assert points[0][1] > points[1][1], "larger values stand higher"


@pytest.mark.parametrize(("most", "ticks"), [(10.0, [0, 2, 4, 6, 8, 10]), (0.9, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0.0, [0]), (64.0, [0, 20, 40, 60, 80])])
def test_ticks_are_round_numbers_that_reach_the_largest(most: float, ticks: list[float]) -> None:
    assert ticks_to(most) == pytest.approx(ticks)


def test_another_format_is_refused_with_the_name_that_works() -> None:
    check_chart(Path("a.svg"))
    check_chart(None)
    with pytest.raises(UserError, match=r"a\.png does not end in \.svg: name a\.svg"):
        check_chart(Path("a.png"))
