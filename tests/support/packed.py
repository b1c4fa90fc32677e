"""transformers' own model with the matrices that the kernels hold: the function that packed weights
have, computed layer by layer as its classes have it, without any of our caches, positions or
attention."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dovetail.workers.models.backends.proof import LayerProof
from dovetail.workers.models.checkpoints.configured import decoder_layers
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.parity.following import EAGER, implementation


def load_with_reference(
    folder: Path, weights: str, **how: Any
) -> tuple[LanguageModel, Callable[[Sequence[int]], Tensor]]:
    """Return a model on the CPU's kernels, and what computes the logits [T, V] of tokens by
    transformers' modules: its linears and experts multiply by the packed matrices, which a proof
    has held against the checkpoint's; all else is computed in fp32 by the class of the model."""
    with _kept_layers() as layers:
        model = load_language_model(
            str(folder), weights=weights, device="cpu", backend="kernels", **how
        )
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=EAGER, experts_implementation=EAGER
    ).eval()
    own: Any = model.back_end
    theirs.set_input_embeddings(own._model.get_input_embeddings())
    theirs.set_output_embeddings(own._head)
    base, name = _place_of(theirs)
    setattr(base, name, nn.ModuleList(layers))

    @torch.inference_mode()
    def logits(tokens: Sequence[int]) -> Tensor:
        with implementation(theirs, EAGER, *layers):
            found: Tensor = theirs(torch.tensor([list(tokens)])).logits[0]
        return found.float()

    return model, logits


@contextmanager
def _kept_layers() -> Iterator[list[nn.Module]]:
    """transformers' layers as a proof leaves them, in the order of the model."""
    layers: list[nn.Module] = []
    check = LayerProof.check

    def keep(proof: LayerProof, plan: Any) -> None:
        check(proof, plan)
        layers.append(proof._layer)

    with patch.object(LayerProof, "check", keep):
        yield layers


def _place_of(model: Any) -> tuple[Any, str]:
    """Return the module that has the decoder layers, and their name there."""
    layers = decoder_layers(model)[1]
    return next(
        (module, name)
        for module in model.modules()
        for name, part in module.named_children()
        if part is layers
    )
