"""Words and tables for people."""

import pytest

from dovetail.launch import cli
from dovetail.launch.bench_table import COLUMNS, SWEPT
from dovetail.launch.terminal import counted, explained


@pytest.mark.parametrize(("number", "words"), [(0, "0 replies"), (1, "1 reply"), (2, "2 replies")])
def test_one_of_something_is_not_several(number: int, words: str) -> None:
    assert counted(number, "reply", "replies") == words


def test_columns_are_explained_a_line_each_as_long_as_a_terminal_is_wide(capsys: pytest.CaptureFixture[str]) -> None:
    assert explained({"a": "one", "long": "two"}) == "\b\nColumns:\n  a     one\n  long  two"
    assert cli.run(["bench", "--help"]) == 0
    shown = capsys.readouterr().out.split("Columns:\n")[1].splitlines()
    assert [" ".join(line.split()) for line in shown] == [f"{name} {meaning}" for name, meaning in {**COLUMNS, **SWEPT}.items()]
    assert max(map(len, shown)) <= 80
