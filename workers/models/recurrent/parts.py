"""The parts of a mixer with a state in a decoder layer of transformers."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dovetail.workers.kernels.exact import exp
from dovetail.workers.kernels.states import ScanPlan
from dovetail.workers.models.backends.experts import part_of, tensor_of
from dovetail.workers.models.checkpoints.gguf.rows import drop_weight, take_places
from dovetail.workers.models.families.description import Given, StateMixer
from dovetail.workers.models.parity.following import UnsupportedError


@dataclass(frozen=True)
class Gates:
    """A linear whose outputs are queries and gates, head by head, to be separated."""

    module: nn.Linear
    queries: nn.Linear
    gates: nn.Linear
    order: Tensor  # int64 [out]: the places of both outputs in the checkpoint


def split_gates(module: nn.Linear, heads: int, head_dim: int) -> Gates:
    """Separate queries and gates; the linear loses its weights."""
    order = torch.arange(2 * heads * head_dim).view(heads, 2, head_dim).transpose(0, 1).flatten()
    if len(order) != module.out_features:
        raise UnsupportedError(f"{module.out_features} queries and gates, not {len(order)}")
    queries, gates = (_rows(module, part) for part in order.chunk(2))
    drop_weight(module)
    return Gates(module, queries, gates, order)


def _rows(module: nn.Linear, rows: Tensor) -> nn.Linear:
    part = nn.Linear(module.in_features, len(rows), bias=module.bias is not None, device="meta")
    take_places(module, rows, part)
    return part


def orders_of(said: StateMixer) -> list[Tensor | None]:
    """Return the places in the checkpoint of outputs that the kernels read; None: in place."""
    if said.order is Given.IN_ORDER:
        return [None] * len(said.given)
    keys, values = said.key_heads * said.key_dim, said.value_heads * said.value_dim
    if said.order is Given.GATE_FIRST:
        places = torch.arange(2 * values + 2 * keys + said.value_heads)
        gate, value, key, query, step = torch.split(
            places, [values, values, keys, keys, said.value_heads]
        )
        return [torch.cat([query, key, value, gate, step])]
    each = said.value_heads // said.key_heads
    widths = [said.key_dim, said.key_dim, each * said.value_dim, each * said.value_dim]
    wide = torch.arange(2 * keys + 2 * values).view(said.key_heads, sum(widths))
    narrow = torch.arange(2 * said.value_heads).view(said.key_heads, 2 * each)
    return [
        torch.cat([part.flatten() for part in torch.split(wide, widths, 1)]),
        torch.cat([part.flatten() for part in torch.split(narrow, each, 1)]),
    ]


def scan_of(layer: nn.Module, said: StateMixer) -> ScanPlan:
    """Return the mixer of a layer without its matrices."""
    weight, bias = tensor_of(layer, f"{said.conv}.weight").float(), None
    if weight.ndim != 3 or weight.shape[1] != 1:
        raise UnsupportedError(f"{said.conv} of {type(layer).__name__} is no convolution by itself")
    weight = weight[:, 0]
    if getattr(part_of(layer, said.conv), "bias", None) is not None:
        bias = tensor_of(layer, f"{said.conv}.bias").float()
    if said.order is Given.GATE_FIRST:
        keys, values = said.key_heads * said.key_dim, said.value_heads * said.value_dim
        value, key, query = torch.split(torch.arange(len(weight)), [values, keys, keys])
        order = torch.cat([query, key, value])
        weight, bias = weight[order], None if bias is None else bias[order]
    norm = None if said.norm is None else f"{said.norm}.weight"
    decay = _numbers(layer, said.decay)
    return ScanPlan(
        said.rule,
        weight.t().contiguous(),
        None if bias is None else bias.contiguous(),
        said.key_heads,
        said.value_heads,
        said.key_dim,
        said.value_dim,
        None if decay is None else -exp(decay),
        _numbers(layer, said.step_bias),
        _numbers(layer, said.skip),
        _numbers(layer, norm),
        said.norm_width,
        said.gate_first,
        said.epsilon,
        said.query_scale,
        _factors(said),
    )


def _factors(said: StateMixer) -> Tensor | None:
    if said.factors is None:
        return None
    gate, value, key, query, step = map(torch.tensor, said.factors)
    keys, values = said.key_heads * said.key_dim, said.value_heads * said.value_dim
    widths = (keys, keys, values, values, said.value_heads)
    parts = (query, key, value, gate, step)
    return torch.cat([part.expand(width) for part, width in zip(parts, widths, strict=True)])


def _numbers(layer: nn.Module, name: str | None) -> Tensor | None:
    return None if name is None else tensor_of(layer, name).float().flatten().contiguous()
