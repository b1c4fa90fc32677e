"""A machine in which the doctor finds nothing to change, and cards for it."""

from typing import Any

from dovetail.launch.machine.examination import Facts, Gpu
from dovetail.launch.machine.topology import Node, Topology
from support.sysfs import GIB

INVENTORY: dict[str, Any] = {
    "torch": "2.13.0+cu130",
    "cuda": "13.0",
    "hip": "",
    "xpu": "",
    "found": [],
    "architectures": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"],
    "capabilities": [],
    "products": [],
    "cpu_capability": "AVX512",
    "kernels_missing": "",
    "kernels": "AVX2",
    "isas": ["plain", "avx2"],
    "kernels_failures": [],
}
HEALTHY = Facts(
    machine="x86_64",
    flags=frozenset({"sse4_1", "avx2", "fma", "f16c", "avx512f"}),
    topology=Topology((Node(0, ((0,), (1,), (2,), (3,)), 16 * GIB),)),
    online_cores=4,
    memory_refusal="",
    inventory=INVENTORY,
    memory_bytes=16 * GIB,
    free_bytes=12 * GIB,
    profile="profile.json: nothing measured yet",
)
VOLTA = Gpu("Tesla V100", (7, 0), 580, 16384)
AMPERE = Gpu("RTX A2000", (8, 6), 590, 6138)


def inventory(**changes: Any) -> dict[str, Any]:
    """Return the inventory of torch on such a machine, with some facts changed."""
    return {**INVENTORY, **changes}
