"""`dovetail features` as users have it: from a recipe's chats to features of the embedded target, and what is wrong in one line."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.workers.training.features import open_features
from dovetail.workers.training.workplace import held
from support.features import samples

Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]
RECIPE = Path(__file__).resolve().parents[2] / "launch" / "demo" / "recipe" / "text.py"


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    file = tmp_path / "chats.jsonl"
    subprocess.run([sys.executable, RECIPE, "--documents", "40", "--seed", "3", "--out", file], check=True)
    return file


@pytest.mark.slow
def test_recipe_answers_and_features_in_two_commands(run: Run, chats: Path, tmp_path: Path) -> None:
    command = ("features", "--data", str(chats), "--regenerate", "--temperature", "0", "--new-tokens", "24", "--out", str(tmp_path / "out"))
    first = run(*command)
    assert first.returncode == 0, first.stderr
    assert first.stdout == ""
    assert "GB of float16" in first.stderr
    answers = [json.loads(line) for line in (tmp_path / "out.answers.jsonl").read_text().splitlines()]
    features = open_features(tmp_path / "out")
    assert features.count == len(answers) > 30
    assert features.origin.taps == (2, 4, 5)
    assert {answer["temperature"] for answer in answers} == {0.0}
    again = run(*command)
    assert "in 1 shards, of which 1 are there" in again.stderr


def test_features_of_what_is_there_without_taps(run: Run, chats: Path, tmp_path: Path) -> None:
    done = run("features", "--data", str(chats), "--taps", "none", "--context", "40", "--long", "drop", "--json", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "longer than 40 tokens" in done.stderr
    features = open_features(tmp_path / "out")
    assert features.origin.context == 40
    assert next(iter(samples(features))).taps is None
    told = json.loads(done.stdout)
    assert (told["sequences"], told["tokens"], told["taps"], told["dtype"]) == (features.count, features.tokens, [], "float16")


def test_killed_command_goes_on(run: Run, start: Start, chats: Path, tmp_path: Path) -> None:
    command = ("features", "--data", str(chats), "--regenerate", "--new-tokens", "24", "--out", str(tmp_path / "out"))
    process = start(*command)
    answers = tmp_path / "out.answers.jsonl"
    while process.poll() is None and not (answers.is_file() and answers.stat().st_size):
        os.sched_yield()
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = answers.read_bytes()
    whole = kept[: kept.rfind(b"\n") + 1]
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert answers.read_bytes().startswith(whole)
    assert open_features(tmp_path / "out").count == len(answers.read_bytes().splitlines())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--taps", "9"), "layers from 0 to 7"),
        (("--target", "nowhere/at/all"), "no such folder"),
    ],
)
def test_mistake_is_one_line(run: Run, chats: Path, tmp_path: Path, options: tuple[str, ...], complaint: str) -> None:
    done = run("features", "--data", str(chats), "--out", str(tmp_path / "out"), *options)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_broken_line_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"turns": ["a", "b"]}\n{"turn": "a"}\n')
    done = run("features", "--data", str(tmp_path / "bad.jsonl"), "--out", str(tmp_path / "out"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "bad.jsonl, line 2: it has none of" in done.stderr


def test_a_folder_that_another_process_is_writing_is_refused(run: Run, chats: Path, tmp_path: Path) -> None:
    with held(tmp_path / "out"):
        done = run("features", "--data", str(chats), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "another process is writing" in done.stderr
    assert len(done.stderr.splitlines()) == 1
