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
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import RLock
from types import ModuleType
from typing import Any

import torch

UNUSED = ("accelerate", "hqq", "scipy")
COMPILER = "torch._dynamo"
INDEXING = f"{COMPILER}._trace_wrapped_higher_order_op"


@contextmanager
def replaced(modules: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Let imports within find these modules in place of those of their names: none for None, not
    even by `find_spec`. One that is imported already stays."""
    absent = {name: module for name, module in modules.items() if name not in sys.modules}
    sys.modules.update(absent)  # type: ignore[arg-type]  # None is how Python marks a name that is not to be found
    try:
        yield
    finally:
        for name, module in absent.items():
            if sys.modules.get(name, sys) is module:
                del sys.modules[name]


class StandIn(ModuleType):
    """A module with a few members of the one it stands for. Asked for any other, it makes room for
    the real one."""

    def __init__(self, name: str, **members: Any) -> None:
        super().__init__(name)
        self.__dict__.update(members)

    def __getattr__(self, member: str) -> Any:
        if member.startswith("__"):  # who looks through all modules asks for these
            raise AttributeError(member)
        make_room()
        return getattr(import_module(self.__name__), member)


def make_room() -> None:
    """Take all stand-ins away, so that the next import finds what they stand for."""
    for name in [name for name, module in sys.modules.items() if isinstance(module, StandIn)]:
        del sys.modules[name]


class Room(MetaPathFinder, Loader):
    """Makes room for the real compiler where a part of it is imported that has no stand-in."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if not isinstance(sys.modules.get(name.rpartition(".")[0]), StandIn):
            return None
        make_room()
        module = import_module(name)
        self._spec, module.__spec__ = module.__spec__, None  # else it would be loaded once more
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module, which has been imported by now."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


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
