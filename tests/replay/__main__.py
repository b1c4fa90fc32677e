"""The command: `python tests/replay RECORDING --worker target`, in an environment that has dovetail
installed or just its dependencies."""

import importlib
import importlib.util
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # what lies here is replay.NAME
    if importlib.util.find_spec("dovetail") is None:
        importlib.import_module("conftest")  # gives a bare checkout its import name
    importlib.import_module("replay.command").main()
