"""torch without what it imports for its compilers and no worker needs: whoever imports this before
torch has it in half of the time.

Decompositions, reference implementations, shapes of operations, operations of higher order and
functions of functions are there for tracing, quantised modules and the others for training. Whoever
needs one of them imports it as ever; transformers is given all of them. Where torch has been
imported already nothing is left out.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dovetail.workers.models.imports.stand_ins import Room, StandIn, make_room

FUNCTIONS = "torch.func"
SHAPES = "torch._meta_registrations"
FIRST = (FUNCTIONS, SHAPES)
"""Import the other parts of what is there for tracing in an order in which they can be."""
HIGHER = "torch._higher_order_ops"


def cond(*arguments: Any) -> Any:
    """Call `torch.cond`."""
    make_room()
    return import_module(HIGHER).cond(*arguments)


def while_loop(*arguments: Any) -> Any:
    """Call `torch.while_loop`."""
    make_room()
    return import_module(HIGHER).while_loop(*arguments)


def vmap(*arguments: Any, **options: Any) -> Any:
    """Call `torch.vmap`."""
    make_room()
    return import_module(FUNCTIONS).vmap(*arguments, **options)


LEFT_OUT: dict[str, dict[str, Any]] = {
    SHAPES: {},
    "torch._decomp": {},
    HIGHER: {"cond": cond, "while_loop": while_loop},
    f"{HIGHER}.invoke_subgraph": {"NestedCompileRegionOptions": object},
    "torch._prims": {},
    "torch._refs": {},
    "torch.ao": {},
    "torch.distributions": {},
    "torch.export": {},
    FUNCTIONS: {"vmap": vmap},
    "torch.masked": {},
    "torch.nested": {},
    "torch.nn.intrinsic": {},
    "torch.nn.qat": {},
    "torch.nn.quantizable": {},
    "torch.nn.quantized": {},
    "torch.quantization": {},
    "torch.utils.data": {},
}
"""Modules, with the members that torch imports of them; it calls none of these."""
NATIVE = "torch._native"
"""Operations of GPUs in place of torch's own, since torch 2.12. It looks through all modules."""
GPU_LIBRARIES = ("libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so")


def import_lean() -> None:
    """Import torch, and leave stand-ins in the place of what is left out."""
    if "torch" in sys.modules:
        return
    if _is_for_cpus_alone():
        LEFT_OUT[NATIVE] = {}
    stand_ins = {name: StandIn(name, __path__=[], **own) for name, own in LEFT_OUT.items()}
    sys.modules.update(stand_ins)
    sys.meta_path.insert(0, Room())
    import_module("torch")
    _complete_generators()
    for name, module in stand_ins.items():
        parent, _, own = name.rpartition(".")
        if sys.modules.get(name) is module:
            module.first = FIRST
            setattr(sys.modules[parent], own, module)


def _is_for_cpus_alone() -> bool:
    """Return whether a torch that has operations of GPUs is installed without what runs them."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    folder = Path(spec.origin).parent
    found = any((folder / "lib" / name).exists() for name in GPU_LIBRARIES)
    return (folder / "_native").is_dir() and not found


def _complete_generators() -> None:
    """Do what generators of random numbers need and `torch._prims.rng_prims` does, since torch
    2.13."""
    core = sys.modules["torch._C"]
    if hasattr(core, "_set_generator_metaclass"):
        core._set_generator_metaclass(import_module("torch._opaque_base").OpaqueBaseMeta)


def import_whole() -> None:
    """Import what was left out."""
    make_room()
    for name in LEFT_OUT:
        import_module(name)


import_lean()
