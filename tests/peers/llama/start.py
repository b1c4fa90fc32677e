"""Runs a module of ours by another Python, of which the module may use the libraries: it sees this
package there and nothing else of ours.

Standard library only, since the tests' benchmarks start their sides with it too.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3]
"""The folder that `dovetail` is, a checkout."""
START = (
    "import runpy, sys, types; package = sys.modules['dovetail'] = "
    "types.ModuleType('dovetail'); package.__path__ = [sys.argv[1]]; "
    "sys.path.append(sys.argv[1] + '/tests'); del sys.argv[:2]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
NEEDED = "llama_cpp, gguf"
INSTALL = (
    "python -m venv llama && llama/bin/pip install llama-cpp-python gguf; then "
    "--llama-python llama/bin/python"
)


def command_of(python: Path | str, module: str, arguments: Sequence[str]) -> list[str]:
    """The command that has `python` run a module of ours."""
    return [str(python), "-P", "-c", START, str(PACKAGE), module, *arguments]


def has_llama(python: Path | str) -> bool:
    """Return whether this Python has llama.cpp and what writes its files."""
    try:
        return not subprocess.run(
            [python, "-c", f"import {NEEDED}"], capture_output=True, check=False
        ).returncode
    except OSError:
        return False


def find_python(python: Path | None) -> Path | None:
    """The Python that has llama.cpp: the one that is named, or without a name our own; None if it
    has it not."""
    found = python if python is not None else Path(sys.executable)
    return found if has_llama(found) else None
