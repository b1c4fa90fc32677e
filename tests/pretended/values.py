"""The values within the arguments and results of operations, which are lists, tuples and dicts
within each other. It knows no tensors."""

from collections.abc import Callable
from typing import Any


def values_in(nested: Any) -> list[Any]:
    """Return the values within lists, tuples and dicts, in their order; of anything else itself.

    torch's own `tree_flatten` notes how they lay in each other, which takes ten times as long: most
    of the time of many an operation."""
    found: list[Any] = []
    _gather(nested, found)
    return found


def _gather(nested: Any, found: list[Any]) -> None:
    if isinstance(nested, tuple | list):
        for part in nested:
            _gather(part, found)
    elif isinstance(nested, dict):
        for part in nested.values():
            _gather(part, found)
    else:
        found.append(nested)


def changed(nested: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same lists, tuples and dicts with each value within them changed."""
    if isinstance(nested, tuple):
        return tuple([changed(part, change) for part in nested])
    if isinstance(nested, list):
        return [changed(part, change) for part in nested]
    if isinstance(nested, dict):
        return {name: changed(part, change) for name, part in nested.items()}
    return change(nested)
