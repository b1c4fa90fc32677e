"""The commands: `python tests/benchmarks NAME`, in an environment that has dovetail installed or
just its dependencies."""

import importlib
import importlib.util
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(
        Path(__file__).resolve().parent.parent
    )  # tests: what lies here is benchmarks.NAME, and shadows no library
    if importlib.util.find_spec("dovetail") is None:
        importlib.import_module(
            "conftest"
        )  # gives a bare checkout its import name, here and in child processes
    else:
        importlib.import_module("pretended").add()
    try:
        commands = importlib.import_module("benchmarks.commands")
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name} {importlib.import_module('benchmarks').NEEDED}")
    commands.main()
