"""The host's work for a level of a draft that a device computes stays within a budget: the calls of
functions are counted, since times differ from run to run (`tests/measures/host_level.py`)."""

import sys
from functools import partial
from pathlib import Path

import pytest

from support.drafts import DEEP, SHALLOW, Drafts, of_a_level, opened

WIDTH = 8
BUDGETS = {"eagle": 320, "small": 310}
"""The most calls of a level, of Python and of C."""


def calls_of(drafts: Drafts, depth: int) -> int:
    """Return how many functions a proposal of so many levels calls."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    drafts.begin(depth)
    sys.setprofile(count)
    try:
        drafts.draft()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("kind", BUDGETS)
def test_a_level_takes_few_calls_of_the_host(kind: str, tmp_path: Path) -> None:
    drafts = Drafts(opened(kind, tmp_path), WIDTH, 0.0)
    for depth in (DEEP, SHALLOW):
        calls_of(drafts, depth)  # captures
    assert of_a_level(partial(calls_of, drafts)) <= BUDGETS[kind]
