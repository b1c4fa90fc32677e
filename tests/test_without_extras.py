"""A copy of the tree without the extras that `budget.toml` lists: replies, their tests, and what a
command or setting of a missing extra reports."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = tomllib.loads((ROOT / "tests" / "budget.toml").read_text(encoding="utf-8"))["extras"]
ROOMS = [room for rooms in EXTRAS.values() for room in rooms]
CORE = [
    "tests/workers/test_decode.py",
    "tests/workers/test_registries.py",
    "tests/runtime/test_scheduler.py",
    "tests/protocol/test_tree.py",
]
"""A few seconds of tests of what remains."""
GENERATE = ["generate", "Why is the sky blue?", "--sampling.max_tokens", "16", "--json"]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package `dovetail`, without extras."""
    folder = tmp_path_factory.mktemp("core")
    tree = folder / "dovetail"
    left_out = shutil.ignore_patterns("__pycache__", ".*_cache", "recorded", "benchmarks", "soak")
    for part in ("protocol", "runtime", "workers", "launch", "tests"):
        shutil.copytree(ROOT / part, tree / part, ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", tree)
    for room in ROOMS:
        gone = tree / room
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    return folder


def run(core: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=core / "dovetail",
        env={**os.environ, "PYTHONPATH": f"{core}:{core}/dovetail/tests"},
        capture_output=True,
        text=True,
        check=False,
    )


def dovetail(core: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(core, "dovetail.launch.cli", *words)


def test_core_passes_its_tests_without_extras(core: Path) -> None:
    ran = run(core, "pytest", "-q", "-x", "-p", "no:cacheprovider", *CORE)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]


def test_a_reply_needs_no_extra(core: Path) -> None:
    ran = dovetail(core, *GENERATE)
    assert ran.returncode == 0, ran.stderr
    assert '"finish_reason": "length"' in ran.stdout


def test_a_command_of_a_missing_extra_is_not_listed(core: Path) -> None:
    gone = {Path(room).stem for room in ROOMS if room.startswith("launch/commands/")}
    listed = {line.split()[0] for line in dovetail(core, "--help").stdout.splitlines() if line}
    assert gone
    assert not gone & listed
    assert {"generate", "serve", "worker", "status"} <= listed
    for command in gone:
        assert f"No such command '{command}'" in dovetail(core, command).stderr


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["config", "export", "compose"], "launch/files/deployment"),
        (["serve", "--engine", "ray", "--http.port", "0"], "launch/processes/ray"),
        (["coordinator", "--coordinator.journal", "journal"], "runtime/journal"),
        (["coordinator", "--coordinator.record", "recorded"], "runtime/record"),
    ],
)
def test_a_setting_of_a_missing_extra_is_refused(
    core: Path, words: list[str], missing: str
) -> None:
    ran = dovetail(core, *words)
    assert (ran.returncode, ran.stderr) == (
        2,
        f"dovetail: this installation of dovetail lacks {missing}, which this needs\n",
    )
