"""A skeleton becomes a model: its layers are read one by one, and taken over by a back end."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.workers.models.backends.library import Library, prove_whole
from dovetail.workers.models.checkpoints.checkpoint import Checkpoint
from dovetail.workers.models.checkpoints.configured import decoder_layers
from dovetail.workers.models.checkpoints.inflate import (
    Plan,
    grow_layer,
    grow_skeleton,
    inflated_digest,
    plan_inflation,
)
from dovetail.workers.models.checkpoints.loader import Skeleton, Types
from dovetail.workers.models.language_model import (
    ROUNDED_TOLERANCE,
    WHOLE_TOLERANCE,
    BackEnd,
    LanguageModel,
    check_attention,
)
from dovetail.workers.models.memory import release_memory
from dovetail.workers.models.parity.proving import provable
from dovetail.workers.models.weight_types import BLOCK_WEIGHTS, LINEAR_TYPES
from dovetail.workers.progress import loading


def assemble(
    skeleton: Skeleton,
    checkpoint: Checkpoint,
    *,
    weights: str,
    choice: str,
    inflate_bytes: int,
    open_back_end: Callable[[Any, Plan | None], BackEnd],
) -> LanguageModel:
    """Read the layers one by one, each taken over by its back end before the next is read, then the
    rest."""
    model = skeleton.model
    plan = plan_inflation(model, inflate_bytes) if inflate_bytes else None
    if plan is not None:
        grow_skeleton(model, plan)
    types = Types(  # dead units get numbers of the type that is wanted
        None if plan is None else LINEAR_TYPES.get(weights, torch.float32),
        None,
        blocks=weights in BLOCK_WEIGHTS,
    )
    name, layers = decoder_layers(model)
    prefixes = [
        f"{name}.{index if plan is None else plan.sources[index]}" for index in range(len(layers))
    ]
    size = _stored_bytes(checkpoint, prefixes) or skeleton.size_bytes
    with loading("loading", size), provable(checkpoint, model):
        skeleton.fill(
            model, "", types, but=layers
        )  # transformers' own forward runs around the layers, and proves them
        back_end = open_back_end(model, plan)
        one_by_one = not isinstance(back_end, Library)
        for index, layer in enumerate(layers):
            skeleton.fill(layer, prefixes[index], types, one_by_one=one_by_one)
            if plan is not None:
                grow_layer(layer, index, plan)
            layers[index] = back_end.take_layer(layer, index)
            release_memory()
        del layer
        back_end.finish(model)
    gc.collect()  # what transformers' modules hold of each other
    release_memory()
    real = range(len(layers)) if plan is None else plan.real
    digest = inflated_digest(checkpoint.digest, inflate_bytes)
    language_model = LanguageModel(
        model, back_end, checkpoint, digest=digest, weights=weights, choice=choice, real=real
    )
    with provable(checkpoint, model):
        check_attention(language_model)
        if isinstance(back_end, Library):
            prove_whole(
                model,
                back_end,
                language_model.context,
                WHOLE_TOLERANCE.get(weights, ROUNDED_TOLERANCE),
            )
    return language_model


def _stored_bytes(checkpoint: Checkpoint, layers: Sequence[str]) -> int:
    """Return how much is read of a checkpoint for layers of these prefixes, as often as they occur,
    and for the rest of the model."""
    sizes = {name: stored.size_bytes for name, stored in checkpoint.tensors.items()}
    of_layer = {
        prefix: sum(size for name, size in sizes.items() if name.startswith(f"{prefix}."))
        for prefix in {*layers}
    }
    return sum(sizes.values()) - sum(of_layer.values()) + sum(of_layer[prefix] for prefix in layers)
