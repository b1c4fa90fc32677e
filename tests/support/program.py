"""Starts a program of the tests, in an environment that has dovetail installed or just its
dependencies; `sys.path[0]` is the folder `tests`."""

import importlib
import importlib.util


def run(module: str) -> None:
    """Run the `main` of a module."""
    if importlib.util.find_spec("dovetail") is None:
        importlib.import_module("conftest")  # gives a bare checkout its import name
    else:
        importlib.import_module("pretended").add()
    importlib.import_module(module).main()
