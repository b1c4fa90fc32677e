"""The table of drafts that may be downloaded, and what `dovetail plan` shows of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.launch.planning.downloads import downloads
from dovetail.launch.settings.models import DEMO_FOLDER


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.1-8B-Instruct@main",
        "/models/Llama-3.1-8B-Instruct",
        "/models/llama-3.1-8b-instruct-Q4_K_M.gguf",
        "/cache/models--meta-llama--Llama-3.1-8B-Instruct/snapshots/0123",
        "someone/Meta-Llama-3.1-8B-Instruct-GGUF/Meta-Llama-3.1-8B-Instruct-IQ4_XS.gguf",
    ],
)
def test_drafts_are_found_by_the_name_of_the_target(name: str) -> None:
    found = [one.id for one in downloads().of(name)]
    assert found[0] == "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"  # the longest accepted length
    assert "meta-llama/Llama-3.2-1B-Instruct" in found


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-8B-Base", "Qwen/Qwen3-80B", "a/MyQwen3-8B", "/models/Qwen3-8B-mine", ""]
)
def test_another_model_of_a_similar_name_has_none(name: str) -> None:
    assert downloads().of(name) == []


def test_every_draft_is_listed_once_and_its_figures_are_possible() -> None:
    every = downloads().drafts
    assert len({(one.target, one.id, one.kind) for one in every}) == len(every)
    assert all(one.tokens is None or 1.0 < one.tokens < 16.0 for one in every)
    assert all(one.gb is None or 0.05 < one.gb < 100.0 for one in every)
    assert all(one.tokens is None or ":" in one.source for one in every)  # how it was measured


def test_plan_lists_what_may_be_downloaded(tmp_path: Path, invoke: Callable[..., Any]) -> None:
    target = shutil.copytree(DEMO_FOLDER / "target", tmp_path / "Qwen3-8B")
    done = invoke("plan", "--target", str(target), "--weights", "half")
    assert done.returncode == 0, done.stderr
    shown = done.stdout.partition("drafts that may be downloaded (as of 20")[2]
    assert "Qwen/Qwen3-0.6B" in shown
    assert "--draft z-lab/Qwen3-8B-DFlash-b16" in shown.splitlines()[-1]
    done = invoke("plan", "--target", str(target), "--draft", f"{tmp_path}/none.gguf")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1  # before anything is measured
    done = invoke("plan", "--target", str(target), "--weights", "half", "--json")
    first = json.loads(done.stdout)["downloads"][-1]
    assert {*first} == {"target", "id", "kind", "gb", "tokens", "source"}
