"""The cases of a test that belong to the everyday run."""

from collections.abc import Iterable
from typing import Any

import pytest


def everyday(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Return `cases` for `parametrize`: all but those in `kept` are marked slow. A tuple has a
    value for each of several names."""
    cases = list(cases)
    assert all(case in cases for case in kept), f"{kept} are not all among {cases}"
    return [case if case in kept else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
