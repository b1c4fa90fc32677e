"""Tensors on the wire."""

import pytest
import torch

from dovetail.protocol.arrays import Array
from dovetail.workers.sessions.wire import TYPES, narrowed, to_array, to_tensor


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (2, 3)])
def test_a_tensor_comes_back_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 100).to(dtype)
    back = to_tensor(to_array(tensor))
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back, tensor)


def test_rows_that_lie_apart_are_gathered() -> None:
    array = to_array(torch.arange(12, dtype=torch.int32).view(3, 4).t()[1:3])
    assert array == Array(
        dtype="int32",
        shape=(2, 3),
        data=torch.tensor([1, 5, 9, 2, 6, 10], dtype=torch.int32).numpy().tobytes(),
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_numbers_beyond_the_range_of_a_type_become_its_largest(dtype: str) -> None:
    largest = torch.finfo(TYPES[dtype]).max
    found = narrowed(torch.tensor([1.0, -3e38, 3.4e38, largest, 0.1]), dtype)
    assert found.dtype == TYPES[dtype]
    assert torch.isfinite(found).all()
    if dtype == "float16":
        assert found[1:4].tolist() == [-largest, largest, largest]
    assert found[0] == 1.0


def test_numbers_of_a_16_bit_model_are_narrowed_to_the_other_type() -> None:
    assert narrowed(
        torch.tensor([2.0, float("inf")], dtype=torch.float16), "bfloat16"
    ).tolist() == [2.0, torch.finfo(torch.bfloat16).max]
    assert narrowed(torch.tensor([3e38, 2.0], dtype=torch.bfloat16), "float16").tolist() == [
        65504.0,
        2.0,
    ]
