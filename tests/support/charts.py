"""Reads charts back from their SVG."""

import re
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
Point = tuple[float, float]


def texts_of(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def shapes_of(svg: str, kind: str) -> list[tuple[str, list[Point]]]:
    """Return (style, points) of each curve, band, bar or level."""
    groups = ElementTree.fromstring(svg).iter(f"{SVG}g")
    parts = [part for group in groups if group.attrib.get("class") == kind for part in group]
    found = [next(part.iter(f"{SVG}path")) for part in parts if part.tag == f"{SVG}path"]
    return [(path.attrib.get("style", ""), _points(path)) for path in found]


def size_of(svg: str) -> Point:
    root = ElementTree.fromstring(svg)
    return float(root.attrib["width"]), float(root.attrib["height"])


def _points(path: ElementTree.Element) -> list[Point]:
    numbers = [float(number) for number in re.findall(r"-?\d+\.?\d*", path.attrib["d"])]
    return list(zip(numbers[::2], numbers[1::2], strict=True))
