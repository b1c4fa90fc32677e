"""The experts of a transformers layer, packed and proved. One expert is compared with the plain
formula in fp32; the formula then replaces them with packed matrices, so that no layer is in memory
twice. Rows whose choice is nearly a tie are only compared in parts."""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.workers.kernels import Kind, PackedMatrix, threads
from dovetail.workers.kernels.blocks import BlockMatrix
from dovetail.workers.kernels.experts import MatrixT, route, stacked, stacked_matrices
from dovetail.workers.kernels.layer_plan import ExpertsPlan, Norm, RouterPlan
from dovetail.workers.models.backends.packing import (
    BLOCK_KINDS,
    DTYPES,
    EXACT_KINDS,
    block_matrix,
    check_contents,
    check_rows,
    pack,
    pack_contents,
    parts_of,
)
from dovetail.workers.models.checkpoints.gguf.rows import Content, Rows, rows_of
from dovetail.workers.models.checkpoints.pieces import UnreadStack, unread_of
from dovetail.workers.models.families.description import Experts, Router
from dovetail.workers.models.families.matrices import Layout, layout_of
from dovetail.workers.models.parity.following import EAGER, UnsupportedError, foreign
from dovetail.workers.progress import count_bytes

ROWS = 4  # rows on which transformers' experts are compared with the formula
TOLERANCE = 1e-4
TIE, ROUNDED_TIE = 1e-4, 2e-2
"""Margin of a choice that rounding cannot change; larger where inputs are rounded to integers."""
LEAST_SETTLED = 0.25  # the minimum share of rows with this margin

Expert = Callable[[int, Tensor], Tensor]  # computes one expert, by its index, for rows


class ExpertParts:
    """The experts of a layer; their weights are in transformers' part until they are packed."""

    def __init__(self, layer: nn.Module, said: Experts) -> None:
        self.said, self.layer = said, layer
        self.module = part_of(layer, said.part)
        if said.flat is not None:
            _stack(self.module, part_of(self.module, said.flat))
        for name in said.stacks:
            if not isinstance(stack := getattr(self.module, name, None), Tensor) or stack.ndim != 3:
                raise UnsupportedError(f"{said.part} of {type(layer).__name__} has no {name}")
        self._layouts = {name: self._layout(name) for name in said.stacks}
        told = hasattr(self.module, "_apply_gate")
        self.mixed = self._layouts[said.stacks[0]].mixed  # True if gates and outputs are apart
        self.biased = told and self.module.has_bias
        self.gated = getattr(self.module, "has_gate", True)
        self.count = len(getattr(self.module, said.stacks[0]))
        self.norms: Sequence[Norm | None] = (None, None, None)
        """The norms of the experts' inputs and outputs, and of the shared expert's output."""

    def matrix(self, name: str, index: int) -> Tensor:
        """Return the matrix [out, in] of an expert, gates first."""
        return self._layouts[name].rows(self.stored(name, index))

    def _layout(self, name: str) -> Layout:
        if (found := layout_of(self.module, self.said, name)) is None:
            raise UnsupportedError(f"{self.said.part} of {type(self.layer).__name__} has no layout")
        return found

    def stored(self, name: str, index: int) -> Tensor:
        """Return the matrix of an expert in transformers' form; it is read now if necessary."""
        if (unread := unread_of(self.module, name)) is not None:
            return unread.numbers(index)
        stack: Tensor = getattr(self.module, name)
        return stack[index].detach()

    def biases(self, name: str) -> Tensor | None:
        """Return all experts' biases [experts, out] in fp32, gates first; None without any."""
        if not self.biased:
            return None
        found = tensor_of(self.layer, f"{self.said.part}.{name}_bias").float()
        return replace(self._layouts[name], transposed=False).rows(found.t()).t().contiguous()

    def pack(self, kind: Kind) -> ExpertsPlan:
        """Return the experts with matrices of a kind; `module` loses its weights."""
        return self.plan(lambda name: self._pack_stack(kind, name))

    def plan(self, packed: Callable[[str], Sequence[PackedMatrix]]) -> ExpertsPlan:
        """Return the experts with the packed matrices of each stack; `module` loses its weights."""
        gate_up, down = map(packed, self.said.stacks)
        for name in self.said.stacks:
            setattr(self.module, name, nn.Parameter(torch.empty(0), requires_grad=False))
        gate = self.said.shared_gate
        inner, outer, dense = self.norms
        shared = None if gate is None else exactly(tensor_of(self.layer, f"{gate}.weight"))
        return ExpertsPlan(
            self._router(self.said.router), gate_up, down, shared, inner, outer, dense
        )

    def _pack_stack(self, kind: Kind, name: str) -> list[PackedMatrix]:
        unread, biases = unread_of(self.module, name), self.biases(name)
        rows = None if unread is None or kind not in BLOCK_KINDS else unread.rows
        first, bias = () if rows is None else rows(0), None if biases is None else biases[0]
        matrices: Sequence[PackedMatrix]
        if rows is not None and any(isinstance(part, Rows) for part in first):
            sample = self.matrix(name, self.count - 1)
            matrices = self._pack_all(
                stacked(block_matrix(kind, first, bias), self.count, biases),
                partial(_pack_blocks, f"experts' {name}", rows),
                unread,
            )
            check_rows(f"experts' {name}", matrices[-1], sample)
        else:
            kind = EXACT_KINDS[self.stored(name, 0).dtype] if kind in BLOCK_KINDS else kind
            shape = getattr(self.module, name).shape[1:]
            outputs, inputs = reversed(shape) if self._layouts[name].transposed else shape
            matrices = self._pack_all(
                stacked_matrices(kind, self.count, outputs, inputs, biases),
                partial(self._pack_numbers, name),
                unread,
            )
        return [*matrices]

    def _pack_all(
        self,
        matrices: Sequence[MatrixT],
        pack_one: Callable[[MatrixT, int], None],
        unread: UnreadStack | None,
    ) -> Sequence[MatrixT]:
        with ThreadPoolExecutor(threads(), "experts") as pool:
            for _ in pool.map(pack_one, matrices, range(self.count)):
                if unread is not None:
                    count_bytes(unread.size_bytes)
        return matrices

    def _pack_numbers(self, name: str, matrix: PackedMatrix, index: int) -> None:
        weight = self.matrix(name, index)
        if matrix.kind in (Kind.FP16, Kind.BF16):
            weight = weight.to(DTYPES[Kind(matrix.kind)])
        matrix.pack_alone(weight.contiguous())
        check_rows(f"experts' {name}", matrix, weight)

    def _router(self, said: Router) -> RouterPlan:
        correction = None
        if said.correction is not None:
            correction = tensor_of(self.layer, said.correction).float().flatten().contiguous()
        return RouterPlan(
            self._logits(said),
            self.said.chosen,
            said.score,
            correction,
            said.groups,
            said.chosen_groups,
            said.normalised,
            said.least_sum,
            said.added_sum,
            said.scale * said.scale_after,
            self._router_norm(said),
            said.epsilon,
            None if said.scales is None else tensor_of(self.layer, said.scales).float(),
            said.scales_input,
            said.best_alone,
            said.softcap,
            said.jitter,
        )

    def _router_norm(self, said: Router) -> Norm | None:
        if said.norm_weight is None:
            return None
        weight = tensor_of(self.layer, said.norm_weight).float()
        return Norm(weight * len(weight) ** -0.5)

    def _logits(self, said: Router) -> PackedMatrix:
        bias = None if said.bias is None else tensor_of(self.layer, said.bias)
        return exactly(tensor_of(self.layer, said.weight), bias)


def _pack_blocks(
    what: str, rows: Callable[[int], Sequence[Content]], matrix: BlockMatrix, index: int
) -> None:
    """Pack the matrix of an expert by the blocks of its file, called `what` in errors."""
    contents = rows(index)
    if tuple(parts_of(contents)) != matrix.parts:
        raise UnsupportedError(f"{what} are of other types than those of expert 0")
    pack_contents(matrix, contents)
    check_contents(what, matrix, contents)


def tensor_of(layer: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer of a layer by name; `UnsupportedError` without one."""
    path, _, own = name.rpartition(".")
    part = part_of(layer, path)
    if own == "weight" and (rows := rows_of(part)) is not None:
        return rows.numbers()
    found: Any = getattr(part, own, None)
    if not isinstance(found, Tensor):
        raise UnsupportedError(f"{type(layer).__name__} has no {name}")
    if found.is_meta:
        raise UnsupportedError(f"{name} of {type(layer).__name__} is stored in blocks")
    return found.detach()


def part_of(layer: nn.Module, name: str) -> nn.Module:
    """Return a part of a layer by its name; `UnsupportedError` if it is missing."""
    try:
        return layer.get_submodule(name)
    except AttributeError:
        raise UnsupportedError(f"{type(layer).__name__} has no {name}") from None


def exactly(weight: Tensor, bias: Tensor | None = None) -> PackedMatrix:
    """A matrix that is always in fp32."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.float(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.float(), requires_grad=False)
    return pack(Kind.FP32, [linear])


def mixture(x: Tensor, ids: Tensor, weights: Tensor, expert: Expert) -> Tensor:
    """Return the weighted sum [rows, hidden] of the experts `ids` [rows, chosen] of x, lower
    indices first."""
    y = torch.zeros_like(x)
    for index in sorted(set(ids.flatten().tolist())):
        rows, place = (ids == index).nonzero(as_tuple=True)
        y[rows] += expert(index, x[rows]) * weights[rows, place, None]  # each of them once
    return y


class ExpertProof(nn.Module):
    """Replaces transformers' experts; must be made before their weights are packed."""

    def __init__(self, parts: ExpertParts, what: str) -> None:
        """`what`: the layer's name in errors."""
        super().__init__()
        self._what = what
        self._activate: Any = (
            getattr(parts.module, "_apply_gate", partial(_gated, parts.module))
            if parts.gated
            else parts.module.act_fn
        )
        self._mixed, self._scale_after = parts.mixed, parts.said.router.scale_after
        self._plan: ExpertsPlan | None = None
        self._routed: Tensor | None = None
        self.given, self._ids, self._weights, self._scores = (torch.empty(0) for _ in range(4))
        self._check_formula(parts)

    def use(self, plan: ExpertsPlan) -> None:
        """Compute with these matrices from now on."""
        self._plan = plan

    def listen(self, router: nn.Module) -> None:
        """Record the inputs of transformers' router, for the kernels' router."""

        def hear(_router: nn.Module, given: tuple[Tensor, ...]) -> None:
            self._routed = given[0].reshape(-1, given[0].shape[-1]).clone()

        router.register_forward_pre_hook(hear)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts ids [rows, chosen] of x [..., hidden]."""
        assert self._plan is not None
        self.given, self._ids, self._weights = x.flatten(0, -2).clone(), ids, weights
        return mixture(self.given, ids, weights, self._expert).view(x.shape)

    def _expert(self, index: int, rows: Tensor) -> Tensor:
        assert self._plan is not None
        inner = self._gate(self._plan.gate_up[index].linear(rows.contiguous()))
        y: Tensor = self._plan.down[index].linear(inner.contiguous())
        return y

    def settled(self, router: RouterPlan, *, exact: bool) -> Tensor:
        """Return bool [rows]: whose choice does not depend on rounding; `UnsupportedError` if the
        kernels' router differs. `exact`: inputs are not rounded to integers."""
        choice = route(router, self.given if self._routed is None else self._routed)
        shape = (len(choice.ids), router.logits.n)
        found = torch.zeros(shape).scatter(1, choice.ids.long(), choice.weights / self._scale_after)
        expected = torch.zeros(shape).scatter(1, self._ids, self._weights.float())
        shares = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        wrong = ~(shares <= TOLERANCE) & (choice.margins > TIE)
        if bool(wrong.any()):
            where = f"than transformers in {int(wrong.sum())} of {len(wrong)} rows"
            raise UnsupportedError(f"{self._what} chooses other experts or shares {where}")
        settled = choice.margins > (TIE if exact else ROUNDED_TIE)
        if float(settled.float().mean()) < LEAST_SETTLED:
            raise UnsupportedError(f"{self._what} has a router whose choices are nearly ties")
        return settled

    def _gate(self, x: Tensor) -> Tensor:
        """[rows, units] of [rows, 2 units], the gates first, or without them of [rows, units]."""
        if self._mixed:
            x = torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)
        y: Tensor = self._activate(x)
        return y

    def _run(self, experts: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y: Tensor = experts(x, ids, weights)
        return y.view(x.shape)

    def _check_formula(self, parts: ExpertParts) -> None:
        """`UnsupportedError` if transformers computes more for an expert than the formula."""
        (gate_up, first), (down, second) = (
            (parts.matrix(name, parts.count - 1).float(), 0.0 if biases is None else biases[-1])
            for name in parts.said.stacks
            for biases in (parts.biases(name),)
        )
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(ROWS, len(down), generator=generator)
        ids, weights = torch.zeros(ROWS, 1).long(), torch.rand(ROWS, 1, generator=generator)

        def expert(_: int, rows: Tensor) -> Tensor:
            return self._gate(rows @ gate_up.t() + first) @ down.t() + second

        with foreign(UnsupportedError, f"experts of {self._what} fail"):
            expected = self._run(_alone(parts), x, ids, weights)
            found = mixture(x, ids, weights, expert)
        if not float((found - expected).norm()) <= TOLERANCE * float(expected.norm()):
            raise UnsupportedError(f"experts of {self._what} are different MLPs in transformers")


class ScaledExpertProof(ExpertProof):
    """Replaces experts that each get all rows, times the weight or 0."""

    def listen(self, router: nn.Module) -> None:
        """Convert the output of transformers' router to weights of rows, [rows, experts]."""

        def hear(_router: nn.Module, given: tuple[Tensor, ...], result: Any) -> None:
            self.given, self._scores = given[0].clone(), result[0]

        router.register_forward_hook(hear)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        """x [experts rows, hidden] -> the same."""
        assert self._plan is not None
        rows, chosen = len(self._scores), self._plan.router.chosen
        best = self._scores.topk(chosen, dim=-1)
        self._ids, self._weights = best.indices, best.values
        y = torch.zeros_like(x)
        for index in sorted(set(self._ids.flatten().tolist())):
            own = index * rows + (self._ids == index).any(-1).nonzero().flatten()
            y[own] = self._expert(index, x[own])
        return y

    def _run(self, experts: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y: Tensor = experts(x)
        return y * weights


def _gated(experts: Any, x: Tensor) -> Tensor:
    """Return [rows, units] of [rows, 2 units], for experts without a function of their own."""
    gate, up = x.chunk(2, dim=-1)
    y: Tensor = experts.act_fn(gate) * up
    return y


FLAT = ("w1", "v1", "w2")
"""The gate, up and transposed down matrices of all experts, [experts units, hidden] each."""


def _stack(module: Any, flat: Any) -> None:
    """Replace the flat matrices of a module of experts by stacks."""
    gate, up, down = (
        getattr(flat, name).detach().unflatten(0, (module.num_experts, -1)) for name in FLAT
    )
    for name in FLAT:
        setattr(flat, name, nn.Parameter(torch.empty(0), requires_grad=False))
    module.gate_up_proj = nn.Parameter(torch.cat([gate, up], 1), requires_grad=False)
    module.down_proj = nn.Parameter(down.transpose(1, 2), requires_grad=False)
    module.act_fn = flat.activation_fn


def _alone(parts: ExpertParts) -> nn.Module:
    """transformers' experts with only the last one, in fp32, computed in the simplest way."""
    module: Any = parts.module
    memo: dict[int, Any] = {id(part): part for part in module.parameters()}
    if (config := getattr(module, "config", None)) is not None:
        memo[id(config)] = plainest = copy.copy(config)
        plainest._experts_implementation = EAGER
    own: Any = copy.deepcopy(module, memo)
    own.num_experts = 1
    for name, stack in module.named_parameters(recurse=False):
        last = parts.stored(name, parts.count - 1) if name in parts.said.stacks else stack[-1]
        own.register_parameter(name, nn.Parameter(last[None].float(), requires_grad=False))
    if parts.said.flat is not None:
        numbers = *own.gate_up_proj[0].chunk(2), own.down_proj[0].t()
        for name, matrix in zip(FLAT, numbers, strict=True):
            setattr(part_of(own, parts.said.flat), name, nn.Parameter(matrix, requires_grad=False))
    alone: nn.Module = own
    return alone
