"""Numbers of the command line."""

import math
from typing import Any

import click


class Number(click.FloatRange):
    """A number in a range, which nan is not."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; `click.BadParameter` if it is none, or is not in the range."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is no number: write one in figures", param, ctx)
        return number
