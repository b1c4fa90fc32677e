"""transformers without what it imports and no worker needs.

hqq brings torch's compiler along, scipy its optimisers (for a loss of object detection): where they
are installed, transformers is told that they are not, and remembers it. So it is with torch's
distributed tensors. The compiler itself it imports for marks on functions, which mean nothing to
code that is not compiled: a stand-in has them. Together that is two fifths of what it would take a
worker to start. Whoever needs one of them imports it as ever. Where transformers has been imported
already it has seen what there is, and is left as it is. Its models are imported later, one by one:
within `lean`, too. Nothing of it is imported before one of its members is asked for here.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from threading import RLock
from types import ModuleType
from typing import Any

import torch

from dovetail.workers.models.imports.lean_torch import import_whole
from dovetail.workers.models.imports.stand_ins import Room, StandIn, replaced

UNUSED = ("accelerate", "hqq", "scipy", "sklearn")
COMPILER = "torch._dynamo"
INDEXING = f"{COMPILER}._trace_wrapped_higher_order_op"


def mark(function: Callable[..., Any] | None = None, /, *_: Any, **__: Any) -> Any:
    """Return a function as it is, or a decorator that does: a mark for the compiler."""
    return mark if function is None else function


def indexing() -> Any:
    """Return torch's context in which masks are computed by index, which is part of its
    compiler."""
    return import_module(INDEXING).TransformGetItemToIndex()


STAND_INS = (
    StandIn(COMPILER, __path__=[], disable=mark, allow_in_graph=mark, assume_constant_result=mark),
    StandIn(INDEXING, TransformGetItemToIndex=indexing),
)
LEFT_OUT: Mapping[str, ModuleType | None] = {
    **dict.fromkeys(UNUSED),
    **{module.__name__: module for module in STAND_INS},
}
_ONE_AT_A_TIME = RLock()


@contextmanager
def lean() -> Iterator[None]:
    """Let what transformers imports within be without what no worker needs; other threads that ask
    for that wait. To that end torch says that it was built without the parts that compute on
    several machines."""
    with _ONE_AT_A_TIME:
        import_whole()
        is_available, room = torch.distributed.is_available, Room()
        torch.distributed.is_available = lambda: False
        sys.meta_path.insert(0, room)
        try:
            with replaced(LEFT_OUT):
                yield
        finally:
            sys.meta_path.remove(room)
            torch.distributed.is_available = is_available


MEMBERS = {
    "transformers": "",
    "CONFIG_MAPPING": "transformers",
    "MODEL_FOR_CAUSAL_LM_MAPPING": "transformers",
    "AttentionInterface": "transformers",
    "AutoConfig": "transformers",
    "AutoModelForCausalLM": "transformers",
    "DynamicCache": "transformers",
    "LlamaConfig": "transformers",
    "get_checkpoint_conversion_mapping": "transformers.conversion_mapping",
    "ROPE_INIT_FUNCTIONS": "transformers.modeling_rope_utils",
    "Conv1D": "transformers.pytorch_utils",
}
"""Members of this module that are transformers', and their modules; the first one is itself."""


def __getattr__(name: str) -> Any:
    """Return a member of transformers, which is imported when one is asked for first: a model whose
    proof is remembered needs none."""
    if name not in MEMBERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _ONE_AT_A_TIME, lean() if "transformers" not in sys.modules else nullcontext():
        for member, module in MEMBERS.items():
            found = import_module(module or member)
            globals()[member] = getattr(found, member) if module else found
    return globals()[name]
