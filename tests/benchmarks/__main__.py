"""The commands: `python tests/benchmarks NAME`."""

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # what lies here is benchmarks.NAME
    try:
        importlib.import_module("support.program").run("benchmarks.commands")
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name} {importlib.import_module('benchmarks').NEEDED}")
