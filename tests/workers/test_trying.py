"""Functions of ours are tried in a process beside the worker: in one for all that is asked soon
after each other, and in another one after a crash."""

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
from dovetail.workers.models.backends.device.trying import Trials
from pretended.device import POSSIBLE
from support.emulated import Emulated, emulated
from support.kernels import needs_kernels

TESTS = Path(__file__).resolve().parent.parent


class Timed(Emulated):
    timed = True


@needs_kernels
@pytest.mark.skipif(not POSSIBLE, reason="torch cannot be told of a device from Python")
def test_one_process_tries_all_and_the_one_that_crashed_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = (str(TESTS), *filter(None, (os.environ.get("PYTHONPATH"),)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    trials = Trials("pretended", "support.trials", linger_s=600.0)
    try:
        for names, processes in ((("fp16", "int8"), 1), (("rounded_fp16", "rounded_bf16"), 2)):
            for name in names:
                ours, torchs = json.loads(trials.tried(name))
                assert len(ours) == len(torchs) == len(TIMED_ROWS)
            assert trials.started == processes
            crashed = trials.tried("bf16")
            assert isinstance(crashed, str)
            assert crashed.startswith("its trial ended with code -6: ")
    finally:
        trials.end()


@needs_kernels
def test_a_trial_that_fails_leaves_torchs_product_and_a_process_does_not_wait_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no functions for the CPU. A question to a process that has ended for want of work
    goes to another one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trials = Trials("cpu", linger_s=0.0)
    products = Products(
        torch.device("cpu"),
        lambda source: Timed(emulated(source)._library),
        lambda _, name: trials.tried(name),
    )
    for processes, kind in enumerate((Kind.BF16, Kind.FP16), start=1):
        assert products.owner(CONTESTS[kind]) is None
        assert trials.started == processes
        assert trials._process is not None
        assert trials._process._child.wait() == 0
        assert products.said[kind] == (
            f"cpu: torch's product multiplies {kind.name.lower()} weights: dovetail's own is not "
            "proved here: dovetail compiles its functions for NVIDIA's GPUs alone, not for "
            "cpu"
        )
    trials.end()


def test_torch_without_memory_for_its_product_is_no_answer() -> None:
    """A measurement would be remembered, while the next start may have the memory."""

    def refused() -> Product:
        raise torch.OutOfMemoryError("no memory")

    def pairs(*_: Any) -> Iterator[tuple[Product, Callable[[], Product]]]:
        yield (lambda x: x), refused

    contest, program = replace(CONTESTS[Kind.FP16], pairs=pairs), cast(Program, None)
    with pytest.raises(torch.OutOfMemoryError):
        measured(program, open_device("cpu", 1), contest)
