"""A chart of bars is an SVG that any browser shows."""

from xml.etree import ElementTree

import pytest

from dovetail.launch.bench.methods import read_method
from dovetail.launch.bench.plot import draw_speedups
from dovetail.launch.files.bars import Bar, Group, draw_bars, shortened
from dovetail.launch.settings.configure import configure

SVG = "{http://www.w3.org/2000/svg}"
LONG = "a,very.long=method,with.settings=appended"
GROUPS = [
    Group("easy & short", [Bar("small", 3.0, 2.5, 3.4), Bar(LONG, 1.0)]),
    Group("hard", [Bar("small", 0.5, 0.4, 0.6)]),
]


def numbers(root: ElementTree.Element, kind: str, name: str) -> list[float]:
    return [
        float(part.attrib[name])
        for part in root.findall(f"{SVG}{kind}")
        if part.attrib.get("class", "").startswith("area")
    ]


def test_a_bar_is_as_long_as_its_value_and_has_the_colour_of_its_name() -> None:
    root = ElementTree.fromstring(draw_bars("t", "times", GROUPS, level=1.0))
    widths = numbers(root, "rect", "width")
    assert [width / widths[1] for width in widths] == pytest.approx([3.0, 1.0, 0.5], abs=0.01)
    assert [bar.attrib["class"] for bar in root.findall(f"{SVG}rect")] == [
        "page",
        "area0",
        "area1",
        "area0",
    ]


def test_all_of_it_lies_on_the_page_and_an_interval_is_drawn_where_there_is_one() -> None:
    root = ElementTree.fromstring(draw_bars("t", "times", GROUPS, level=1.0))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    texts = root.findall(f"{SVG}text")
    assert {"easy & short", "hard", "3.00 (2.50-3.40)", "1.00", "0.50 (0.40-0.60)", "times"} <= {
        text.text for text in texts
    }
    assert all(
        0 < float(text.attrib["x"]) < width and 0 < float(text.attrib["y"]) < height
        for text in texts
    )
    assert [line.attrib["class"] for line in root.findall(f"{SVG}path")] == ["halo", "axis"] * 2
    assert (
        sum(line.attrib.get("stroke-dasharray") == "3 3" for line in root.findall(f"{SVG}line"))
        == 1
    )


@pytest.mark.parametrize("value", [0.1, 0.0])
def test_a_level_beyond_all_bars_lies_on_the_page_too(value: float) -> None:
    root = ElementTree.fromstring(
        draw_bars("t", "times", [Group("slow", [Bar("small", value)])], level=1.0)
    )
    (level,) = (
        line for line in root.findall(f"{SVG}line") if line.attrib.get("stroke-dasharray") == "3 3"
    )
    assert 0 < float(level.attrib["x1"]) < float(root.attrib["width"])


def test_a_name_that_is_too_long_keeps_its_beginning_and_its_end() -> None:
    assert shortened("small", 200.0) == "small"
    short = shortened("dovetail,tree.policy=goodput,tree.gamma=12", 130.0)
    assert short.startswith("dovetail")
    assert short.endswith("gamma=12")
    assert len(short) * 6.6 <= 130.0


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
    base = configure(environment={}).over("--inflate", {"target.inflate": "512MiB"})
    methods = [read_method(base, "none"), read_method(base, "small")]
    rows = [
        row("none", "a", 0.0, 1.0),
        row("small", "a", 0.0, 2.0),
        row("small", "a", 1.0, 1.5),
        row("small", "b", 0.0, None),
    ]
    texts = [
        text.text
        for text in ElementTree.fromstring(draw_speedups(methods, {"rows": rows})).findall(
            f"{SVG}text"
        )
    ]
    assert {"a, T 0", "a, T 1", "2.00 (1.90-2.10)"} <= set(texts)
    assert not {"none", "b", "b, T 0"} & set(texts)
    assert any("inflated to 512MiB" in (text or "") for text in texts)
