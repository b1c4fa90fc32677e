"""`dovetail features` as users have it: from chats to features of the embedded target,
and what is wrong in one line."""

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.launch import cli
from dovetail.workers.training.data.features import open_features
from dovetail.workers.training.workplace import held

Run = Callable[..., subprocess.CompletedProcess[str]]
Refused = Callable[..., str]
PROMPTS = Path(__file__).resolve().parents[2] / "launch" / "demo" / "prompts.jsonl"


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """The shipped prompts, each with an answer of 30 words."""
    file = tmp_path / "chats.jsonl"
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    said = [{"turns": [row["turns"][0], " ".join(["word"] * 30)]} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in said))
    return file


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """The one line that the command ends with; here and not in a process of its own, which would
    import torch for seconds."""

    def refused(*options: str) -> str:
        assert cli.run(["features", *options]) == 2
        said, complaint = capsys.readouterr()
        assert said == ""
        assert complaint.count("\n") == 1
        return complaint

    return refused


@pytest.mark.slow
def test_answers_and_features_in_two_commands(run: Run, chats: Path, tmp_path: Path) -> None:
    command = (
        "features",
        "--data",
        str(chats),
        *shlex.split("--regenerate --temperature 0 --new-tokens 24 --out"),
        str(tmp_path / "out"),
    )
    first = run(*command)
    assert first.returncode == 0, first.stderr
    assert first.stdout == ""
    assert "GB of float16" in first.stderr
    answers = [
        json.loads(line) for line in (tmp_path / "out.answers.jsonl").read_text().splitlines()
    ]
    features = open_features([tmp_path / "out"])
    assert features.count == len(answers) > 30
    assert features.origin.taps == (2, 4, 5)
    assert {answer["temperature"] for answer in answers} == {0.0}
    again = run(*command)
    assert "in 1 shard, 1 already written" in again.stderr


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--taps", "9"), "numbers from 0 to 8"),
        (("--target", "nowhere/at/all"), "is not there: name an existing folder or GGUF file"),
    ],
)
def test_mistake_is_one_line(
    refused: Refused, chats: Path, tmp_path: Path, options: tuple[str, ...], complaint: str
) -> None:
    assert complaint in refused("--data", str(chats), "--out", str(tmp_path / "out"), *options)
    assert not (tmp_path / "out").exists()


def test_broken_line_is_named(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"turns": ["a", "b"]}\n{"turn": "a"}\n')
    assert "bad.jsonl, line 2: has none of" in refused(
        "--data", str(tmp_path / "bad.jsonl"), "--out", str(tmp_path / "out")
    )


def test_a_folder_that_another_process_is_writing_is_refused(
    refused: Refused, chats: Path, tmp_path: Path
) -> None:
    with held(tmp_path / "out"):
        assert "another process is writing" in refused(
            "--data", str(chats), "--out", str(tmp_path / "out")
        )
