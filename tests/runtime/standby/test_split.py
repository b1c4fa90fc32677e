"""Splits between a coordinator, its standby and the workers, each a network namespace, where the
kernel permits them: the stories of `split.py`."""

import os
import subprocess
from pathlib import Path

import pytest

from support.machines import isolated, why_not

TESTS = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("split.py")
STORIES = (
    "first_cut_off_both_ways",
    "first_not_heard",
    "first_deaf",
    "second_cut_off",
    "coordinators_apart",
)


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
def test_whatever_is_cut_one_coordinator_goes_on_and_no_text_differs(
    story: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    paths = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        isolated([str(SCRIPT), story]),
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with capsys.disabled():
        print(f"\n{story}: {done.stdout.strip()}")
