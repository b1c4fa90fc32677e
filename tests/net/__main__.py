"""The command: `tests/net/run`, in an environment that has dovetail installed or just its
dependencies. Starts itself anew in a network of its own."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

ISOLATED = "DOVETAIL_NET_ISOLATED"
NOT_PERMITTED = 77

if __name__ == "__main__":
    sys.path[0] = str(
        Path(__file__).resolve().parent.parent
    )  # tests: what lies here is net.NAME, and shadows no library
    if importlib.util.find_spec("dovetail") is None:
        importlib.import_module(
            "conftest"
        )  # gives a bare checkout its import name, here and in child processes
    machines = importlib.import_module("support.machines")
    if os.environ.get(ISOLATED) is None:
        if (reason := machines.why_not()) is not None:
            sys.stderr.write(f"not checked: {reason}\n")
            sys.exit(NOT_PERMITTED)
        command = machines.isolated([str(Path(__file__).parent), *sys.argv[1:]])
        os.execvpe(command[0], command, {**os.environ, ISOLATED: "1"})
    sys.exit(importlib.import_module("net.checks").main(sys.argv[1:]))
