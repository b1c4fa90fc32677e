"""Packs weights of transformers as the kernels' matrices, and replaces its layers, final norm and
head."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.workers import kernels
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.blocks import PLAIN, WIDTH, BlockMatrix, Part
from dovetail.workers.kernels.experts import stacked_matrices
from dovetail.workers.kernels.layer import DecoderLayer, LayerPass, normalise
from dovetail.workers.kernels.layer_plan import LatentPlan, Norm, NormKind
from dovetail.workers.models.checkpoints.gguf.rows import (
    Content,
    InFile,
    Rows,
    contents_in,
    drop_weight,
    rows_of,
)
from dovetail.workers.models.families.description import Latent
from dovetail.workers.models.parity.following import (
    UnsupportedError,
    as_given,
    in_rows,
    in_tuple,
)
from dovetail.workers.models.states import Kept
from dovetail.workers.models.timing import Part as Timed
from dovetail.workers.models.timing import asked, timing
from dovetail.workers.progress import beat, count_bytes

DTYPES = {
    Kind.FP32: torch.float32,
    Kind.FP16: torch.float16,
    Kind.BF16: torch.bfloat16,
    Kind.INT8: torch.float32,
}
"""The types from which a matrix of each kind is packed."""
EXACT_KINDS = {torch.float32: Kind.FP32, torch.float16: Kind.FP16, torch.bfloat16: Kind.BF16}
"""The kind that stores weights of a type unchanged."""
BLOCK_KINDS = (Kind.BLOCKS, Kind.EXACT_BLOCKS)
ROUNDING = (Kind.INT8, Kind.BLOCKS)  # kinds that round the rows by which they are multiplied
Q8_0 = 8
SAMPLED = 4  # rows of a matrix compared with the checkpoint's
PRODUCT_TOLERANCE = {**dict.fromkeys(Kind, 1e-4), Kind.INT8: 0.1}
"""Largest difference of a product by packed weights to one by the checkpoint's (`product_of`)."""


def pack(kind: Kind, linears: Sequence[nn.Linear]) -> PackedMatrix:
    """Pack linears with the same inputs as one matrix; those without blocks are unchanged."""
    biases = [linear.bias for linear in linears]
    bias = None
    if any(b is not None for b in biases):
        bias = torch.cat(
            [
                torch.zeros(part.out_features) if b is None else b.detach().float()
                for part, b in zip(linears, biases, strict=True)
            ]
        )
    if kind in BLOCK_KINDS:
        if any(rows_of(part) is not None for part in linears):
            contents = [content for part in linears for content in contents_in(part)]
            blocks = block_matrix(kind, contents, bias)
            pack_contents(blocks, contents)
            return blocks
        types = {part.weight.dtype for part in linears}  # the kind that stores all unchanged
        kind = EXACT_KINDS[types.pop()] if len(types) == 1 else Kind.FP32
    matrix = PackedMatrix(
        kind, sum(part.out_features for part in linears), linears[0].in_features, bias=bias
    )
    starts = itertools.accumulate((part.out_features for part in linears), initial=0)
    for part, first in zip(linears, starts, strict=False):
        pack_rows(matrix, part.weight.detach(), first)
    return matrix


def block_matrix(kind: Kind, contents: Sequence[Content], bias: Tensor | None) -> BlockMatrix:
    """Return an empty matrix of a kind of blocks, for concatenated rows."""
    first = contents[0]
    inputs = first.inputs if isinstance(first, Rows) else first.shape[1]
    return BlockMatrix(kind, parts_of(contents), inputs, bias=bias)


def parts_of(contents: Sequence[Content]) -> list[Part]:
    """Return types and total rows of concatenated matrices."""
    types = {own: number for number, own in PLAIN.items()}
    return [
        Part(rows.kind, rows.count)
        if isinstance(rows, Rows)
        else Part(types[EXACT_KINDS[rows.dtype]], len(rows))
        for rows in contents
    ]


def pack_contents(matrix: BlockMatrix, contents: Sequence[Content]) -> None:
    """Pack matrices, concatenated by rows."""
    for index, rows in enumerate(contents):
        source = rows.source if isinstance(rows, Rows) else rows
        if isinstance(source, InFile):
            matrix.pack_part(index, source.pieces())
            count_bytes(math.prod(source.shape))
        else:
            matrix.pack_part(index, source.contiguous())


def sample_of(kind: Kind) -> tuple[PackedMatrix, Tensor]:
    """Return a small random matrix [37, 64] of a kind, and its weights."""
    generator = torch.Generator().manual_seed(1)
    if kind not in BLOCK_KINDS:
        weight = torch.randn(37, 64, generator=generator).to(DTYPES[kind])
        matrix = PackedMatrix(kind, 37, 64)
        matrix.pack(weight)
        return matrix, weight
    content = torch.randint(256, (37, 2, 34), dtype=torch.uint8, generator=generator)
    content[:, :, :2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    rows = Rows(Q8_0, content.view(37, -1))
    own = BlockMatrix(kind, [Part(Q8_0, 37)], 64)
    own.pack_part(0, rows.content)
    return own, rows.numbers()


def product_of(matrix: PackedMatrix, outputs: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return x [m, in] times the weight [outputs, in] of some outputs, in torch; x is rounded as
    for blocks of kind BLOCKS, to 8 bits for each 32 inputs."""
    exact = x @ weight.t()
    if not isinstance(matrix, BlockMatrix) or matrix.kind is not Kind.BLOCKS:
        return exact
    ends = torch.tensor([part.count for part in matrix.parts]).cumsum(0)
    plain = torch.tensor([part.type in PLAIN for part in matrix.parts])
    blocks = x.view(len(x), -1, WIDTH)
    most = blocks.abs().amax(dim=2, keepdim=True).clamp(min=1e-30)
    turned = torch.full_like(most, 127.0) / most  # 127.0 / most is 127 times a rounded reciprocal
    rounded = ((blocks * turned).round() * (most / 127.0)).view(x.shape)
    return torch.where(
        plain[torch.bucketize(outputs, ends, right=True)], exact, rounded @ weight.t()
    )


def pack_rows(matrix: PackedMatrix, weight: Tensor, first: int = 0) -> None:
    """Pack a weight [out, in] of a type of `EXACT_KINDS` as rows from `first` on."""
    if matrix.kind in (Kind.FP16, Kind.BF16):
        weight = weight.to(DTYPES[Kind(matrix.kind)])
    matrix.pack(weight.contiguous(), first)


def pack_and_drop(kind: Kind, linears: Sequence[nn.Linear]) -> PackedMatrix:
    """Pack linears, which lose their weights: no layer is in memory twice."""
    matrix = pack(kind, linears)
    for part in linears:
        drop_weight(part)
    return matrix


def sampled_rows(outputs: int) -> Tensor:
    """Return which of this many rows of a matrix are compared with the checkpoint's."""
    return torch.linspace(0, outputs - 1, min(SAMPLED, outputs)).long()


def check_rows(name: str, matrix: PackedMatrix, weight: Tensor) -> None:
    """`UnsupportedError` if packed rows differ from the weight [out, in]: by a bit, or half a step
    of int8."""
    for index in sampled_rows(matrix.n).tolist():
        _check_row(name, matrix, index, weight[index].float())


def check_contents(name: str, matrix: BlockMatrix, contents: Sequence[Content]) -> None:
    """`UnsupportedError` if packed rows differ from those that were packed."""
    first = 0
    for part, rows in zip(matrix.parts, contents, strict=True):
        picked = sampled_rows(part.count)
        numbers = rows.taken(picked).numbers() if isinstance(rows, Rows) else rows[picked].float()
        for index, expected in zip(picked.tolist(), numbers, strict=True):
            _check_row(name, matrix, first + index, expected)
        first += part.count


def _check_row(name: str, matrix: PackedMatrix, index: int, expected: Tensor) -> None:
    found = torch.from_numpy(matrix.row(index))
    step = float(expected.abs().max()) / 127 if matrix.kind is Kind.INT8 else 0.0
    if not float((found - expected).abs().max()) <= 0.5001 * step:
        raise UnsupportedError(f"row {index} of its {name} weights differs from the checkpoint's")


class CoarseError(UnsupportedError):
    """A type of weights is too coarse for the numbers of a model."""


def compare_product(name: str, matrix: PackedMatrix, found: Tensor, expected: Tensor) -> None:
    """`UnsupportedError` if products with packed weights are far from the checkpoint's."""
    share = float((found - expected).norm() / (expected.norm() + 1e-20))
    most = PRODUCT_TOLERANCE[Kind(matrix.kind)]
    if matrix.kind is Kind.INT8 and most < share < 1:
        raise CoarseError(
            f"int8 weights are too coarse for this model: they change the product with its {name} "
            f"matrix by {100 * share:.0f} %, more than the {100 * most:.0f} % allowed"
        )
    if not share <= most:
        raise UnsupportedError(f"a product by its {name} weights differs by {share:.1e}")


class KernelLinear(nn.Module):
    """A linear of the kernels: the head, or another part."""

    def __init__(self, matrix: PackedMatrix, part: Timed = "head") -> None:
        super().__init__()
        self._matrix, self._part = matrix, part

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        with timing(self._part):
            y: Tensor = self._matrix.linear(x.reshape(-1, self._matrix.k).contiguous())
        return y.view(*x.shape[:-1], self._matrix.n)


class KernelNorm(nn.Module):
    """A norm of the kernels: the final one."""

    def __init__(self, kind: NormKind, norm: Norm, epsilon: float) -> None:
        super().__init__()
        self._kind, self._norm, self._epsilon = kind, norm, epsilon

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden], normalised."""
        return normalise(
            self._kind, self._norm, x.reshape(-1, x.shape[-1]).contiguous(), self._epsilon
        ).view(x.shape)


class FusedLayers(nn.Module):
    """All decoder layers of a model as one: transformers' loop over layers runs once."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        super().__init__()
        self._layers = layers

    def forward(
        self, hidden: Tensor, *unused: Any, seen: LayerPass, kept: Kept, **also_unused: Any
    ) -> Tensor:
        """hidden [1, T, hidden], or several streams of it, through all layers."""
        states = self.run(in_rows(hidden)[0].contiguous(), seen, kept)
        return as_given(states.unsqueeze(0), hidden)

    def run(self, states: Tensor, rows: LayerPass, kept: Kept) -> Tensor:
        """Run the layers on states [T, hidden], in place."""
        if (parts := asked()) is not None:
            rows.time_parts(parts.layers)
        kept.keep(0, states)
        self._layers[0].run(rows, states)
        for index, layer in enumerate(self._layers[1:], start=1):
            beat()
            kept.keep(index, states)
            layer.run_next(rows)
        beat()
        kept.keep(len(self._layers), states)
        return states


class Loop(nn.Module):
    """All layers, in place of the first one in transformers' loop, with its attributes."""

    def __init__(self, layers: nn.Module, said: Mapping[str, Any], tuples: int) -> None:
        """`said`: the plain attributes of the first layer; `tuples`: as an oracle has them."""
        super().__init__()
        self._layers, self._tuples = layers, tuples
        for name, value in said.items():
            setattr(self, name, value)

    def forward(self, *given: Any, **also_given: Any) -> Any:
        """hidden [1, T, hidden] through all layers."""
        return in_tuple(self._layers(*given, **also_given), self._tuples)


class LatentParts:
    """The norms and the matrix of keys and values of latents, [heads (plain + value_dim), rank]."""

    def __init__(
        self, said: Latent, up: nn.Linear, latent_norm: Tensor, query_norm: Tensor | None
    ) -> None:
        self.said = said
        self._norms = latent_norm, query_norm
        size = said.plain + said.value_dim
        if up.bias is not None or tuple(up.weight.shape) != (said.heads * size, said.rank):
            raise UnsupportedError(f"{said.latent_up} is not of {said.heads} heads of {size}")
        self._weights: Tensor = up.weight.detach().view(said.heads, size, said.rank)

    @property
    def width(self) -> int:
        """Return how many numbers a row takes in a cache."""
        return self.said.rank + self.said.rotated

    def pack(self, kind: Kind, query_up: PackedMatrix | None) -> LatentPlan:
        """Return the plan with matrices of a kind; with int8 weights they stay as stored."""
        said, (latent_norm, query_norm) = self.said, self._norms
        exact = EXACT_KINDS[self._weights.dtype] if kind in (Kind.INT8, *BLOCK_KINDS) else kind
        keys, values = self._weights[:, : said.plain], self._weights[:, said.plain :]
        return LatentPlan(
            rank=said.rank,
            plain=said.plain,
            rotated=said.rotated,
            latent_norm=latent_norm,
            key_up=_pack_heads(exact, "key", keys.transpose(1, 2)),
            value_up=_pack_heads(exact, "value", values),
            query_up=query_up,
            query_norm=query_norm,
            epsilon=said.epsilon,
        )


def _pack_heads(kind: Kind, name: str, weights: Tensor) -> Sequence[PackedMatrix]:
    matrices = stacked_matrices(kind, *weights.shape)
    for matrix, weight in zip(matrices, weights, strict=True):
        matrix.pack_alone(weight.to(DTYPES[kind]).contiguous())
        check_rows(f"heads' {name}", matrix, weight)
    return matrices


def reason_against(kind: Kind) -> str:
    """Return why the kernels cannot be used for a kind; empty if they agree with torch's linear."""
    if why := kernels.why_not():
        return why
    generator = torch.Generator().manual_seed(1)
    x, (matrix, weight) = torch.randn(9, 64, generator=generator), sample_of(kind)
    y, expected = matrix.linear(x), x @ weight.float().t()
    difference = float((y - expected).abs().max() / expected.abs().max())
    if not difference <= (3e-2 if kind in ROUNDING else 1e-5):
        return f"the C++ kernels are off by {difference:.1e}; rebuild them: {kernels.BUILD}"
    return ""
