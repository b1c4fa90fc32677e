"""Functions of ours are tried in a process beside the worker."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dovetail.workers.devices.base import Program
from dovetail.workers.devices.opening import open_device
from dovetail.workers.kernels import Kind
from dovetail.workers.models.backends.device.choice import CONTESTS, TIMED_ROWS, Products, measured
from dovetail.workers.models.backends.device.products import Product
from dovetail.workers.models.backends.device.trying import tried
from pretended.device import POSSIBLE
from support.emulated import Emulated, emulated
from support.kernels import needs_kernels

TESTS = Path(__file__).resolve().parent.parent


class Timed(Emulated):
    timed = True


@needs_kernels
@pytest.mark.skipif(not POSSIBLE, reason="torch cannot be told of a device from Python")
def test_a_trial_measures_and_one_that_crashes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = (str(TESTS), *filter(None, (os.environ.get("PYTHONPATH"),)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    ours, torchs = json.loads(tried("pretended", "int8", "support.trials"))
    assert len(ours) == len(torchs) == len(TIMED_ROWS)
    failed, crashed = (tried("pretended", name, "support.trials") for name in ("fp16", "bf16"))
    assert failed == "its trial ended: an illegal access"
    assert str(crashed).startswith("its trial ended with code -6: ")


@needs_kernels
def test_a_trial_that_fails_leaves_torchs_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no functions for the CPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    there = torch.device("cpu")
    products = Products(there, lambda source: Timed(emulated(source)._library))
    assert products.owner(CONTESTS[Kind.BF16]) is None
    assert products.said[Kind.BF16] == (
        "cpu: torch's product multiplies bf16 weights: dovetail's own is not proved here: dovetail "
        "compiles its functions for NVIDIA's GPUs alone, not for cpu"
    )


def test_torch_without_memory_for_its_product_is_no_answer() -> None:
    """A measurement would be remembered, while the next start may have the memory."""

    def refused() -> Product:
        raise torch.OutOfMemoryError("no memory")

    def pairs(*_: Any) -> Iterator[tuple[Product, Callable[[], Product]]]:
        yield (lambda x: x), refused

    contest, program = replace(CONTESTS[Kind.FP16], pairs=pairs), cast(Program, None)
    with pytest.raises(torch.OutOfMemoryError):
        measured(program, open_device("cpu", 1), contest)
