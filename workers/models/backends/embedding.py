"""Embeddings that stay in 16 bits and are widened at look-up; and the separate inputs of layers in
some models, computed from the tokens alone."""

from typing import Any

import torch
from torch import Tensor, nn

from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.layer import match
from dovetail.workers.kernels.layer_plan import NormKind
from dovetail.workers.models.backends.layer_parts import described_norm
from dovetail.workers.models.backends.packing import (
    EXACT_KINDS,
    KernelLinear,
    KernelNorm,
    compare_product,
    pack,
    product_of,
    sampled_rows,
)
from dovetail.workers.models.checkpoints.configured import base_model
from dovetail.workers.models.checkpoints.gguf.rows import rows_of, weight_of
from dovetail.workers.models.checkpoints.tables import (
    BlockEmbedding,
    PackedEmbedding,
    WidenedEmbedding,
    is_table,
    scale_of,
)
from dovetail.workers.models.families.description import Family, Norms, Streams, TokenInputs
from dovetail.workers.models.parity.following import UnsupportedError

PROVED_ROWS = 8  # rows for comparing the packed projection with the checkpoint's


def share_table(model: Any, head: nn.Linear, matrix: PackedMatrix) -> None:
    """Look tokens up in a packed head that is their table; `UnsupportedError` if it differs."""
    table = model.get_input_embeddings()
    held: nn.Module
    if isinstance(table, BlockEmbedding):
        same, held = table.rows is rows_of(head), table
    else:
        same = is_table(table) and table.weight is head.weight
        same &= matrix.kind in (Kind.FP32, EXACT_KINDS.get(table.weight.dtype))
        held = WidenedEmbedding(table.weight, scale_of(table))
    if not same:
        return
    own, ids = PackedEmbedding(matrix, scale_of(table)), sampled_rows(matrix.n)
    if not torch.equal(own(ids), held(ids)):
        raise UnsupportedError("rows of its packed head differ from those of its embedding")
    model.set_submodule(next(path for path, part in model.named_modules() if part is table), own)


def widen_embeddings(model: Any) -> None:
    """Make all embeddings return float32, in place; unknown kinds are converted as a whole."""
    for name, module in list(model.named_modules()):
        if isinstance(module, BlockEmbedding):
            module.hold()
        if not isinstance(module, nn.Embedding) or module.weight.dtype == torch.float32:
            continue
        if is_table(module):
            model.set_submodule(name, WidenedEmbedding(module.weight, scale_of(module)))
        else:
            module.float()


def proved(name: str, linear: nn.Linear, kind: Kind) -> PackedMatrix:
    """Return a packed linear, compared with the checkpoint's."""
    matrix = pack(kind, [linear])
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(PROVED_ROWS, matrix.k, generator=generator)
    picked = sampled_rows(matrix.n)
    expected = product_of(matrix, picked, rows, weight_of(linear, picked))
    compare_product(name, matrix, matrix.linear(rows)[:, picked], expected)
    return matrix


class StreamsAround:
    """The several states of a token before the layers and after them, the same bytes in any
    pass."""

    def __init__(self, model: Any, said: Streams, kind: Kind) -> None:
        """`model`: with all weights but the layers'."""
        base, self._least = base_model(model), said.least
        self._first, self._last = (
            [KernelLinear(proved(name, part, kind), "linears") for part in getattr(base, name)]
            for name in (said.begins, said.ends)
        )
        setattr(base, said.begins, nn.ModuleList(self._first))
        setattr(base, said.ends, nn.ModuleList(self._last))

    def begin(self, embedded: Tensor) -> Tensor:
        """Return the first layer's states [T, streams hidden] for embeddings [T, hidden]."""
        first = embedded.contiguous()
        others = (match(first, linear(first), self._least) for linear in self._first)
        return torch.cat([first, *others], 1)

    def end(self, states: Tensor) -> Tensor:
        """Return the final norm's states [T, hidden] for the last layer's."""
        first, *others = (part.contiguous() for part in states.chunk(1 + len(self._last), dim=1))
        total = first
        for linear, other in zip(self._last, others, strict=True):
            total = total + match(first, linear(other), self._least)
        return total / (1 + len(self._last))


class OwnInputs:
    """Computes the layers' separate inputs from a pass's tokens, the same bytes in any pass."""

    def __init__(self, model: Any, said: TokenInputs, kind: Kind, norms: Norms) -> None:
        """`model`: with all weights but the layers'; `norms`: of its layers."""
        base = base_model(model)
        linear, norm = (getattr(base, name) for name in (said.projection, said.norm))
        matrix = proved(said.projection, linear, kind)
        setattr(base, said.projection, KernelLinear(matrix, "linears"))
        setattr(
            base, said.norm, KernelNorm(NormKind.RMS, described_norm(norm, norms), norms.epsilon)
        )
        self._model, self._base, self._said = model, base, said
        self.width = matrix.n  # numbers of the inputs of all layers for one token
        self._width = int(getattr(model.config, said.width))

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the inputs float32 [T, width of all] of token ids int64 [T]."""
        projection, norm, table = (
            getattr(self._base, name)
            for name in (self._said.projection, self._said.norm, self._said.table)
        )
        embedded = self._model.get_input_embeddings()(tokens).float()
        projected = projection(embedded) * embedded.shape[-1] ** -0.5
        rows: Tensor = norm(projected.view(-1, self._width)).view_as(projected)
        known = tokens.where(tokens < table.weight.shape[0], 0)
        whole: Tensor = (rows + table(known).float()) * 2.0**-0.5
        return whole.contiguous()

    def share(self, target: "OwnInputs") -> None:
        """Compute with the parts of another model of the same checkpoint."""
        for name in (self._said.projection, self._said.norm, self._said.table):
            setattr(self._base, name, getattr(target._base, name))

    def finish(self) -> None:
        """Stop the model's own forward from computing them: layers get these."""
        setattr(self._base, self._said.width, 0)


def inputs_of(model: Any, family: Family, kind: Kind) -> OwnInputs | None:
    """Return an object that computes the layers' separate inputs; None if they have none."""
    said = family.inputs
    if said is None or not getattr(model.config, said.width, 0):
        return None
    return OwnInputs(model, said, kind, family.layer(model.config, 0).norms)
