"""Inflation: the same function at the price of a larger model.

A trained model of realistic size cannot be carried along, yet the cost of a pass decides what
speculation is worth. So decoder layers are added whose contribution to the residual stream is
exactly zero, spread evenly between the real ones, and MLPs are widened with units whose output
columns are zero. All other new weights are seeded noise, or those of real units over again, so that
every byte is read and every product computed. Sums gain exact zeros: logits change only by the
order in which a matrix product adds, and by nothing in int8, whose sums are exact. Knows the names
that Llama, Mistral and Qwen give to their linears, nothing else of a model.
"""

import copy
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from dovetail.workers.models.checkpoints.loader import load_transformers

LAYER_FACTOR = 2
"""Most layers a real one: the rest of the size goes into width, so that matrices are as large and
calls as few as in a real model of that size."""
UNIT_MULTIPLES = (256, 32)
"""A width divides by the first of these with which the size is near enough, else by the last:
GGUF's quantisers cut a row into blocks of 256 (K-quants) or of 32 (Q8_0, Q4_0 and the like)."""
NEAR = 0.03
"""The tolerance of a size, relative to what is asked for, so that a width divides by more."""
DEAD_SCALE = 0.5
"""The share that a dead unit yields of what the real one does that it is a copy of: int8 rounds a
row of units by its largest, which has to be a real one."""
SEED = 20_260_101
FOLDER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "generation_config.json",
)


@dataclass(frozen=True)
class Plan:
    """The shape of an inflated model."""

    sources: tuple[int, ...]
    """Return for each layer the real one that it is, or that it is a copy of: the first of several
    is the real one."""
    units: int
    linear_bytes: int

    @property
    def layers(self) -> int:
        return len(self.sources)

    @property
    def real(self) -> tuple[int, ...]:
        """Return where the real layers stand."""
        return tuple(self.sources.index(source) for source in sorted(set(self.sources)))


def linear_bytes(model: nn.Module) -> int:
    """The fp32 size of a model's linears, head included: what a pass over one row has to read."""
    return sum(
        4 * module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)
    )


def plan_inflation(model: Any, size_bytes: int) -> Plan:
    """Return the layers and MLP units that bring the linears of a model (its numbers are not looked
    at) near `size_bytes` of fp32.

    That is the plan of most layers within `NEAR` of the size, or the nearest where none is.
    `CheckpointError` if the model is larger already.
    """
    layer = _layers(model)[0]
    hidden, units = layer.mlp.gate_proj.in_features, layer.mlp.gate_proj.out_features
    real, now = len(_layers(model)), linear_bytes(model)
    layer_bytes, unit_bytes = linear_bytes(layer), 4 * 3 * hidden
    if size_bytes < now:
        raise CheckpointError(
            f"an inflation to {size_bytes} bytes is below the {now} bytes that the model's "
            "linears have already; ask for more, or for none"
        )
    most = min(LAYER_FACTOR * real, real + (size_bytes - now) // layer_bytes)

    def with_shape(layers: int, multiple: int) -> Plan:
        """Return the plan of this many layers whose width divides by `multiple` and whose size is
        the nearest to `size_bytes`."""
        base = now + (layers - real) * layer_bytes
        wanted = units + (size_bytes - base) / (layers * unit_bytes)
        width = max(round(wanted / multiple), math.ceil(units / multiple)) * multiple
        sources = tuple(i * real // layers for i in range(layers))
        return Plan(sources, width, base + layers * (width - units) * unit_bytes)

    def error(plan: Plan) -> float:
        return abs(plan.linear_bytes / size_bytes - 1)

    plans = [
        with_shape(layers, multiple)
        for multiple in UNIT_MULTIPLES
        for layers in range(most, real - 1, -1)
    ]
    return next((plan for plan in plans if error(plan) <= NEAR), None) or min(plans, key=error)


def grow_skeleton(model: Any, plan: Plan) -> None:
    """Give a model without numbers the layers of the plan; their widths follow when each layer has
    its numbers (`grow_layer`)."""
    real = _layers(model)
    model.model.layers = nn.ModuleList([copy.deepcopy(real[source]) for source in plan.sources])
    for index, layer in enumerate(model.model.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    config = model.config
    config.num_hidden_layers, config.intermediate_size = plan.layers, plan.units
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[source] for source in plan.sources]


@torch.no_grad()
def grow_layer(layer: Any, index: int, plan: Plan) -> None:
    """Make layer `index`, which has the numbers of its source, what the plan says: the source
    itself or one that adds nothing, both wider."""
    generator = torch.Generator().manual_seed(SEED + index)
    if plan.sources.index(plan.sources[index]) != index:
        _make_identity(layer, generator)
    _widen(layer.mlp, plan.units)


def write_inflated(source: str, size_bytes: int, out: Path) -> None:
    """Write the model in `source`, inflated, to the folder `out` in its own type with its
    tokenizer."""
    checkpoint = open_checkpoint(source)
    model = load_transformers(checkpoint, torch.float32)
    plan = plan_inflation(model, size_bytes)
    grow_skeleton(model, plan)
    for index, layer in enumerate(_layers(model)):
        grow_layer(layer, index, plan)
    config = json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    model.to(getattr(torch, stored)).save_pretrained(out)
    for name in FOLDER_FILES:
        if (checkpoint.folder / name).is_file():
            shutil.copyfile(checkpoint.folder / name, out / name)


def _layers(model: Any) -> list[Any]:
    try:
        layers = list(model.model.layers)
        for layer in layers:
            _ = (
                layer.self_attn.o_proj.weight,
                layer.mlp.gate_proj.weight,
                layer.mlp.up_proj.weight,
                layer.mlp.down_proj.weight,
            )
    except AttributeError as error:
        raise CheckpointError(
            f"a {model.config.model_type} model cannot be inflated: {error}"
        ) from None
    return layers


def _make_identity(layer: Any, generator: torch.Generator) -> None:
    """Make a layer add nothing: seeded weights, zero output projections."""
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(_noise(module.weight, generator))
    for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
        output.weight.zero_()
        if output.bias is not None:
            output.bias.zero_()


def _widen(mlp: Any, units: int) -> None:
    real = mlp.gate_proj.out_features
    more = units - real
    copied = torch.arange(more, device=mlp.gate_proj.weight.device) % real
    for linear, scale in ((mlp.gate_proj, 1.0), (mlp.up_proj, DEAD_SCALE)):
        bias = (
            linear.bias
            if linear.bias is None
            else torch.cat([linear.bias, scale * linear.bias[copied]])
        )
        _replace(linear, torch.cat([linear.weight, scale * linear.weight[copied]]), bias)
    down = mlp.down_proj
    _replace(
        down,
        torch.cat([down.weight, down.weight.new_zeros(down.out_features, more)], dim=1),
        down.bias,
    )


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Weights of the usual scale, 1/sqrt(inputs), so that dead rows compute ordinary numbers:
    neither zeros nor denormals nor infinities."""
    noise = torch.randn(like.shape, generator=generator) / math.sqrt(like.shape[1])
    return noise.to(like.dtype)


def _replace(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
