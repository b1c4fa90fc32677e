"""The table of the ten points names tests that there are."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROWS = [
    line
    for line in (ROOT / "tests" / "hostile" / "README.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| \d+\. ", line)
]


def test_there_are_ten_points() -> None:
    assert [int(row.split()[1].rstrip(".")) for row in ROWS] == [*range(1, 11)]


@pytest.mark.parametrize("row", ROWS, ids=range(1, len(ROWS) + 1))
def test_every_test_of_a_point_is_there(row: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
    assert named
    for file, name in named:
        functions = {
            node.name
            for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"{file} has no {name}"
