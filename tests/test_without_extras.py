"""A copy of the tree without the extras that `budget.toml` lists: replies, their tests, and what a
command or setting of a missing extra reports."""

import json
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
    "tests/workers/test_cache.py",
    "tests/runtime/test_scheduler.py",
    "tests/protocol/test_tree.py",
]
"""A second of tests of what remains; a reply is a test of its own."""
GENERATE = ["generate", "Why is the sky blue?", "--sampling.max_tokens", "16", "--json"]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package `dovetail`, without extras."""
    folder = tmp_path_factory.mktemp("core")
    tree = folder / "dovetail"
    left_out = shutil.ignore_patterns(".*_cache", "recorded", "benchmarks", "soak")
    for part in ("protocol", "runtime", "workers", "launch", "tests"):
        shutil.copytree(ROOT / part, tree / part, ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", tree)
    for room in ROOMS:
        gone = tree / room
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    return folder


REFUSED = """
import contextlib, io, json, sys
from dovetail.launch import cli
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = cli.run(words)
    print(json.dumps((code, said.getvalue())))
"""
"""Runs command lines that end at once, one after the other."""
LACKING = {
    "launch/files/deployment": ["config", "export", "compose"],
    "launch/processes/ray": ["serve", "--engine", "ray", "--http.port", "0"],
    "runtime/journal": ["coordinator", "--coordinator.journal", "journal"],
    "runtime/record": ["coordinator", "--coordinator.record", "recorded"],
}
"""Missing extra -> a command line that needs it."""


def python(core: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=core / "dovetail",
        env={**os.environ, "PYTHONPATH": f"{core}:{core}/dovetail/tests"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_core_passes_its_tests_without_extras(core: Path) -> None:
    ran = python(core, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *CORE)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]


def test_a_reply_needs_no_extra(core: Path) -> None:
    ran = python(core, "-m", "dovetail.launch.cli", *GENERATE)
    assert ran.returncode == 0, ran.stderr
    assert '"finish_reason": "length"' in ran.stdout


def test_commands_and_settings_of_missing_extras_are_refused(core: Path) -> None:
    listing = python(core, "-m", "dovetail.launch.cli", "--help").stdout
    listed = {line.split()[0] for line in listing.splitlines() if line}
    gone = sorted(Path(room).stem for room in ROOMS if room.startswith("launch/commands/"))
    assert gone
    assert not {*gone} & listed
    assert {"generate", "serve", "worker", "status"} <= listed
    asked = [*([command] for command in gone), *LACKING.values()]
    ran = python(core, "-P", "-c", REFUSED, json.dumps(asked))
    said = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(said) == len(asked), ran.stderr
    for command, (_, words) in zip(gone, said, strict=False):
        assert f"No such command '{command}'" in words
    assert said[len(gone) :] == [
        [2, f"dovetail: this installation of dovetail lacks {missing}, which is needed here\n"]
        for missing in LACKING
    ]
