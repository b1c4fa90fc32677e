"""The library back end: transformers' own modules, their linears laid out and computed by what torch brings, attention by torch over our cache.

On a GPU linears stay as transformers has them. A token's logits depend on the rows beside it by rounding only, but they do depend on them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.workers.models import attention
from dovetail.workers.models.attention import Masks
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.embedding import widen_embeddings
from dovetail.workers.models.linear import PackedLinear
from dovetail.workers.models.loader import decoder_layers
from dovetail.workers.models.segment import PROMPT_ROWS, Segment
from dovetail.workers.models.selection import Selection
from dovetail.workers.models.states import Kept, keeping
from dovetail.workers.models.timing import Part, timing_modules


def transformers_pass(model: Any, tokens: Tensor, positions: Tensor, rows: Tensor | None, **given: Any) -> Tensor:
    """Logits [R, V] by transformers' own forward; what is `given` reaches the layers."""
    device = model.get_input_embeddings().weight.device
    output = model(
        input_ids=tokens.to(device).unsqueeze(0),
        position_ids=positions.to(device).unsqueeze(0),
        use_cache=False,
        logits_to_keep=0 if rows is None else rows.to(device),
        **given,
    )
    logits: Tensor = output.logits[0]
    return logits


class Library:
    """Takes over the layers of a model one by one, then the rest of it. A `BackEnd`."""

    backend = "library"
    prompt_rows = PROMPT_ROWS
    reads_apart = 0

    def __init__(self, selection: Selection | None, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.kernels = "plain" if selection is None else selection.name
        self._selection, self._device, self._dtype = selection, device, dtype

    def take_layer(self, layer: nn.Module, index: int) -> nn.Module:
        """The layer to compute with, of one that has its numbers: its linears are packed and the originals dropped."""
        self._pack(layer)
        return layer.to(self._device)

    def finish(self, model: Any) -> None:
        """What is not a layer has its numbers too."""
        self._pack(model)
        if self._device.type == "cpu":
            widen_embeddings(model)
        self._model = model.to(self._device)
        config = model.config
        heads, self._layers = config.num_attention_heads, config.num_hidden_layers
        self._kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._decoder_layers = decoder_layers(self._model)[1]
        self._timed = _parts(self._model, self._decoder_layers) if self._device.type == "cpu" else ()
        self._masks = Masks(groups=heads // self._kv_heads, device=self._device, dtype=self._dtype)

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for `capacity` rows."""
        return KVCache(layers=self._layers, kv_heads=self._kv_heads, head_dim=self._head_dim, capacity=capacity, dtype=self._dtype, device=self._device)

    def compute(self, tokens: Tensor, positions: Tensor, segments: Sequence[Segment], rows: Tensor | None, kept: Kept) -> Tensor:
        """Logits [R, V] of a pass."""
        with keeping(self._model, tuple(self._decoder_layers), kept), timing_modules(self._timed):
            return transformers_pass(self._model, tokens, positions, rows, blocks=attention.arrange(segments, self._masks))

    def _pack(self, module: nn.Module) -> None:
        if self._selection is None:
            return
        for name, part in list(module.named_modules()):
            if type(part) is nn.Linear:
                module.set_submodule(name, self._selection.pack(part.weight, part.bias))
                part.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # nobody holds the original on


def _parts(model: Any, layers: nn.ModuleList) -> Sequence[tuple[Part, nn.Module]]:
    """The matrices of a model that can be timed, where they stand as modules: those of its layers and the head."""
    kinds = (nn.Linear, PackedLinear)
    linears: list[tuple[Part, nn.Module]] = [("linears", part) for layer in layers for part in layer.modules() if isinstance(part, kinds)]
    return [*linears, ("head", model.get_output_embeddings())]
