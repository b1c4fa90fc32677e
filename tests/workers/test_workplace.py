"""The place of a training: what is somebody else's stays, one process at a time, and no moment at
which a kill or a full disk loses anything."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dovetail.protocol.errors import OutputError, UserError
from dovetail.workers.training.workplace import Workplace, held, replace_tensors


def place(out: Path, kind: str = "eagle") -> Workplace:
    return Workplace(
        out, f"{kind} head", frozenset(("config.json", "README.md")), {"architectures": [kind]}
    )


def finish(at: Workplace, text: str) -> None:
    with at.hold(), at.result() as folder:
        (folder / "config.json").write_text(
            json.dumps({"architectures": at.marks["architectures"], "text": text})
        )


def test_a_finished_folder_is_replaced_by_one_of_its_kind_and_nothing_else_is_left(
    tmp_path: Path,
) -> None:
    for text in ("one", "two"):
        finish(place(tmp_path / "out"), text)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["text"] == "two"
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "content",
    [
        {"letter.txt": "dear"},
        {"README.md": "mine"},
        {"config.json": '{"architectures": ["eagle"]}', "letter.txt": "dear"},
    ],
)
def test_what_no_training_wrote_is_refused_and_stays(
    content: dict[str, str], tmp_path: Path
) -> None:
    for folder in ("out", "out.new", "out.old"):
        (tmp_path / folder).mkdir()
        for name, text in content.items():
            (tmp_path / folder / name).write_text(text)
    with pytest.raises(
        UserError,
        match=r"out exists, and is not just a trained eagle head \(it holds .*give "
        r"another --out",
    ):
        finish(place(tmp_path / "out"), "one")
    finish(place(tmp_path / "elsewhere"), "one")
    for folder in ("out", "out.new", "out.old"):
        assert {file.name: file.read_text() for file in (tmp_path / folder).iterdir()} == content
    assert not (tmp_path / "out.unfinished").exists()


def test_a_head_of_another_kind_stays(tmp_path: Path) -> None:
    finish(place(tmp_path / "out", "jakiro"), "one")
    with pytest.raises(UserError, match="not just a trained eagle head"):
        finish(place(tmp_path / "out"), "two")


def test_somebody_elses_unfinished_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "out.unfinished" / "novel.txt").write_text("chapter one")
    with pytest.raises(UserError, match=r"holds novel\.txt, which is not from a training"):
        finish(place(tmp_path / "out"), "one")
    assert (tmp_path / "out.unfinished" / "novel.txt").is_file()


def test_what_came_into_the_way_during_the_training_stays_and_so_does_the_checkpoint(
    tmp_path: Path,
) -> None:
    at = place(tmp_path / "out")

    def train() -> None:
        with at.hold(), at.result():
            at.checkpoint.touch()
            at.out.mkdir()
            (at.out / "letter.txt").touch()

    with pytest.raises(UserError, match=r"letter\.txt"):
        train()
    assert at.checkpoint.is_file()
    assert (at.out / "letter.txt").is_file()


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    at = place(tmp_path / "out")
    finish(at, "one")
    at.folder.mkdir()
    at.out.rename(at.folder / "replaced")  # as far as a killed process came
    with at.hold():
        assert json.loads((at.out / "config.json").read_text())["text"] == "one"
    assert not at.folder.exists()


def test_a_folder_is_held_by_one_process_until_it_dies(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\nfrom dovetail.workers.training.workplace import held\nwith "
        "held(pathlib.Path(sys.argv[1])): print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "out"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with (
            pytest.raises(UserError, match=r"another process is writing .*out: wait for it"),
            held(tmp_path / "out"),
        ):
            pass
        other.kill()
    with held(tmp_path / "out"):
        pass
    assert not (tmp_path / "out").exists()


def test_a_disk_that_takes_no_more_is_an_error_that_names_the_file_and_the_older_one_stays(
    tmp_path: Path,
) -> None:
    file, limits = tmp_path / "checkpoint", resource.getrlimit(resource.RLIMIT_FSIZE)
    replace_tensors(file, {"a": torch.ones(1)}, {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OutputError, match="checkpoint"):
            replace_tensors(file, {"a": torch.ones(1 << 20)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load_file(file)["a"].tolist() == [1]
