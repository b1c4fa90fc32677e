"""Products with the matrices of a layer on a device, in each type of weights."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from dovetail.workers.kernels import Kind
from dovetail.workers.models.backends.blob import Matrix

Product = Callable[[Tensor], Tensor]  # x [T, k] fp32 -> x W^T + bias [T, n] fp32
TILE_WEIGHTS = 1 << 24  # 16-bit weights that are widened at a time: 64 MiB of fp32
LEAST_ROWS, MULTIPLE = 32, 8  # torch's product needs more than 16 rows, and multiples of 8
TINY = 1e-30  # a row of smaller numbers is all zeros in int8 (`kernels/native/linear.inl`)


def product(matrix: Matrix | Product, x: Tensor) -> Tensor:
    """x [T, k] fp32 -> x W^T + bias [T, n] fp32."""
    if not isinstance(matrix, Matrix):
        return matrix(x)
    if matrix.kind is Kind.FP32:
        return linear(x, matrix.weight, matrix.bias)
    y = (
        _integer_product(matrix, x)
        if matrix.kind is Kind.INT8
        else _widened_product(matrix.weight, x)
    )
    return y if matrix.bias is None else y + matrix.bias


def rounded_product(
    matrix: Matrix | Product, x: Tensor, narrow: Callable[[Tensor, torch.dtype], Tensor]
) -> Tensor:
    """Return x W^T + bias [T, n] fp32 for a draft: x [T, k] fp32 is rounded to the type of 16-bit
    weights by `narrow`."""
    if not isinstance(matrix, Matrix) or matrix.kind not in (Kind.FP16, Kind.BF16):
        return product(matrix, x)
    weight = matrix.weight
    x = narrow(x, weight.dtype)
    if _widens_sums(weight.device, weight.dtype):
        y = torch.mm(x, weight.t(), out_dtype=torch.float32)
    else:
        y = linear(x, weight).float()
    return y if matrix.bias is None else y + matrix.bias


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in a 16-bit type, clamped to its range."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


@cache
def _widens_sums(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's 16-bit products on a device can give fp32 sums."""
    one = torch.ones(8, 8, device=device, dtype=dtype)
    try:
        torch.mm(one, one, out_dtype=torch.float32)
    except (RuntimeError, TypeError):  # another device, or another version of torch
        return False
    return True


def _widened_product(weight: Tensor, x: Tensor) -> Tensor:
    rows = max(1, TILE_WEIGHTS // weight.shape[1])
    y = x.new_empty(x.shape[0], weight.shape[0])
    for first in range(0, weight.shape[0], rows):
        torch.mm(x, weight[first : first + rows].float().t(), out=y[:, first : first + rows])
    return y


def _integer_product(matrix: Matrix, x: Tensor) -> Tensor:
    """The inputs quantised with a scale per row; a value that is not finite makes its row so."""
    assert matrix.scales is not None
    most = x.abs().amax(1, keepdim=True)
    turned = torch.full_like(most, 127.0) / most  # 127.0 / most is 127 times a rounded reciprocal
    to = torch.where(most < TINY, torch.zeros_like(most), turned)
    scales = torch.where(most < TINY, torch.zeros_like(most), most / 127.0)
    scales = torch.where(most.isfinite(), scales, torch.full_like(most, float("nan")))
    quantised = torch.where(most.isfinite(), x * to, torch.zeros_like(x)).round().to(torch.int8)
    rows, inputs, outputs = (
        x.shape[0],
        -(-matrix.weight.shape[1] // MULTIPLE) * MULTIPLE,
        -(-matrix.weight.shape[0] // MULTIPLE) * MULTIPLE,
    )
    left = pad(quantised, (0, inputs - x.shape[1], 0, max(0, LEAST_ROWS - rows)))
    right = (
        matrix.weight
        if matrix.weight.shape == (outputs, inputs)
        else _padded(matrix.weight, outputs, inputs)
    )
    sums = torch._int_mm(left, right.t())[:rows, : matrix.weight.shape[0]]
    return sums.float() * (scales * matrix.scales)


def _padded(weight: Tensor, outputs: int, inputs: int) -> Tensor:
    return pad(weight, (0, inputs - weight.shape[1], 0, outputs - weight.shape[0]))
