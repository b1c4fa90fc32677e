"""A transformers causal language model whose linears, cache and attention are ours.

One pass over the weights computes rows of several sessions, wherever in their trees they lie. Target and small draft use the same class. Knows
tokens, positions and slots; nothing of prompts, trees or sampling.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.messages import MAX_TOKENS
from dovetail.workers.models import attention
from dovetail.workers.models.attention import Segment
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.checkpoint import Checkpoint, open_checkpoint, reason
from dovetail.workers.models.inflate import inflate, inflated_digest
from dovetail.workers.models.linear import pack_linears
from dovetail.workers.models.loader import load_transformers

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class LanguageModel:
    """A causal model on one device. Logits are float32, T rows of a pass, R rows asked for, V vocabulary."""

    def __init__(self, model: Any, checkpoint: Checkpoint, *, digest: str) -> None:
        config = model.config
        self._model = model
        self._layers: int = config.num_hidden_layers
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = getattr(config, "num_key_value_heads", None) or self._heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        weight = model.get_input_embeddings().weight
        self._dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device
        self.checkpoint = checkpoint
        self.checkpoint_digest = digest
        self.vocabulary_size: int = weight.shape[0]
        self.end: tuple[int, ...] = checkpoint.vocabulary.end
        self.context = context_of(config)
        self.kernels = pack_linears(model)

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for one session of at most `capacity` rows, those of trees included."""
        return KVCache(layers=self._layers, kv_heads=self._kv_heads, head_dim=self._head_dim, capacity=capacity, dtype=self._dtype, device=self.device)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, segments: Sequence[Segment], *, rows: Tensor | None = None) -> Tensor:
        """tokens, positions [T] (int64; the rows of all segments, one after the other) -> logits [R, V]; their keys and values go into the caches."""
        blocks = attention.arrange(segments, groups=self._heads // self._kv_heads, dtype=self._dtype, device=self.device)
        output = self._model(
            input_ids=tokens.to(self.device).unsqueeze(0),
            position_ids=positions.to(self.device).unsqueeze(0),
            use_cache=False,
            logits_to_keep=0 if rows is None else rows.to(self.device),
            blocks=blocks,
        )
        logits: Tensor = output.logits[0].float()
        return logits


def load_language_model(source: str, *, weights: str, device: str, inflate_bytes: int = 0) -> LanguageModel:
    """The model in `source` (folder, hub id, id@revision) with weights fp32, fp16 or bf16, inflated to a size in bytes if that is not 0."""
    if weights not in DTYPES:
        raise CheckpointError(f"there are no weights of type {weights!r} here; choose {' or '.join(DTYPES)}")
    checkpoint = open_checkpoint(source)
    model = load_transformers(checkpoint, DTYPES[weights])
    digest = checkpoint.digest
    if inflate_bytes:
        model = inflate(model, inflate_bytes)
        digest = inflated_digest(digest, inflate_bytes)
    language_model = LanguageModel(model.to(device), checkpoint, digest=digest)
    check_attention(language_model)
    return language_model


def context_of(config: Any) -> int:
    """The longest sequence that is computed exactly: all positions, but no more than a sliding window, within which every token is seen."""
    context: int = config.max_position_embeddings
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ("sliding_attention",))
    return min(context, window if window and slides else context, MAX_TOKENS)


def check_attention(model: LanguageModel) -> None:
    """Prove on three tokens that the model leaves attention, slots and positions to us; `CheckpointError` if it does not.

    Two tokens in a row must give the same logits as the same two with a sibling in the slot between them.
    """
    plain, tree = model.new_cache(2), model.new_cache(3)
    for cache in (plain, tree):
        cache.rows.fill_(float("nan"))
    mask = torch.tensor([[True, False, False], [True, True, False], [True, False, True]])
    try:
        expected = model.forward(torch.tensor([0, 1]), torch.tensor([0, 1]), [Segment(plain, 0, 2)])[1]
        found = model.forward(torch.tensor([0, 2, 1]), torch.tensor([0, 1, 1]), [Segment(tree, 0, 3, mask)])[2]
    except Exception as error:  # a model that is not ours may stumble in any way
        raise CheckpointError(f"{model.checkpoint.source}: this model's attention is not supported ({reason(error)})") from error
    if not bool(torch.isfinite(expected).all()):
        raise CheckpointError(f"{model.checkpoint.source}: the model computes no finite logits in {model._dtype}")
    if not bool(torch.isfinite(plain.rows).all()) or float((expected - found).norm()) > 0.05 * float(expected.norm()):
        raise CheckpointError(f"{model.checkpoint.source}: this model does not leave masks and positions to its attention function; it is not supported")
