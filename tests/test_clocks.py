"""No everyday test fails because the machine is busy.

None holds a difference of wall-clock times under a limit, or waits for what must come for less than
`support/patience.py` says, and no example of hypothesis has a deadline.
"""

import ast
import re
from collections.abc import Container, Iterator
from pathlib import Path

import hypothesis

TESTS = Path(__file__).resolve().parent
SUSPECT = re.compile(
    r"\.(?:wait|join|settimeout)\(\s*\d|timeout\s*=|monotonic|perf_counter|time\.time|import time\b"
)
"""What a file has in which anything is found; others need no parser."""
WAITS = {"wait", "join", "settimeout"}
WALL_CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}
"""Functions of `time`. A limit may be put on processor time (`process_time`, `thread_time`); a
guard against hanging compares a moment with a deadline."""


def reads_a_wall_clock(node: ast.AST) -> bool:
    calls = (ast.unparse(each.func) for each in ast.walk(node) if isinstance(each, ast.Call))
    return any(call.removeprefix("time.") in WALL_CLOCKS for call in calls if "." in call)


def is_a_duration(node: ast.AST, by_name: Container[str] = ()) -> bool:
    """Return whether an expression is a difference of times, or calls a function that returns
    one."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in by_name
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and reads_a_wall_clock(node)


def is_a_limit(node: ast.AST, by_name: Container[str]) -> bool:
    """Return whether an expression compares a duration by the wall clock with what it has to stay
    below."""
    if not isinstance(node, ast.Compare):
        return False
    below, left = [], node.left
    for operator, right in zip(node.ops, node.comparators, strict=True):
        if isinstance(operator, ast.Lt | ast.LtE):
            below.append(left)
        if isinstance(operator, ast.Gt | ast.GtE):
            below.append(right)
        left = right
    return any(is_a_duration(part, by_name) for side in below for part in ast.walk(side))


def is_short(node: ast.AST) -> bool:
    """Return whether a call waits for a number of seconds that is written there, and not just for a
    moment."""
    if not isinstance(node, ast.Call):
        return False
    waits = isinstance(node.func, ast.Attribute) and node.func.attr in WAITS
    given = [word.value for word in node.keywords if word.arg == "timeout"]
    seconds = [one.value for one in (*given, *node.args * waits) if isinstance(one, ast.Constant)]
    return any(isinstance(one, int | float) and one >= 1 for one in seconds)


def limits(source: str) -> Iterator[int]:
    """The lines of a test file on which an everyday test puts a limit on wall time."""
    if not SUSPECT.search(source):
        return
    tree = ast.parse(source)
    durations = {
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and any(
            isinstance(part, ast.Return) and part.value is not None and is_a_duration(part.value)
            for part in ast.walk(function)
        )
    }
    marked = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
    if any("pytestmark" in line and "slow" in line for line in marked):
        return
    for function in tree.body:
        marks = [ast.unparse(mark) for mark in getattr(function, "decorator_list", [])]
        if "pytest.mark.slow" not in marks:
            yield from (
                node.lineno
                for node in ast.walk(function)
                if is_a_limit(node, durations) or is_short(node)
            )


FILES = sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py"))


def test_no_everyday_test_puts_a_limit_on_wall_time() -> None:
    found = {path: [*limits((TESTS / path).read_text(encoding="utf-8"))] for path in FILES}
    assert found
    assert not {path: lines for path, lines in found.items() if lines}


def test_a_limit_is_found_and_a_guard_a_lower_bound_and_processor_time_are_left() -> None:
    limit = (
        "assert 0 <= time.monotonic() - began < 3\n    assert 5 > (time.time_ns() - began) / 2\n"
    )
    limit = f"def test_it():\n    {limit}"
    assert list(limits(limit)) == [2, 3]
    assert list(limits("@pytest.mark.slow\n" + limit)) == []
    taken = "def taken():\n    return time.monotonic() - began\n\n"
    assert list(limits(f"{taken}def test_it():\n    assert taken() < 3\n")) == [5]
    for short in ("process.communicate(timeout=20)", "thread.join(5.0)"):
        assert list(limits(f"def test_it():\n    {short}\n")) == [2]
    lower = ("time.monotonic() - began >= 3", "0.1 < time.monotonic() - began", "done.wait(0.1)")
    for other in (*lower, "time.monotonic() < deadline", "time.process_time() - began < 3"):
        assert list(limits(f"def test_it():\n    assert {other}\n")) == []


def test_no_example_has_a_deadline() -> None:
    assert hypothesis.settings().deadline is None
