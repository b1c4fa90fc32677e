"""The installed command, from its first line on."""

import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

INTERRUPTED = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, {handler})
sys.meta_path.insert(0, Interrupting())
sys.argv = ["dovetail", "--version"]
from dovetail.launch.processes.entry import main
main()
"""


def run(handler: str) -> subprocess.CompletedProcess[str]:
    script = INTERRUPTED.format(handler=handler)
    return subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False
    )


def test_ctrl_c_while_the_command_line_is_imported_ends_without_a_traceback() -> None:
    ended = run("signal.default_int_handler")
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    ended = run("signal.SIG_IGN")
    assert ended.returncode == 0
    assert ended.stdout.startswith("dovetail ")


def test_it_is_what_the_installed_command_runs() -> None:
    (script,) = entry_points(group="console_scripts", name="dovetail")
    assert script.value == "dovetail.launch.processes.entry:main"


def test_a_python_without_docstrings_decodes() -> None:
    command = [sys.executable, "-P", "-m", "dovetail.launch.cli"]
    more = {"PYTHONOPTIMIZE": "2"}  # as -OO, and in the processes that it starts
    ask = ("generate", "--max-tokens", "2", "--draft", "none", "Hi")
    done = subprocess.run(
        [*command, *ask], env={**os.environ, **more}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_model_whose_name_is_not_utf8_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/m\xff"
    Path(os.fsdecode(folder)).mkdir()
    command = [sys.executable, "-P", "-m", "dovetail.launch.cli"]
    for name in (folder, folder + b".gguf"):
        if name.endswith(b"f"):
            Path(os.fsdecode(name)).touch()
        role = b"--draft" if name == folder else b"--target"
        asked = [*command, b"generate", role, name, b"Hi"]
        done = subprocess.run(asked, capture_output=True, check=False)
        assert done.returncode == 2
        assert done.stderr.count(b"\n") == 1
        assert b"has a name that is not UTF-8; rename it" in done.stderr, done.stderr
