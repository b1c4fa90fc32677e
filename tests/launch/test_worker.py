"""Where a worker that is started by hand is bound, and how many threads it takes."""

import os

import pytest

from dovetail.launch.binding import Place
from dovetail.launch.worker import place_of, thread_count
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import TargetSettings

ELSEWHERE = TargetSettings(numa=7, threads=999)
"""Settings of a target on another, larger machine."""


def test_a_draft_does_not_mind_where_the_target_is() -> None:
    assert place_of("draft", ELSEWHERE, None, "") is None
    assert thread_count("draft", ELSEWHERE, None) >= 1


def test_a_target_on_a_smaller_machine_than_the_settings_are_for_is_refused() -> None:
    with pytest.raises(UserError, match="there is no node 7"):
        place_of("target", ELSEWHERE, None, "")
    with pytest.raises(UserError, match=r"target.threads = 999"):
        place_of("target", TargetSettings(threads=999), None, "")


def test_a_target_takes_no_more_threads_than_the_cores_that_it_is_bound_to() -> None:
    core = min(os.sched_getaffinity(0))
    assert place_of("target", ELSEWHERE, str(core), "") == Place((core,))
    assert thread_count("target", TargetSettings(), Place((core,))) == 1
    with pytest.raises(UserError, match=rf"target.threads = 2 .* the cores {core} "):
        thread_count("target", TargetSettings(threads=2), Place((core,)))
