"""llama-server as a peer of `dovetail bench`; it is tried itself where LLAMA_SERVER names one."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from dovetail.launch.bench.contenders import check_methods
from dovetail.launch.bench.methods import beside_llama_server, read_method
from dovetail.launch.machine.cores import CoreLayout
from dovetail.launch.machine.topology import Place
from dovetail.launch.settings.configure import Configuration, configure
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.errors import UserError
from peers.llama.served import ServerOptions, find_program, read_option
from support.gguf_files import tokens_of, write_gguf

RunCommand = Callable[..., subprocess.CompletedProcess[str]]
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NAMED = os.environ.get("LLAMA_SERVER", "")
LAYOUT = CoreLayout(Place((0,)), Place((1,)), Place((1,)))


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The embedded pair in GGUF files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = {role: tmp_path / f"{role}.gguf" for role in ("target", "draft")}
    for role, file in files.items():
        folder = DEMO_FOLDER / role
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        facts = {**tokens_of(folder), "tokenizer.chat_template": template}
        write_gguf(folder, file, lambda *_: Type.Q8_0, **facts)
    return files


def base(**settings: Any) -> Configuration:
    flags = {name.replace("__", "."): str(value) for name, value in settings.items()}
    return configure(flags=flags, environment={})


def test_its_options_and_our_settings_are_appended_to_its_name(pair: dict[str, Path]) -> None:
    configuration = base(target__model=pair["target"])
    method = read_method(configuration, "llama-server,draft=own,max=8,flash=on,threads=2")
    assert method.options == ServerOptions(draft="own", max=8, threads=2, flash="on")
    assert (method.ours, method.exact, method.weights) == (False, False, "Q8_0")
    assert read_option(ServerOptions(), "tree.gamma=3") is None
    for wrong in ("threads=0", "max=x", "flash=maybe", "draft="):
        with pytest.raises(UserError, match=r"write draft=FILE\.gguf"):
            read_method(configuration, f"llama-server,{wrong}")


def test_it_is_given_the_files_of_our_pair_and_nothing_else(pair: dict[str, Path]) -> None:
    def check(text: str, **settings: Any) -> None:
        check_methods([read_method(base(**settings), text)], LAYOUT)

    ours = {"target__model": pair["target"], "draft__model": pair["draft"]}
    check("llama-server,draft=own", **ours)
    check(f"llama-server,draft={pair['draft']}", target__model=pair["target"])
    assert beside_llama_server(base(**ours))[2:] == ("llama-server", "llama-server,draft=own")
    alone = base(target__model=pair["target"], draft__kind="ngram")
    assert beside_llama_server(alone)[2:] == ("llama-server",)
    for text, settings, words in (
        ("llama-server", {}, "the embedded target is none"),
        ("llama-server,draft=own", {"target__model": pair["target"]}, "our draft is no GGUF file"),
        ("llama-server,threads=3", ours, "threads=3 are more than the 2 cores"),
        ("llama.cpp", ours, "take --method llama-server, which is given the very file"),
    ):
        with pytest.raises(UserError, match=words):
            check(text, **settings)


def test_without_it_one_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="build-llama --out FOLDER builds it"):
        find_program(None)
    with pytest.raises(UserError, match="is no program"):
        find_program(tmp_path)
    shutil.copy("/bin/sh", tmp_path / "llama-server")
    assert find_program(None) == tmp_path / "llama-server"


@pytest.mark.skipif(not NAMED, reason="LLAMA_SERVER names no llama-server")
@pytest.mark.slow
def test_a_gguf_pair_is_measured_beside_it_alone_and_with_its_draft(
    run: RunCommand, pair: dict[str, Path]
) -> None:
    asked = ("--llama-server", NAMED, "--limit", "2", "--max-tokens", "16", "--json")
    heats = ("--temperature", "0", "--temperature", "1")
    result = run("bench", str(pair["target"]), *asked, *heats, "--draft.device", "cpu")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    methods = {(row["method"], row["temperature"]): row for row in rows}
    assert {name.partition(" with")[0] for name, _ in methods} == {
        *("none", "auto", "llama-server", "llama-server,draft=own")
    }
    assert all(row["tokens_per_s"] > 0 and row["peak_rss_mb"] > 10 for row in rows)


@pytest.mark.skipif(not NAMED, reason="LLAMA_SERVER names no llama-server")
@pytest.mark.slow
def test_several_requests_at_once_are_measured_beside_it(tmp_path: Path) -> None:
    asked = ["--llama-server", NAMED, "--streams", "2", "--inflate", "32MiB", "--repeat", "1"]
    command = [sys.executable, str(BENCHMARKS), "parallel", *asked, "--requests", "2", "--json"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout, done.stderr  # which of the two is ahead is not what is tested
    result = json.loads(done.stdout)
    assert [row["method"] for row in result["rows"]] == ["none", "draft", "server"]
    assert all(row["completed"] == 2 and row["output_throughput"] > 0 for row in result["rows"])
    assert result["over_llama_server"]["2"]["median"] > 0
