"""A tensor on the wire: dtype and shape in the message body, the bytes (little-endian, row-major)
in a separate raw frame. Imports neither torch nor numpy; both read `data` through the buffer
protocol."""

from collections.abc import Sequence
from math import prod
from typing import Annotated, Literal

from pydantic import Field, model_validator

from dovetail.protocol.settings import Frozen

ITEM_BYTES = {"uint8": 1, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4}
MAX_ARRAY_BYTES = 64 << 20


class Array(Frozen):
    """A dense tensor; `data` has exactly prod(shape) items."""

    dtype: Literal["uint8", "int32", "int64", "float16", "bfloat16", "float32"]
    shape: Annotated[
        tuple[Annotated[int, Field(ge=0, le=1 << 32)], ...], Field(max_length=4, fail_fast=True)
    ]
    data: Annotated[bytes, Field(max_length=MAX_ARRAY_BYTES)]

    @model_validator(mode="after")
    def _fits(self) -> "Array":
        expected = prod(self.shape) * ITEM_BYTES[self.dtype]
        if len(self.data) != expected:
            raise ValueError(
                f"an array of {self.dtype} {self.shape} has {expected} bytes, not {len(self.data)}"
            )
        return self

    @classmethod
    def of(cls, content: bytes) -> "Array":
        """Return bytes as a one-dimensional array."""
        return cls(dtype="uint8", shape=(len(content),), data=content)

    def rows(self, start: int, stop: int) -> "Array":
        """Return rows start..stop-1 of the first dimension; they must exist."""
        size = prod(self.shape[1:]) * ITEM_BYTES[self.dtype]
        return Array.unchecked(
            dtype=self.dtype,
            shape=(stop - start, *self.shape[1:]),
            data=self.data[start * size : stop * size],
        )


def stack(arrays: Sequence[Array]) -> Array:
    """Concatenate arrays of one dtype and row shape along the first dimension."""
    rows = sum(array.shape[0] for array in arrays)
    return Array.unchecked(
        dtype=arrays[0].dtype,
        shape=(rows, *arrays[0].shape[1:]),
        data=b"".join(array.data for array in arrays),
    )
