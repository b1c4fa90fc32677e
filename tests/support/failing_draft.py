"""A real draft worker that fails as it is told: `python tests/support/failing_draft.py HOW worker
--role=draft ...`.

What fails is a function of the engine, or what it computes; everything around it is the program as
it is.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dovetail.launch.cli import main
from dovetail.workers.draft import DraftWorker
from dovetail.workers.drafters.head import HeadDrafter
from dovetail.workers.drafters.tree import Grower
from dovetail.workers.heads.head import Head

WORDS = "the index is on another device than the states"


def fails(*_arguments: Any, **_named: Any) -> Any:
    raise IndexError(WORDS)


def runs_out(*_arguments: Any, **_named: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def only_below_the_root() -> None:
    """Fail as with an index on another device: the root is expanded, the first level fails."""
    HeadDrafter._compute = fails  # type: ignore[method-assign]


def only_sampled() -> None:
    _instead(Grower, "_begin", lambda self, place, order: order.session.ranking.noise is not None)


def only_ahead() -> None:
    _instead(HeadDrafter, "steps_ahead", lambda *rest: True)


def in_open() -> None:
    HeadDrafter.open = fails  # type: ignore[method-assign]


def in_feed() -> None:
    HeadDrafter.feed = fails  # type: ignore[method-assign]


def out_of_memory() -> None:
    HeadDrafter._compute = runs_out  # type: ignore[method-assign]


def no_numbers() -> None:
    """The states of every level are no numbers."""
    predict = Head._predict

    def spoilt(self: Head, *rest: Any, **named: Any) -> Any:
        found = predict(self, *rest, **named)
        for part in (found.logits, found.states):
            assert isinstance(part, Tensor)
            part.fill_(float("nan"))
        return found

    Head._predict = spoilt  # type: ignore[method-assign]


def dies() -> None:
    """The process ends in the third round of a session."""

    def third(self: Any, command: Any) -> bool:
        if command.round >= 3:
            sys.stderr.flush()
            os._exit(1)
        return False

    _instead(DraftWorker, "_draft", third)


def _instead(owner: type, name: str, when: Callable[..., bool]) -> None:
    """Have a method fail where `when` says so of its arguments."""
    as_it_is = getattr(owner, name)

    def method(*arguments: Any, **named: Any) -> Any:
        return fails() if when(*arguments, **named) else as_it_is(*arguments, **named)

    setattr(owner, name, method)


HOW = {
    way.__name__: way
    for way in (
        only_below_the_root,
        only_sampled,
        only_ahead,
        in_open,
        in_feed,
        out_of_memory,
        no_numbers,
        dies,
    )
}

if __name__ == "__main__":
    HOW[sys.argv.pop(1)]()
    main()
