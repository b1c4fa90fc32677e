"""A worker's process takes no library along that only a quantiser, a benchmark or a training needs,
however many are installed."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from threading import Event

import pytest
import torch

from dovetail.launch.settings.embedded import DEMO_FOLDER
from dovetail.workers.models.lean import COMPILER, UNUSED, lean, replaced

LOADED = """
import json, sys
import dovetail.workers.draft, dovetail.workers.loop, dovetail.workers.target, dovetail.workers.unified
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from dovetail.workers.models.checkpoints.configured import configured
configured(open_checkpoint(sys.argv[1]))
print(json.dumps([*sys.modules]))
"""  # noqa: E501
ASKING = """
import sys
from dovetail.workers.models.lean import lean
import torch

with lean():
    from transformers.masking_utils import create_causal_mask
assert "torch._dynamo" not in sys.modules

with lean():
    import torch._dynamo as standing_in
    assert standing_in.allow_in_graph(print) is print
    from torch._dynamo.utils import counters
    assert sys.modules["torch._dynamo"] is not standing_in
    assert standing_in.reset is sys.modules["torch._dynamo"].reset

from transformers import LlamaConfig
allowed = torch.tensor([[True, False], [True, False]])
mask = create_causal_mask(
    LlamaConfig(num_hidden_layers=1, attn_implementation="sdpa"), torch.zeros(1, 2, 8),
    attention_mask=None, past_key_values=None, or_mask_function=lambda b, h, q, k: allowed[q, k],
)
assert mask is not None and mask[0, 0].tolist() == [[True, False], [True, True]], mask

double = torch.compile(lambda x: x + x, backend="eager")
assert double(torch.ones(2)).tolist() == [2.0, 2.0] and counters["frames"]["ok"], counters
"""


def python(program: str, *arguments: str) -> str:
    """Run a program in a process of its own; return what it prints."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", program, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def test_what_is_installed_for_something_else_is_not_loaded_by_a_worker() -> None:
    assert all(find_spec(package) for package in UNUSED), (
        "the test extra brings them, so that this test has something to find"
    )
    loaded = set(json.loads(python(LOADED, str(DEMO_FOLDER / "target"))))
    assert "transformers" in loaded
    assert loaded.isdisjoint({*UNUSED, "sklearn", "hypothesis", "pytest", "openai", "fastapi"})
    assert loaded.isdisjoint({COMPILER, "torch.distributed.tensor"})


@pytest.mark.slow
def test_the_compiler_is_there_for_whoever_asks_for_it() -> None:
    python(ASKING)


def test_what_is_hidden_is_there_again_afterwards_and_what_was_imported_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with replaced({"this": None, "json": None}):
        assert find_spec("this") is None
        assert sys.modules["json"] is json
        with pytest.raises(ImportError):
            import this  # noqa: F401
    assert find_spec("this") is not None
    assert sys.modules["json"] is json


def test_it_is_there_again_after_an_import_that_failed() -> None:
    def fail() -> None:
        with replaced({"this": None}):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert find_spec("this") is not None


def test_a_thread_waits_until_another_has_imported() -> None:
    """Else it would take for torch's own word what is said for the other one."""
    inside, is_available = Event(), torch.distributed.is_available

    def enter() -> None:
        with lean():
            inside.set()

    with ThreadPoolExecutor() as other:
        with lean():
            entered = other.submit(enter)
            assert not inside.wait(0.1)
        entered.result()
    assert torch.distributed.is_available is is_available
