"""Each command of the benchmarks runs from beginning to end, at its smallest sizes.

Those that need what is not there everywhere, such as llama.cpp, are named in `PEERS`.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks import commands

BENCHMARKS = Path(__file__).parent / "benchmarks"
PEERS = {
    "build-llama": "the sources of llama.cpp",
    "context": "llama-cpp-python and gguf",
    "gguf-pair": "llama.cpp's llama-quantize",
    "logits": "llama-cpp-python and gguf",
    "passes": "llama.cpp's llama-bench",
    "ray": "the extra ray",
}
"""Command -> what it needs beside the project."""
SHAPE = "--shape small --pairs 2"
COMMANDS = {
    "beginnings": "--prompt 200 --requests 2 --pairs 1 --inflate 32MiB",
    "coupling": "--limit 1 --max-tokens 8 --keys 1 --children 1,2",
    "expert-trees": "--limit 2 --max-tokens 4 --experts 4 --share 0.5",
    "experts": "--rows 1,2 --shape small --pairs 2",
    "fleet": "--inflate 32MiB --replicas 1 --loads 0.3 --seconds 5 --turns 2",
    "gains": "--situation 'too many nodes' --inflate 32MiB --limit 2 --max-tokens 16",
    "gaps": "--prompt 200 --prompts 1 --inflate 32MiB",
    "inflate": "--out {here}/pair --size 32MiB",
    "journal": "--pairs 1 --starts 1 --streams 1 --max-tokens 16 --inflate 32MiB",
    "legacy": "",
    "links": "--inflate 32MiB --delays 1 --rates 1000 --pairs 2 --max-tokens 16",
    "loading": "--shape small --layers 1 --weights int8",
    "loads": "--weights int8 --drafts small --streams 1 --inflate 32MiB --max-tokens 16 --repeat 1",
    "pictures": "bench --out {here} --inflate 32MiB --limit 1 --max-tokens 8 --values 1,2",
    "recurrence": "--shape 0.8b --prompt 16 --pairs 2 --weights int8",
    "replicas": "--inflate 32MiB --streams 1 --requests 2 --max-tokens 8 --repeat 1",
    "router": "--replicas 2 --decisions 100 --requests 20 --chunks 4 --together 2",
    "routing": "--passes 48 --stretch 4",
    "shards": f"{SHAPE} --rows 1 --layers 2",
    "targets": "--streams 2 --repeat 1 --max-tokens 8 --inflate 32MiB",
    "users": "--users 2 --keys 1 --seconds 10 --max-tokens 8 --inflate 32MiB",
}
"""Command -> its smallest sizes."""
FILES = ("inflate", "pictures")
"""Commands that write files, and no report."""
GOALS = ("fleet", "users")
"""Commands whose exit code is 1 where they report that a goal was missed, as it may be here: it
depends on the machine and on what else runs."""


def test_every_command_is_run_or_needs_a_peer() -> None:
    assert {*commands.COMMANDS} == {*COMMANDS, *PEERS}


def test_every_command_is_where_the_table_says() -> None:
    context = click.Context(commands.main)
    for name in commands.COMMANDS:
        command = commands.main.get_command(context, name)
        assert isinstance(command, click.Command), name
        assert command.name == name


@pytest.mark.parametrize("arguments", [(), ("legacy",)], ids=" ".join)
def test_help_imports_the_commands_that_it_is_about_alone(arguments: tuple[str, ...]) -> None:
    code = "from benchmarks.commands import main; main(standalone_mode=False)"
    said = "import sys; print(*sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {said}", *arguments, "--help"],
        cwd=BENCHMARKS.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    places = {place.partition(".")[0] for place, _ in commands.COMMANDS.values()}
    imported = {*done.stderr.split()}
    assert {place for place in places if f"benchmarks.{place}" in imported} == {*arguments}
    assert "torch" not in imported
    assert all(name in done.stdout for name in arguments or commands.COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs_from_beginning_to_end(name: str, tmp_path: Path) -> None:
    arguments = [
        sys.executable,
        str(BENCHMARKS),
        name,
        *shlex.split(COMMANDS[name].format(here=tmp_path)),
        *([] if name in FILES else ["--json"]),
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    report: Any = name in FILES or json.loads(done.stdout or "null")
    assert report, done.stderr[-2000:]
    assert done.returncode == (name in GOALS and not report["holds"]), done.stderr[-2000:]
