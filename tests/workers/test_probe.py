"""The best that the machine can do, by the kernels' own instructions."""

import pytest

from dovetail.workers import kernels
from dovetail.workers.calibration.inventory import kernel_failures, take_inventory
from dovetail.workers.kernels import Isa
from support.kernels import every_isa, use

if not kernels.available():
    pytest.skip("the C++ kernels are not built here", allow_module_level=True)

from dovetail.workers.kernels.probe import Arithmetic, bandwidth_gb_s, peak_gflop_s

pytestmark = pytest.mark.usefixtures("kernels_as_before")


@every_isa
def test_every_instruction_set_has_a_peak_and_a_bandwidth(isa: Isa) -> None:
    use(isa)
    for arithmetic in (Arithmetic.FP32, Arithmetic.INT8):
        peak = peak_gflop_s(arithmetic, budget_s=0.01)
        assert peak is not None
        assert 0.05 < peak < 1e6
    assert 0.05 < bandwidth_gb_s(budget_s=0.01, read_bytes=4 << 20) < 1e5


def test_arithmetic_that_there_are_no_instructions_for_has_no_peak() -> None:
    kernels.use_isa(Isa.PLAIN)
    assert peak_gflop_s(Arithmetic.BF16, budget_s=0.01) is None


def test_the_work_is_that_of_all_threads() -> None:
    kernels.set_threads(1)
    peak_gflop_s(Arithmetic.FP32, budget_s=0.001)
    one = kernels.library().dt_probe_arithmetic(Arithmetic.FP32, 1000)
    kernels.set_threads(2)
    assert kernels.library().dt_probe_arithmetic(Arithmetic.FP32, 1000) == 2 * one


def test_the_kernels_pass_their_self_test_here() -> None:
    before = kernels.isa()
    assert list(kernel_failures()) == []
    assert kernels.isa() is before


def test_the_inventory_names_torch_and_the_instruction_sets() -> None:
    found = take_inventory()
    assert found["isas"] == [isa.name.lower() for isa in kernels.isas()]
    assert found["kernels_missing"] == ""
