"""The instruction sets of the C++ kernels, one after the other."""

import pytest

from dovetail.workers import kernels
from dovetail.workers.kernels import Isa

needs_kernels = pytest.mark.skipif(not kernels.available(), reason=str(kernels.why_not()))
every_isa = pytest.mark.parametrize("isa", Isa, ids=lambda isa: isa.name)


def use(isa: Isa) -> None:
    """Compute with these instructions from here on; the test is skipped where the machine has
    none."""
    if isa not in kernels.isas():
        pytest.skip(f"this machine has no {isa.name}")
    kernels.use_isa(isa)
