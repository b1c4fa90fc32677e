"""Linears of the library back end. Each candidate lays out a weight and multiplies fp32 rows with
it; those that work are found by comparison with torch's own linear, and `selection.py` measures
which to use."""

import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from dovetail.protocol.profile import cpu_flags

Product = Callable[[Tensor], Tensor]  # x [T, in] -> [T, out], both fp32

LEAST_ROWS = 4  # fewer rows are padded: oneDNN is slower for 1 to 3 (7B, Zen 4: 54 ms, 40 ms)
BATCH_HINT = 16
"""Rows that a layout is made for: 4 to 64 are alike for oneDNN, 1 is slow; MKL takes one number."""
EXACT, HALF_ROUNDED, TENSOR_ROUNDED = 1e-5, 2e-2, 5e-2
"""Largest accepted difference to torch's linear: fp32 gives 1e-6, bf16 rows 5e-3, int8 1e-2."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute linears whose weights are of the type `stored`."""

    name: str
    stored: torch.dtype  # the type of the weight that `pack` takes
    tolerance: float
    copies: int  # copies of the weight in memory: MKL needs the original, too
    pack: Callable[[Tensor, Tensor | None], Product]


def _padded(rows: Tensor, count: int) -> Tensor:
    return pad(rows, (0, 0, 0, count - rows.shape[0])) if rows.shape[0] < count else rows


def _plain(weight: Tensor, bias: Tensor | None) -> Product:
    return lambda x: linear(x, weight, bias)


def _onednn(weight: Tensor, bias: Tensor | None) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), BATCH_HINT)

    def product(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(
            _padded(x, LEAST_ROWS), packed, bias, "none", [], ""
        )
        return y[: x.shape[0]]

    return product


def _mkl(weight: Tensor, bias: Tensor | None) -> Product:
    """Packed for BATCH_HINT rows; passes with more rows use torch's own linear."""
    weight = weight.contiguous()
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, BATCH_HINT)

    def product(x: Tensor) -> Tensor:
        if x.shape[0] > BATCH_HINT:
            return linear(x, weight, bias)
        y: Tensor = torch.ops.mkl._mkl_linear(
            _padded(x, BATCH_HINT), packed, weight, bias, BATCH_HINT
        )
        return y[: x.shape[0]]

    return product


def _onednn_bf16(weight: Tensor, bias: Tensor | None) -> Product:
    product = _onednn(weight, None if bias is None else bias.bfloat16())
    return lambda x: product(x.bfloat16()).float()


def _plain_bf16(weight: Tensor, bias: Tensor | None) -> Product:
    offset = None if bias is None else bias.bfloat16()
    return lambda x: linear(x.bfloat16(), weight, offset).float()


def _fbgemm_fp16(weight: Tensor, bias: Tensor | None) -> Product:
    """Keep 16 bits, compute in fp32; torch deprecates FBGEMM without a replacement."""
    offset = torch.zeros(weight.shape[0]) if bias is None else bias
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = torch.fbgemm_pack_gemm_matrix_fp16(weight.float())

    def product(x: Tensor) -> Tensor:
        y: Tensor = torch.fbgemm_linear_fp16_weight_fp32_activation(x.contiguous(), packed, offset)
        return y

    return product


def _int8_per_tensor(weight: Tensor, bias: Tensor | None) -> Product:
    """torch's dynamic quantisation: one scale for all rows, so rows depend on each other."""
    if platform.machine() == "x86_64" and "avx" not in cpu_flags():
        raise RuntimeError("an illegal instruction without AVX")
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    module.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised: nn.Sequential = torch.ao.quantization.quantize_dynamic(  # type: ignore[no-untyped-call]
            nn.Sequential(module), {nn.Linear}, dtype=torch.qint8
        )
    return quantised


CANDIDATES = {
    "fp32": (
        Candidate("onednn", torch.float32, EXACT, 1, _onednn),
        Candidate("mkl", torch.float32, EXACT, 2, _mkl),
        Candidate("plain", torch.float32, EXACT, 1, _plain),
    ),
    "fp16": (Candidate("fbgemm-fp16", torch.float16, EXACT, 1, _fbgemm_fp16),),
    "bf16": (
        Candidate("onednn-bf16", torch.bfloat16, HALF_ROUNDED, 1, _onednn_bf16),
        Candidate("plain-bf16", torch.bfloat16, HALF_ROUNDED, 1, _plain_bf16),
    ),
    "int8-per-tensor": (
        Candidate("torch-int8", torch.float32, TENSOR_ROUNDED, 1, _int8_per_tensor),
    ),
}
"""The candidates for weights of each type, the one to prefer where nothing is measured first."""


def reason_against(candidate: Candidate) -> str:
    """Return how a candidate differs from torch's linear at odd shapes; empty if it agrees."""
    generator = torch.Generator().manual_seed(1)
    for outputs, inputs in ((96, 80), (33, 17)):
        weight = torch.randn(outputs, inputs, generator=generator).to(candidate.stored)
        for bias in (None, torch.randn(outputs, generator=generator)):
            for rows in (1, LEAST_ROWS, BATCH_HINT, BATCH_HINT + 1):
                if against := _disagreement(
                    candidate, weight, bias, torch.randn(rows, inputs, generator=generator)
                ):
                    return against
    return ""


@torch.inference_mode()
def _disagreement(candidate: Candidate, weight: Tensor, bias: Tensor | None, x: Tensor) -> str:
    with warnings.catch_warnings():  # the deprecation is also reported at the call, once a process
        warnings.simplefilter("ignore")
        try:
            y = candidate.pack(weight, bias)(x)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            return f"not in this build of torch or on this CPU ({str(error).splitlines()[0][:99]})"
    expected = linear(x, weight.float(), bias)
    difference = float((y - expected).abs().max() / expected.abs().max())
    return "" if difference <= candidate.tolerance else f"differs from torch by {difference:.1e}"


class PackedLinear(nn.Module):
    """A linear whose weight exists in its candidates' layouts only, one for each class of rows."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, ways: Sequence[tuple[int, Candidate]]
    ) -> None:
        """`ways`: most rows of each class, ascending, and its candidate; the last takes all
        others."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        made: dict[str, Product] = {}
        for _, candidate in ways:
            if candidate.name not in made:
                made[candidate.name] = candidate.pack(
                    weight.detach().to(candidate.stored),
                    None if bias is None else bias.detach().float(),
                )
        self._ways = [(rows, made[candidate.name]) for rows, candidate in ways]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        rows = x.reshape(-1, self.in_features)
        count = rows.shape[0]
        product = next((p for most, p in self._ways if count <= most), self._ways[-1][1])
        return product(rows).view(*x.shape[:-1], self.out_features)
