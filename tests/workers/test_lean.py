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
from dovetail.workers.models.imports.lean import COMPILER, UNUSED, lean
from dovetail.workers.models.imports.stand_ins import replaced

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
from dovetail.workers.models.imports.lean import lean
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


LEAN = """
import sys
import dovetail.workers.models.imports.lean_torch as lean
from dovetail.workers.models.imports.stand_ins import StandIn
import torch
from torch import distributions, export

assert all(isinstance(sys.modules[name], StandIn) for name in lean.LEFT_OUT)
assert export is torch.export is sys.modules["torch.export"]
assert torch.rand(3, generator=torch.Generator().manual_seed(1)).shape == (3,)
assert torch.nn.Linear(3, 2, device="meta")(torch.empty(1, 3, device="meta")).shape == (1, 2)
assert all(isinstance(sys.modules[name], StandIn) for name in lean.LEFT_OUT)

import torch._refs.special as asked
assert asked.bessel_j0
assert not any(isinstance(module, StandIn) for module in [*sys.modules.values()])
assert distributions.Normal(0.0, 1.0).mean == 0.0
assert torch.cond(torch.tensor(True), torch.neg, torch.abs, (torch.ones(1),)).tolist() == [-1.0]
assert torch.utils.data.DataLoader is not None
assert torch.vmap(torch.neg)(torch.ones(2)).tolist() == [-1.0, -1.0]
assert torch.nested.nested_tensor is not None and torch.nn.quantized.Linear is not None
lean.import_whole()
"""
FORKED_FROM = """
import json, sys
from importlib import import_module
from dovetail.launch.processes.nursery import MODULES
for module in MODULES:
    import_module(module)
print(json.dumps([*sys.modules]))
"""
NOT_FORKED = {
    *("transformers", "sympy", "huggingface_hub", "torch._dynamo", "torch._export"),
    *("dovetail.workers.heads.kind", "dovetail.workers.training", "dovetail.workers.unified"),
}
"""Modules that take long to import, and that a pair of models whose proofs are remembered does
without."""


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
def test_what_is_left_out_of_torch_is_there_for_whoever_asks_for_it() -> None:
    python(LEAN)


def test_workers_are_forked_from_a_process_that_imports_only_what_they_need() -> None:
    loaded = set(json.loads(python(FORKED_FROM)))
    assert loaded >= {"torch", "dovetail.workers.models.remembered.recall"}
    assert loaded.isdisjoint(NOT_FORKED)


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
    """Otherwise it would take for torch's own word what is said for the other one."""
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
