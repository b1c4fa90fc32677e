"""A worker's process takes no library along that only a quantiser, a benchmark or a training needs,
however many are installed."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from dovetail.workers.models.lean import UNUSED, hidden

LOADED = """
import json, sys
import dovetail.workers.draft, dovetail.workers.loop, dovetail.workers.target, dovetail.workers.unified
print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""  # noqa: E501


def test_what_is_installed_for_something_else_is_not_loaded_by_a_worker() -> None:
    assert all(find_spec(package) for package in UNUSED), (
        "the test extra brings them, so that this test has something to find"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADED], capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(done.stdout))
    assert "transformers" in loaded
    assert loaded.isdisjoint({*UNUSED, "sklearn", "hypothesis", "pytest", "openai", "fastapi"})


def test_what_is_hidden_is_there_again_afterwards_and_what_was_imported_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with hidden("this", "json"):
        assert find_spec("this") is None
        assert sys.modules["json"] is json
        with pytest.raises(ImportError):
            import this  # noqa: F401
    assert find_spec("this") is not None
    assert sys.modules["json"] is json


def test_it_is_there_again_after_an_import_that_failed() -> None:
    def fail() -> None:
        with hidden("this"):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert find_spec("this") is not None
