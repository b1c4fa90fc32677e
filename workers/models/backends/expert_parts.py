"""The experts of a decoder layer of transformers: its router and the matrices of each, found by
what a description names, and packed for the kernels."""

from typing import Any

import torch
from torch import Tensor, nn

from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.experts import stacked_matrices
from dovetail.workers.kernels.layer_plan import ExpertsPlan, RouterPlan
from dovetail.workers.models.backends.packing import check_packed, pack, pack_rows
from dovetail.workers.models.families.description import Experts, Router
from dovetail.workers.models.parity.following import UnsupportedError

STACKS = ("gate_up_proj", "down_proj")
"""The matrices of all experts, as transformers names them: [experts, out, in]."""


class ExpertParts:
    """The experts of a layer, whose weights lie in transformers' part until they are packed."""

    def __init__(self, layer: nn.Module, said: Experts) -> None:
        self.said, self.layer = said, layer
        self.module = _module(layer, said.part)
        for name in STACKS:
            if not isinstance(stack := getattr(self.module, name, None), Tensor) or stack.ndim != 3:
                raise UnsupportedError(f"{said.part} of {type(layer).__name__} has no {name}")

    def pack(self, kind: Kind) -> ExpertsPlan:
        """Return the experts with matrices of a kind; `module` loses its weights."""
        gate_up, down = (self._pack_stack(kind, name) for name in STACKS)
        gate = self.said.shared_gate
        shared = None if gate is None else _exactly(tensor_of(self.layer, f"{gate}.weight"))
        return ExpertsPlan(self._router(self.said.router), gate_up, down, shared)

    def _pack_stack(self, kind: Kind, name: str) -> list[PackedMatrix]:
        stack: Tensor = getattr(self.module, name).detach()
        matrices = stacked_matrices(kind, *stack.shape)
        for matrix, weight in zip(matrices, stack, strict=True):
            pack_rows(kind, matrix, weight, 0)
            check_packed(f"experts' {name}", matrix, weight)
        setattr(self.module, name, nn.Parameter(torch.empty(0), requires_grad=False))
        return matrices

    def _router(self, said: Router) -> RouterPlan:
        correction = None
        if said.correction is not None:
            correction = tensor_of(self.layer, said.correction).float().flatten().contiguous()
        return RouterPlan(
            _exactly(tensor_of(self.layer, said.weight)),
            self.said.chosen,
            said.score,
            correction,
            said.groups,
            said.chosen_groups,
            said.normalised,
            said.least_sum,
            said.scale,
        )


def tensor_of(layer: nn.Module, name: str) -> Tensor:
    """Return a parameter or a buffer of a layer by its name; `UnsupportedError` where there is
    none."""
    part, _, own = name.rpartition(".")
    found: Any = getattr(_module(layer, part), own, None)
    if not isinstance(found, Tensor):
        raise UnsupportedError(f"{type(layer).__name__} has no {name}")
    return found.detach()


def _module(layer: nn.Module, name: str) -> nn.Module:
    try:
        return layer.get_submodule(name)
    except AttributeError:
        raise UnsupportedError(f"{type(layer).__name__} has no {name}") from None


def _exactly(weight: Tensor) -> PackedMatrix:
    """A matrix of fp32, whatever type the others have."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.float(), requires_grad=False)
    return pack(Kind.FP32, [linear])
