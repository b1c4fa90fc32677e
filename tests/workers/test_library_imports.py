"""Nothing of torch and transformers is patched, and a worker's process imports only what it
needs."""

import ast
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dovetail.launch.settings.models import DEMO_FOLDER

ROOT = Path(__file__).parents[2]
UNUSED = ("gguf", "hypothesis", "openai", "pytest", "fastapi")
STARTED = """
import json, sys
import torch
before = torch.distributed.is_available
import dovetail.workers.draft, dovetail.workers.loop, dovetail.workers.target, dovetail.workers.unified
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from dovetail.workers.models.checkpoints.configured import configured
configured(open_checkpoint(sys.argv[1]))
ours = [one for one in sys.meta_path if type(one).__module__.startswith("dovetail")]
assert not ours, ours
assert torch.distributed.is_available is before
for name, module in [*sys.modules.items()]:
    if name.split(".")[0] in ("torch", "transformers") and module is not None:
        assert not type(module).__module__.startswith("dovetail"), name
        for member, value in [*vars(module).items()]:
            owner = getattr(value, "__module__", None)
            assert not str(owner).startswith("dovetail"), f"{name}.{member} is of {owner}"
print(json.dumps([*sys.modules]))
"""  # noqa: E501
FORKED_FROM = """
import json, sys
from importlib import import_module
from dovetail.launch.processes.nursery import MODULES
for module in MODULES:
    import_module(module)
print(json.dumps([*sys.modules]))
"""
NOT_FORKED = {
    *("transformers", "huggingface_hub", "dovetail.workers.heads.kind"),
    *("dovetail.workers.training", "dovetail.workers.unified"),
}
"""Modules that take long to import, and that a pair of models whose proofs are remembered does
without."""


def modules_of(program: str, *arguments: str) -> set[str]:
    """Run a program that prints its modules in a process of its own; return them."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", program, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.slow
def test_a_worker_patches_nothing_and_loads_nothing_that_is_for_something_else() -> None:
    assert all(find_spec(package) for package in UNUSED)
    loaded = modules_of(STARTED, str(DEMO_FOLDER / "target"))
    assert "transformers" in loaded
    assert loaded.isdisjoint(UNUSED)


def test_workers_are_forked_from_a_process_that_imports_only_what_they_need() -> None:
    loaded = modules_of(FORKED_FROM)
    assert loaded >= {"torch", "dovetail.workers.models.remembered"}
    assert loaded.isdisjoint(NOT_FORKED)


def test_nothing_changes_how_modules_are_imported_or_members_of_a_library() -> None:
    """Read off the sources: no finder, no entry of `sys.modules`, no attribute of a module of
    torch or transformers is set."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("protocol", "runtime", "workers", "launch")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if _patches(node)
    ]
    assert found == []


def _patches(node: ast.AST) -> bool:
    """Return whether a piece of code sets a part of the import system or of a library."""
    if isinstance(node, ast.Attribute) and node.attr in ("meta_path", "path_hooks"):
        return True
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
        targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
        return any(map(_is_of_a_library, targets))
    if isinstance(node, ast.Call):
        text = ast.unparse(node.func)
        if text in ("sys.modules.update", "sys.modules.pop", "sys.modules.setdefault"):
            return True
        return text in ("setattr", "delattr") and _names_a_library(node.args[0])
    return False


def _is_of_a_library(target: ast.AST) -> bool:
    if isinstance(target, ast.Subscript):
        return ast.unparse(target.value) == "sys.modules"
    return isinstance(target, ast.Attribute) and _names_a_library(target.value)


def _names_a_library(node: ast.AST) -> bool:
    text = ast.unparse(node)
    if text.startswith("torch.backends."):  # its settings
        return False
    return text.startswith("sys.modules") or text.split(".")[0] in ("torch", "nn", "transformers")
