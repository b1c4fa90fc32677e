"""Numbers of the command line."""

import math
from typing import Any

import click


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
