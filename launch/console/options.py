"""Options that several commands have, and the types of their values."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dovetail.launch.console.help import Rare

FILE = click.Path(dir_okay=False, path_type=Path)  # a file, which need not exist
EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
COUNT = click.IntRange(min=1)
SEED = click.IntRange(0, (1 << 63) - 1)

Decorator = Callable[[Any], Any]


def option(*names: str, **fields: Any) -> Decorator:
    """Return `click.option` with its default shown, if there is one."""
    return click.option(*names, **{"show_default": "default" in fields, **fields})


def rare(*names: str, **fields: Any) -> Decorator:
    """Return an option that `--help` leaves to `--help-all`."""
    return option(*names, cls=Rare, **fields)


def json_option(text: str = "One JSON object on stdout.") -> Decorator:
    """`--json`, as the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def json_instead_of(shown: str) -> Decorator:
    """`--json` of a command that shows something else without it."""
    return json_option(f"One JSON object on stdout instead of {shown}.")


def connect_option(
    text: str = "The coordinator.  [default: the only one of this user]", metavar: str = "ADDRESS"
) -> Decorator:
    """`--connect`, None by default."""
    return click.option("--connect", metavar=metavar, help=text)


parent_option = click.option(
    "--parent", type=int, hidden=True, help="End when this process, which started us, ends."
)


def seed_option(text: str) -> Decorator:
    """`--seed`, 0 by default."""
    return rare("--seed", type=SEED, default=0, help=text)


class Number(click.FloatRange):
    """A number in a range; nan is refused."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; `click.BadParameter` for text that is no number, or is out of
        range."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number: write digits", param, ctx)
        return number
