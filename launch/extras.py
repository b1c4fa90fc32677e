"""Extras: parts that no reply needs; `tests/budget.toml` lists them. Other modules import them by
name through this file, so an extra's folder can be removed with its commands."""

import importlib
from importlib.util import find_spec
from typing import Any

from dovetail.protocol.errors import UserError


def installed(module: str) -> bool:
    """Return whether a module of dovetail, such as "launch.bench", is installed."""
    try:
        return find_spec(f"dovetail.{module}") is not None
    except ModuleNotFoundError:  # nor is the package that it belongs to
        return False


def extra(module: str) -> Any:
    """Return a module of an extra; `UserError` if it is not installed."""
    if not installed(module):
        folder = module.rpartition(".")[0].replace(".", "/")
        raise UserError(f"this installation of dovetail lacks {folder}, which is needed here")
    return importlib.import_module(f"dovetail.{module}")
