"""The compilers of our functions for a GPU that a test may need, and the cards that it compiles
for."""

import pytest

from dovetail.workers.devices.nvidia import nvrtc
from dovetail.workers.kernels.build import compiler

ARCHITECTURES = (61, 75, 86, 89, 90, 120)
"""GTX 10xx and P40; GTX 16xx, RTX 20xx and T4; RTX 30xx; RTX 40xx; H100; RTX 50xx."""
NVRTC = nvrtc.find("")
needs_a_compiler = pytest.mark.skipif(not compiler(), reason="there is no C++ compiler")
needs_nvrtc = pytest.mark.skipif(isinstance(NVRTC, str), reason=str(NVRTC))
