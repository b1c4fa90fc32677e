"""The command runs where there is no GPU, the CPU in place of one: so it does not rot between two
machines that have one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu.report import Report
from support.kernels import needs_kernels

GPU = Path(__file__).parent


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """On a machine that is busy steps may take twenty times as long as on a GPU."""
    command = [sys.executable, str(GPU), *arguments, "--seconds", "10000"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def only(*steps: str) -> list[str]:
    return [word for step in steps for word in ("--only", step)]


def failures(out: Path) -> dict[str, str]:
    steps = json.loads(out.read_text(encoding="utf-8"))
    return {step["name"]: step["failure"] for step in steps}


def test_what_a_step_has_found_can_be_read_while_it_goes_on(tmp_path: Path) -> None:
    report = Report(tmp_path / "step.jsonl")
    report.note("link", "25 GB/s")
    report.figure("ratio", 8.5, least=9)
    report.check("tokens", True, "the same")
    assert [(line.kind, line.holds) for line in report.lines()] == [
        ("note", None),
        ("figure", False),
        ("check", True),
    ]


def test_caps_that_are_none_are_refused() -> None:
    for caps in ("8,x", "0"):
        found = run("--vram", caps)
        assert (found.returncode, caps in found.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@needs_kernels
def test_offloading_and_tests_run_with_the_cpu_in_place_of_a_gpu(tmp_path: Path) -> None:
    out, steps = tmp_path / "out.json", ("facts", "offload", "tests")
    found = run("--device", "cpu", "--quick", *only(*steps), "--out", str(out))
    assert found.returncode == 0, found.stdout + found.stderr
    assert failures(out) == dict.fromkeys(steps, "")
    done = {step["name"]: step for step in json.loads(out.read_text(encoding="utf-8"))}
    names = " ".join(line["name"] for line in done["offload"]["lines"])
    for wanted in (
        "t_T",
        "T_V(289)",
        "t_D",
        "draft step",
        "SubSpec over plain",
        "formula",
        "PCIe 4",
        "asynchronous transfer",
        "streamed prefill",
    ):
        assert wanted in names


@pytest.mark.slow
@pytest.mark.timeout(3000)
@needs_kernels
def test_products_levels_and_every_draft_run_on_a_pretended_gpu(tmp_path: Path) -> None:
    out, steps = tmp_path / "out.json", ("facts", "products", "levels", "drafts", "margins")
    found = run("--device", "pretended", "--quick", *only(*steps), "--out", str(out))
    assert found.returncode == 0, found.stdout + found.stderr
    assert failures(out) == dict.fromkeys(steps, "")
    done = {step["name"]: step for step in json.loads(out.read_text(encoding="utf-8"))}
    drafted = {
        line["name"].partition(",")[0]
        for line in done["drafts"]["lines"]
        if line["name"].endswith(": drafting") and line["holds"]
    }
    assert drafted >= {
        "small",
        "eagle",
        "eagle3",
        "dovetail",
        "jakiro",
        "jakiro without contrast",
        "jakiro-star",
    }


@pytest.mark.slow
def test_a_step_that_cannot_run_is_named_and_fails_the_command(tmp_path: Path) -> None:
    """There is no GPU of that number."""
    out, steps = tmp_path / "out.json", ("facts", "offload")
    found = run("--device", "cuda:99", "--quick", *only(*steps), "--out", str(out))
    assert found.returncode == 1
    assert failures(out) == dict.fromkeys(steps, "ended with code 1")
    assert found.stderr.count("Error: there is no cuda:99") >= 2
