"""The shapes of a model's matrices, from its modules, with or without numbers."""

from typing import Any

from torch import nn


def linear_shapes(model: Any) -> list[tuple[int, int]]:
    """[out, in] of every linear."""
    return [
        (module.out_features, module.in_features)
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]


def expert_shapes(model: Any) -> list[tuple[int, int]]:
    """Return [out, in] of every expert's linears, of stacks [experts, out, in]."""
    return [
        (int(tensor.shape[1]), int(tensor.shape[2]))
        for name, tensor in model.named_parameters()
        if tensor.ndim == 3 and "experts" in name.split(".")
        for _ in range(tensor.shape[0])
    ]
