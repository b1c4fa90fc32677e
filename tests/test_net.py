"""Several machines, each a network namespace of this one: the stories of `tests/net`, where the
kernel permits them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from net.__main__ import NOT_PERMITTED
from net.checks import STORIES

RUN = Path(__file__).parent / "net" / "run"


def run(*names: str) -> str:
    done = subprocess.run(
        [RUN, *names],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == NOT_PERMITTED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", [story.__name__ for story in STORIES])
def test_on_several_machines_the_text_is_that_of_one(name: str) -> None:
    assert "all checks passed" in run(name)
