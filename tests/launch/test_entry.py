"""The installed command, from its first line on."""

import signal
import subprocess
import sys
from importlib.metadata import entry_points

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
