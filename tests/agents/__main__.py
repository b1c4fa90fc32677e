"""The command: `python tests/agents`."""

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # what lies here is agents.NAME
    importlib.import_module("support.program").run("agents.commands")
