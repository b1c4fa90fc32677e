"""The matrices of a model by name, as families describe them, and the layouts of experts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dovetail.workers.models.checkpoints.configured import base_model, decoder_layers
from dovetail.workers.models.families.description import Attention, Experts, Latent, LayerSpec
from dovetail.workers.models.families.registry import FAMILIES


@dataclass(frozen=True)
class Layout:
    """The layout of an expert's matrix in a stack of transformers'."""

    transposed: bool  # True for [in, out]
    mixed: bool  # True if gates and ups alternate

    def rows(self, stored: Tensor) -> Tensor:
        """Return the rows [out, in], gates first, of a matrix in transformers' layout."""
        rows = stored.t() if self.transposed else stored
        return torch.cat([rows[::2], rows[1::2]]) if self.mixed else rows

    def stored(self, rows: Tensor) -> Tensor:
        """Return a matrix in transformers' layout, from its rows [out, in], gates first."""
        rows = torch.stack(rows.chunk(2), dim=1).flatten(0, 1) if self.mixed else rows
        return rows.t() if self.transposed else rows


def layout_of(part: Any, said: Experts, name: str) -> Layout | None:
    """Return the layout of a stack of experts; None: neither part nor description has it."""
    told = hasattr(part, "_apply_gate")
    if not told and said.transposed is None:
        return None
    transposed = part.is_transposed if said.transposed is None else said.transposed
    mixed = told and not part.is_concatenated and name == said.stacks[0]
    return Layout(bool(transposed), bool(mixed))


def expert_layouts(model: Any) -> dict[str, Layout]:
    """Return the stacks of experts' matrices of a model by name, and their layouts."""
    if (family := FAMILIES.get(model.config.model_type)) is None:
        return {}
    found = {}
    path, layers = decoder_layers(model)
    for index, layer in enumerate(layers):
        if not isinstance(said := family.layer(model.config, index).mlp, Experts):
            continue
        part = layer.get_submodule(said.part)
        for name in said.stacks:
            if (layout := layout_of(part, said, name)) is not None:
                found[f"{path}.{index}.{said.part}.{name}"] = layout
    return found


def matrices_of(spec: LayerSpec) -> Iterator[str]:
    """Yield the linears of a layer that the kernels pack: not experts, routers, or latents'
    heads."""
    mixer, mlp = spec.attention, spec.mlp
    if isinstance(mixer, Attention):
        yield from (*mixer.qkv, mixer.output)
    if isinstance(mixer, Latent):
        yield from filter(None, (mixer.query, mixer.query_up, mixer.latent, mixer.output))
    if (state := spec.state) is not None:
        yield from (*state.given, *(state.behind or ()), state.output)
    if isinstance(mlp, Experts):
        yield from mlp.around or ()
        mlp = mlp.shared
    if mlp is not None:
        yield from (*mlp.gate_up, mlp.down)
    if spec.own_input is not None:
        yield from (spec.own_input.gate, spec.own_input.projection)


def layer_matrices(model: Any) -> Iterator[str]:
    """Yield the names of all layers' linear weights; none for an undescribed family."""
    if (family := FAMILIES.get(model.config.model_type)) is None:
        return
    name, layers = decoder_layers(model)
    for index in range(len(layers)):
        for part in matrices_of(family.layer(model.config, index)):
            yield f"{name}.{index}.{part}.weight"


def tables_and_head(model: Any) -> Iterator[str]:
    """Yield the names of the weights of a model's head and of its tables of tokens."""
    paths = {module: path for path, module in model.named_modules()}
    family, base = FAMILIES.get(model.config.model_type), base_model(model)
    parts = [model.get_input_embeddings(), model.get_output_embeddings()]
    if family is not None and family.inputs is not None:
        parts.append(getattr(base, family.inputs.table, None))
    for part in parts:
        if part in paths:
            yield f"{paths[part]}.weight"
