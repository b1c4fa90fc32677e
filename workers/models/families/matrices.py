"""The matrices of a model by their names, as the descriptions of families have them. Knows modules
and names, nothing of numbers."""

from collections.abc import Iterator
from typing import Any

from dovetail.workers.models.checkpoints.configured import base_model, decoder_layers
from dovetail.workers.models.families.description import (
    Attention,
    Experts,
    Latent,
    LayerSpec,
)
from dovetail.workers.models.families.registry import FAMILIES


def matrices_of(spec: LayerSpec) -> Iterator[str]:
    """Yield the names, within a layer, of the linears that the kernels pack: all but experts,
    routers, and the matrices of heads of attention over latents."""
    mixer, mlp = spec.attention, spec.mlp
    if isinstance(mixer, Attention):
        yield from (*mixer.qkv, mixer.output)
    if isinstance(mixer, Latent):
        yield from filter(None, (mixer.query, mixer.query_up, mixer.latent, mixer.output))
    if (state := spec.state) is not None:
        yield from (*state.given, state.output)
    if isinstance(mlp, Experts):
        yield from mlp.around or ()
        mlp = mlp.shared
    if mlp is not None:
        yield from (*mlp.gate_up, mlp.down)
    if spec.own_input is not None:
        yield from (spec.own_input.gate, spec.own_input.projection)


def layer_matrices(model: Any) -> Iterator[str]:
    """Yield the names of the weights of the linears of all layers of a model; of a family that
    nobody has described there are none."""
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
