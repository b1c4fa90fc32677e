"""Powers, exponentials and logarithms of a model's constants, correctly rounded to float32.

torch computes float32 differently on each instruction set. Here float64 is used, and decimals where
its error could change the rounding: the same bytes on every CPU."""

from collections.abc import Callable
from decimal import Context, Decimal
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DOUBT = 2.0**-48  # more than the relative error of a function in float64
DIGITS = Context(prec=40, traps=[])
POWERS = ("pow", "__pow__", "__rpow__")


def exp(x: Tensor) -> Tensor:
    """Return e^x, float32."""
    return _rounded(torch.exp, DIGITS.exp, x)


def log(x: Tensor) -> Tensor:
    """Return ln x, float32; NaN below 0."""
    return _rounded(torch.log, DIGITS.ln, x)


class ExactPowers(TorchFunctionMode):
    """Replaces torch's powers of float32 on the CPU, for tables that transformers computes, such as
    rotary frequencies."""

    def __torch_function__(
        self, function: Any, _types: Any, given: Any = (), named: Any = None
    ) -> Any:
        found, name = function(*given, **(named or {})), getattr(function, "__name__", "")
        if name not in POWERS or found.device.type != "cpu" or found.dtype != torch.float32:
            return found
        numbers = [torch.as_tensor(one, dtype=torch.float32).expand_as(found) for one in given[:2]]
        return _rounded(torch.pow, DIGITS.power, *numbers[:: -1 if name == "__rpow__" else 1])


def _rounded(
    function: Callable[..., Tensor], exact: Callable[..., Decimal], *numbers: Tensor
) -> Tensor:
    """Return a function of tensors of one shape; `exact` computes it for single numbers."""
    found = function(*(one.double() for one in numbers))
    rounded = (found * (1 + DOUBT)).float()
    doubtful = rounded != (found * (1 - DOUBT)).float()
    rows = zip(*(one[doubtful].tolist() for one in numbers), strict=True)
    exactly = [float(exact(*map(Decimal, row))) for row in rows]
    rounded[doubtful] = torch.tensor(exactly, dtype=torch.float64).float()
    return rounded
