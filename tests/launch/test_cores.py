"""Which process gets which cores."""

import os

import pytest

from dovetail.launch.cores import CoreLayout, allowed_cores, format_cores, lay_out, parse_cores
from dovetail.protocol.errors import UserError


def test_a_list_of_cores_is_read_as_it_is_written() -> None:
    known = tuple(sorted(os.sched_getaffinity(0)))
    assert parse_cores(format_cores(known)) == known


@pytest.mark.parametrize(("cores", "text"), [((0,), "0"), ((0, 1, 2), "0-2"), ((0, 2, 3, 7), "0,2-3,7")])
def test_runs_of_cores_are_written_short(cores: tuple[int, ...], text: str) -> None:
    assert format_cores(cores) == text


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "0,,1", "-1", "9999", "0-9999"])
def test_what_is_no_list_of_cores_of_ours_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--cores"):
        parse_cores(text)


@pytest.mark.parametrize(
    ("cores", "threads", "layout"),
    [
        ((0, 1, 2, 3), "auto", CoreLayout((0, 1, 2), (3,), (0, 1, 2, 3))),
        ((0, 1), "auto", CoreLayout((0,), (1,), (0, 1))),
        ((5,), "auto", CoreLayout((5,), (5,), (5,))),
        ((0, 1, 2, 3), 2, CoreLayout((0, 1), (3,), (0, 1, 2, 3))),
        ((0, 1, 2, 3), 64, CoreLayout((0, 1, 2, 3), (3,), (0, 1, 2, 3))),
    ],
)
def test_the_target_gets_all_cores_but_the_last(cores: tuple[int, ...], threads: int | str, layout: CoreLayout) -> None:
    assert lay_out(cores, threads=threads) == layout  # type: ignore[arg-type]


def test_no_more_cores_are_used_than_this_process_is_bound_to() -> None:
    assert set(allowed_cores()) <= os.sched_getaffinity(0)
