"""Tests of the process that is begun before its command has been imported: workers are forked from
it, and it begins for no command that does without."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from gguf import GGMLQuantizationType as Type

from dovetail.launch.settings.embedded import DEMO_FOLDER
from support.cases import everyday
from support.gguf_files import tokens_of, write_gguf
from support.patience import PATIENCE_S

BEGUN = """
import sys
import click
from dovetail.launch import cli
from dovetail.launch.processes import ahead
sys.argv[0] = "dovetail"
ahead.run_nursery = lambda talk, modules, log: modules
ahead.dismiss = lambda: None
cli.group.resolve_command(click.Context(cli.group), sys.argv[1:])
print(ahead.begun())
"""
FORKED_FROM_IT = """
import os, signal, sys
import psutil
from dovetail.launch.processes import ahead, nursery
from dovetail.launch.processes.supervise import Supervisor
sys.argv[0] = "dovetail"
nursery.MODULES = ("json",)
ahead.begin_for([])
mine = {child.pid for child in psutil.Process().children()}
waiting = ["worker", "--role=draft", "--draft.kind=ngram", "--connect=-"]
with Supervisor() as supervisor:
    begun = supervisor.start_nursery(nursery.MODULES)
    print({begun[0].process.pid} == mine, ahead.begun())
    (child,) = supervisor.start_forked(begun, {"worker": waiting}).values()
    print(begun[0].ended, psutil.Process(child.process.pid).ppid() == os.getpid())
    other = supervisor.start_nursery(nursery.MODULES)
    print(other[0].process.pid in mine)
"""
LOOKS_UP = """
import sys
from pathlib import Path
from dovetail.launch.processes import ahead, nursery
from dovetail.launch.processes.stack import begin_workers
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import configure
sys.argv[0] = "dovetail"
nursery.MODULES = ("torch",)
ahead.begin_for([])
settings = configure(flags={"draft.kind": "ngram"}, environment={}).settings
commands = {
    f"{role} worker": ["worker", f"--role={role}", "--draft.kind=ngram", "--connect=-"]
    for role in ("target", "draft")
}
with Supervisor() as supervisor:
    for name, child in begin_workers(supervisor, settings, commands)().items():
        print(name, "libtorch" in Path(f"/proc/{child.process.pid}/maps").read_text())
"""
PROVES = """
import sys
from pathlib import Path
from dovetail.launch.processes import ahead, nursery
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import configure
flags, sys.argv = {"target.model": sys.argv[1]}, ["dovetail"]
nursery.MODULES, nursery.PROVING = ("json",), "torch"
ahead.begin_for([])
configure(flags=flags, environment={})
waiting = ["worker", "--role=draft", "--draft.kind=ngram", "--connect=-"]
with Supervisor() as supervisor:
    begun = supervisor.start_nursery(nursery.MODULES)
    (child,) = supervisor.start_forked(begun, {"worker": waiting}).values()
    print("libtorch" in Path(f"/proc/{child.process.pid}/maps").read_text())
"""
LEFT = """
import sys
import psutil
from dovetail.launch.processes import ahead
sys.argv[0] = "dovetail"
ahead.begin_for([])
print(*(child.pid for child in psutil.Process().children()), flush=True)
print(ahead.taken_bytes() > 0)
if sys.argv[1:]:
    ahead.dismiss()
    print(*(child.pid for child in psutil.Process().children()), ahead.taken_bytes())
"""


def python(program: str, *arguments: str, cores: int = 2, **environment: str) -> list[str]:
    """Run a program on so many cores, by name; return the words of each line that it prints."""
    told = f"import os\nos.sched_getaffinity = lambda _: set(range({cores}))\n{program}"
    command = [sys.executable, "-P", "-c", told, *arguments]
    given = {**os.environ, **environment}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=given)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("command", "begins"),
    everyday(
        [
            ("generate hello", True),
            ("chat", True),
            ("generate --max-tokens 4 hello", True),
            ("serve --http.port 0", True),
            ("serve --engine ray", False),
            ("generate hello --connect ipc:///tmp/hub", False),
            ("generate hello --connect=http://127.0.0.1:8000", False),
            ("chat --help", False),
            ("chat --help-all", False),
            ("status", False),
            ("worker --role target", False),
        ],
        ("generate hello", True),
        ("chat --help", False),
    ),
)
def test_it_begins_for_commands_that_start_workers_of_their_own(
    command: str, begins: bool, tmp_path: Path
) -> None:
    assert python(BEGUN, *command.split(), XDG_RUNTIME_DIR=str(tmp_path)) == [str(begins)]


def test_one_core_does_one_thing_after_the_other(tmp_path: Path) -> None:
    assert python(BEGUN, "chat", cores=1, XDG_RUNTIME_DIR=str(tmp_path)) == ["False"]


def test_a_coordinator_that_runs_is_used_instead(tmp_path: Path) -> None:
    running = "from dovetail.launch.files.directory import announced\n"
    running += "".join(f"    {line}\n" for line in BEGUN.strip().splitlines())
    running = running.replace("    import sys", "with announced('ipc:///x'):\n    import sys")
    assert python(running, "generate", "hello", XDG_RUNTIME_DIR=str(tmp_path)) == ["False"]


def test_a_draft_that_looks_up_is_not_forked_from_it(tmp_path: Path) -> None:
    lines = python(LOOKS_UP, XDG_RUNTIME_DIR=str(tmp_path))
    assert lines == ["target worker True", "draft worker False"]


def test_it_imports_what_a_proof_takes_while_a_file_is_read_for_the_first_time(
    tmp_path: Path,
) -> None:
    file, folder = tmp_path / "model.gguf", DEMO_FOLDER / "target"
    write_gguf(folder, file, lambda *_: Type.Q8_0, **tokens_of(folder))
    places = {name: str(tmp_path) for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME")}
    assert python(PROVES, str(file), **places) == ["True"]
    assert python(PROVES, str(file), **places) == ["False"]


def test_a_supervisor_takes_it_over_once(tmp_path: Path) -> None:
    assert python(FORKED_FROM_IT, XDG_RUNTIME_DIR=str(tmp_path)) == [
        "True False",
        "True True",
        "False",
    ]


def test_it_ends_with_a_command_that_did_not_want_it(tmp_path: Path) -> None:
    pids, counts = python(LEFT, XDG_RUNTIME_DIR=str(tmp_path))
    processes = [psutil.Process(int(pid)) for pid in pids.split() if psutil.pid_exists(int(pid))]
    assert pids
    assert counts == "True"
    assert not psutil.wait_procs(processes, timeout=PATIENCE_S)[1]


def test_a_command_that_ends_waits_until_it_has_ended(tmp_path: Path) -> None:
    assert python(LEFT, "dismissed", XDG_RUNTIME_DIR=str(tmp_path))[2] == "0"
