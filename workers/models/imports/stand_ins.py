"""Modules that stand for others until somebody asks for more than their names: what is left out of
a library that would import it. Whoever needs one of them imports it as ever."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


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

    first: tuple[str, ...] = ()
    """Modules that have to be imported before the one that it stands for, in this order."""

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
    found = {name: module for name, module in sys.modules.items() if isinstance(module, StandIn)}
    for name in found:
        del sys.modules[name]
    for first in dict.fromkeys(name for module in found.values() for name in module.first):
        import_module(first)


class Room(MetaPathFinder, Loader):
    """Makes room for the real module where a part of it is imported that has no stand-in."""

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
