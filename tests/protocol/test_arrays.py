"""Tensors on the wire: the bytes are those that dtype and shape announce."""

from itertools import pairwise
from math import prod
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dovetail.protocol.arrays import ITEM_BYTES, Array, stack


@given(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 5), max_size=4))
def test_an_array_has_the_bytes_of_its_dtype_and_shape(dtype: str, shape: list[int]) -> None:
    data = bytes(prod(shape) * ITEM_BYTES[dtype])
    assert Array.model_validate({"dtype": dtype, "shape": tuple(shape), "data": data}).data == data


@given(
    st.sampled_from(sorted(ITEM_BYTES)),
    st.lists(st.integers(0, 5), max_size=4),
    st.integers(0, 5000),
)
def test_any_other_number_of_bytes_is_refused(dtype: str, shape: list[int], length: int) -> None:
    if length != prod(shape) * ITEM_BYTES[dtype]:
        with pytest.raises(ValidationError, match="bytes, not"):
            Array.model_validate({"dtype": dtype, "shape": tuple(shape), "data": bytes(length)})


@pytest.mark.parametrize(
    "content",
    [
        {"dtype": "object", "shape": (1,), "data": bytes(8)},
        {"dtype": "float64", "shape": (1,), "data": bytes(8)},
        {"dtype": "uint8", "shape": (-1,), "data": b""},
        {"dtype": "uint8", "shape": (1, 1, 1, 1, 1), "data": b"x"},
        {"dtype": "uint8", "shape": ((1 << 32) + 1,), "data": b""},
        {"dtype": "uint8", "shape": (1 << 32, 1 << 32, 1 << 32, 1 << 32), "data": b""},
        {"dtype": "uint8", "shape": (True,), "data": b"x"},
        {"dtype": "uint8", "shape": (1,), "data": "x"},
    ],
)
def test_what_is_no_array_is_refused(content: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Array.model_validate(content)


def test_numpy_reads_the_bytes_in_place() -> None:
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    array = Array(dtype="float32", shape=(2, 3), data=values.tobytes())
    assert np.array_equal(np.frombuffer(array.data, "<f4").reshape(array.shape), values)


@given(
    st.sampled_from(sorted(ITEM_BYTES)),
    st.integers(1, 6),
    st.integers(0, 3),
    st.sets(st.integers(1, 5)),
    st.randoms(),
)
def test_rows_that_were_cut_out_can_be_put_together_again(
    dtype: str, rows: int, width: int, cuts: set[int], random: Random
) -> None:
    array = Array.model_validate(
        {
            "dtype": dtype,
            "shape": (rows, width),
            "data": random.randbytes(rows * width * ITEM_BYTES[dtype]),
        }
    )
    places = [0, *sorted(cut for cut in cuts if cut < rows), rows]
    parts = [array.rows(start, stop) for start, stop in pairwise(places)]
    assert [part.shape for part in parts] == [
        (stop - start, width) for start, stop in pairwise(places)
    ]
    assert stack(parts) == array


def test_a_row_is_cut_out_at_its_place() -> None:
    array = Array(dtype="float16", shape=(3, 2), data=b"aabbccddeeff")
    assert array.rows(1, 2) == Array(dtype="float16", shape=(1, 2), data=b"ccdd")


def test_rows_of_an_array_have_its_fields_in_their_order() -> None:
    array = Array(dtype="uint8", shape=(2, 1), data=b"ab")
    for made in (array.rows(0, 1), stack([array, array])):
        assert [*vars(made)] == [*vars(array)] == [*Array.model_fields]
