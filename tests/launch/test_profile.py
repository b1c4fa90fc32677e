"""`dovetail profile` as users have it: over processes of its own, over a server that runs, and the
page that it writes."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess, Popen
from typing import Any

import pytest

from dovetail.launch.commands.profile import _made, show
from dovetail.launch.console import terminal
from dovetail.launch.profiling.evidence import Evidence
from dovetail.launch.profiling.findings import find
from support.patience import PATIENCE_S
from support.profiled import made_up_run

Run = Callable[..., CompletedProcess[str]]
FILES = ["profile.json", "profile.svg", "trace.json"]


@pytest.mark.slow
def test_a_run_of_its_own_says_for_every_device_where_its_time_went_and_what_would_help(
    run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    fixed = ("--policy", "dynamic", "--tree.insist", "true")
    result = run(
        "profile",
        "--prompt",
        "Tell me a story.",
        "--out",
        str(out),
        *shlex.split("--max-tokens 48 --json --draft.device cpu"),
        *fixed,
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert {"devices", "round_ms", "unaccounted_share", "bounds", "advice", "files"} <= set(told)
    assert set(told["devices"]) == {"target", "draft", "coordinator"}
    for device in told["devices"].values():
        assert device["busy"] + sum(device["waiting"].values()) == pytest.approx(1.0)
    assert 0.0 < told["devices"]["target"]["busy"] < 1.0
    assert told["devices"]["target"]["sampled"]["process"] > 0.0
    assert {"verify", "draft", "linears", "level", "handle", "link"} <= set(told["round_ms"])
    assert abs(told["unaccounted_share"]) < 1.0
    assert told["bounds"]["pass"]["bound"] in ("memory", "compute", "both")
    looked_at = [*told["advice"], *told["no_gain"]]
    assert {"alone", "policy", "weights"} <= {one["name"] for one in looked_at}
    assert all(one["gain"] > 1.0 for one in told["advice"])
    assert told["files"] == FILES
    assert all((out / name).stat().st_size for name in told["files"])
    assert json.loads((out / "profile.json").read_text(encoding="utf-8")) == told
    _check_trace(json.loads((out / "trace.json").read_text(encoding="utf-8")))


def _check_trace(trace: dict[str, Any]) -> None:
    """All processes are rows with slices, and a tree's trip is a chain of arrows whose ends lie in
    slices."""
    events = trace["traceEvents"]
    names = {
        event["args"]["name"].partition(" (")[0]: event["pid"]
        for event in events
        if event["name"] == "process_name"
    }
    assert {"coordinator", "target", "draft"} <= set(names)
    slices = [event for event in events if event["ph"] == "X"]
    assert set(names.values()) == {event["pid"] for event in slices}
    begins, ends = ({event["id"] for event in events if event["ph"] == kind} for kind in ("s", "f"))
    assert begins == ends
    assert begins


@pytest.mark.slow
def test_a_server_is_watched_while_somebody_asks_it(
    start: Callable[..., Popen[str]], run: Run, tmp_path: Path
) -> None:
    server = start("serve", "--http.port", "0", "--json", "--draft.device", "cpu")
    assert server.stdout is not None
    told = json.loads(server.stdout.readline())
    asking = start("generate", "--connect", told["address"], "Tell me a long story.")
    watched = run(
        "profile",
        "--connect",
        told["url"].replace("127.0.0.1", "localhost"),
        "--seconds",
        "8",
        "--out",
        str(tmp_path / "watched"),
        "--json",
    )
    assert watched.returncode == 0, watched.stderr
    found = json.loads(watched.stdout)
    assert found["rounds"] > 1
    assert found["devices"]["target"]["busy"] > 0.0
    assert asking.wait(PATIENCE_S) == 0
    with_prompt = run(
        "profile",
        "--connect",
        told["address"],
        "--prompt",
        "Tell me a story.",
        "--max-tokens",
        "32",
        "--out",
        str(tmp_path / "asked"),
    )
    assert with_prompt.returncode == 0, with_prompt.stderr
    assert "speed-up over the target alone" in with_prompt.stdout
    idle = run(
        "profile", "--connect", told["address"], "--seconds", "0.5", "--out", str(tmp_path / "idle")
    )
    assert (idle.returncode, "nothing was decoded" in idle.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", "a", "--prompts", "b"), "name two workloads"),
        (("--prompt", "  "), "--prompt is empty"),
        (("--connect", "http://127.0.0.1:9"), "none of your servers here serves"),
        (("--connect", "http://127.0.0.1:nine"), "is not an address"),
        (("--seconds", "3"), "--seconds needs --connect"),
    ],
)
def test_a_mistake_is_one_line(
    invoke: Run, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    result = invoke("profile", "--out", str(tmp_path / "out"), *arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(
    invoke: Run, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    result = invoke("profile", "--prompt", "a", "--out", str(tmp_path / "file" / "out"))
    assert result.returncode == 2
    assert re.search(r"cannot write the profile to .*out: ", result.stderr)


@pytest.mark.parametrize("there", [False, True])
def test_what_is_interrupted_leaves_nothing_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    out = tmp_path / "new" / "out"
    if there:
        out.mkdir(parents=True)
        (out / "profile.json").write_text("{}")

    def interrupted() -> None:
        with _made(out):
            assert (out / "profile.json").is_file()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.rglob("*")] == (
        ["new", "out", "profile.json"] if there else []
    )
    assert capsys.readouterr().err == f"interrupted: nothing was written to {out}\n"


@pytest.mark.parametrize(
    "run_", [made_up_run(gpu=True), made_up_run(nodes=0)], ids=["all", "no draft"]
)
def test_the_tables_fit_eighty_columns_and_begin_with_what_matters_most(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run_: Evidence
) -> None:
    monkeypatch.setattr(terminal, "WIDTH_WITHOUT_TERMINAL", 80)
    told = find(run_, None)
    show(told)
    title, workload, first, second, *lines = capsys.readouterr().out.splitlines()
    assert (title, workload) == (told["title"], told["workload"])
    assert first.startswith(f"{told['tokens_per_s']:.1f} tokens/s · tau {told['tau']:.2f} · ")
    assert ("times the target alone" in first) is bool(run_.soundings.wide)
    assert second.startswith(f"{told['tokens']} tokens in ")
    tables = [line for line in lines if line.startswith(" ")]
    assert max(map(len, tables)) <= 80
    heads = [line.split() for line in tables]
    assert ["of", "the", "time", *told["devices"]] in heads
    assert "-0.0%" not in " ".join(tables)
