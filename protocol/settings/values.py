"""Building blocks of settings: frozen models, choices from a list, and sizes in bytes."""

import json
from collections.abc import Collection
from functools import partial
from typing import Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict

from dovetail.protocol.interruptions import uninterrupted


class Frozen(BaseModel):
    """An immutable value with exactly the declared fields and types (strings are not coerced to
    numbers). Its validator is built with the first value: a process uses few of the many kinds of
    messages."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True
    )

    @classmethod
    def unchecked(cls, **fields: Any) -> Self:
        """Return a value without validating it, for values that are correct by construction and
        made in every round. `fields`: all fields, in order."""
        value, put = cls.__new__(cls), object.__setattr__
        put(value, "__dict__", fields)
        put(value, "__pydantic_fields_set__", {*fields})
        put(value, "__pydantic_extra__", None)
        put(value, "__pydantic_private__", None)
        return value

    @classmethod
    def model_rebuild(cls, *, _parent_namespace_depth: int = 2, **options: Any) -> bool | None:
        """Build the validator of this class, with signals deferred."""
        with uninterrupted():
            return super().model_rebuild(
                _parent_namespace_depth=_parent_namespace_depth + 1, **options
            )


def words(available: Collection[str], what: str) -> AfterValidator:
    """Return the validator of a field that has one of these words, the first of its arguments."""
    return AfterValidator(partial(_check_word, available, what))


def _check_word(available: Collection[str], what: str, value: str) -> str:
    if value not in available:
        choice = " or ".join(map(repr, available))
        raise ValueError(f"there is no {what} {value!r}; choose {choice}")
    return value


def template_values(text: str) -> dict[str, Any]:
    """Return the values for a chat template from a JSON object, none for an empty text;
    `ValueError` for anything else."""
    if not text.strip():
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ValueError("write a JSON object, such as '{\"enable_thinking\": false}'")
    return values


def byte_count(text: str) -> int:
    """Return the bytes in "512MiB", "7GB" (10^9) or "7GiB" (2^30); `ValueError` for anything else.
    Only 0 needs no unit."""
    units = {
        "B": 1,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "TiB": 2**40,
    }
    number = text.strip().rstrip("KMGTiB")
    unit = text.strip()[len(number) :]
    try:
        size = int(float(number) * units[unit]) if unit or float(number) else 0
    except (ValueError, KeyError, OverflowError):
        size = -1
    if size < 0:
        raise ValueError(
            f"{text!r} is not a size: write a number and a unit, such as 512MiB or 7GB"
        )
    return size
