"""A causal language model: transformers' outline with our linears, caches and attention. One pass
computes rows of several sessions, anywhere in their trees. The C++ kernels compute the layers, or
torch."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.experts import Routing
from dovetail.workers.models.backends.device.levels import AskedRows, Captured, Ranked
from dovetail.workers.models.backends.staged import Staged
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.checkpoints.checkpoint import Checkpoint
from dovetail.workers.models.checkpoints.context import context_of, digest_within
from dovetail.workers.models.parity.following import UnprovableError
from dovetail.workers.models.segment import Cache, Paths, Segment
from dovetail.workers.models.states import Kept, ModelPass

WHOLE_TOLERANCE = {"fp32": 1e-3, "fp16": 1e-3, "int8-per-tensor": 0.5}
"""Largest distance of logits from transformers' on a CPU, relative to their norm."""
ROUNDED_TOLERANCE = 0.1  # the distance where states are rounded to 16 bits between the layers
PER_TENSOR_SLACK = 0.5  # other rows may change logits this much with int8; wrong masks: 100%


class BackEnd(Protocol):
    """Computes a model: takes over its layers one by one, then the rest."""

    backend: str  # kernels or library
    prompt_rows: int  # rows of a prompt that are best computed in a pass
    reads_apart: int  # first rows of a prompt that `read` computes on another device; 0: none

    @property
    def kernels(self) -> str:
        """Return what computes the model, for a fingerprint."""

    @property
    def cache(self) -> str:
        """Return the type of keys and values: fp32, or half for 16 bits."""

    @property
    def routing(self) -> Routing | None:
        """Return the experts of all layers, if those used are counted (`timing.py`)."""

    def take_layer(self, layer: nn.Module, index: int) -> nn.Module:
        """Return the replacement of the layer, which is not needed afterwards."""

    def finish(self, model: Any) -> None:
        """Finish the back end once it has all layers and the rest of the model has its weights."""

    def new_cache(self, capacity: int) -> Cache:
        """Return an empty cache for `capacity` rows."""

    def compute(self, asked: ModelPass) -> Tensor:
        """Return logits [R, V], see `LanguageModel.forward`; keeps wanted states."""


class LanguageModel:
    """A causal model on one device. Logits are float32; T rows of a pass, R asked for, V tokens."""

    def __init__(
        self, model: Any, back_end: BackEnd, checkpoint: Checkpoint, *, weights: str, choice: str
    ) -> None:
        self._back_end = back_end
        self.checkpoint = checkpoint
        self.checkpoint_digest = digest_within(checkpoint.digest, model.config)
        self.weights = weights  # the type: fp32, fp16, bf16, int8, int4 or file, with activations
        self.backend, self.kernels = back_end.backend, back_end.kernels
        self.cache = back_end.cache
        self.prompt_rows, self.reads_apart = back_end.prompt_rows, back_end.reads_apart
        self.choice = choice  # why this back end
        self.proved = ""  # the day of the remembered proof; empty: it was proved again
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.vocabulary_size = int(model.config.vocab_size)  # columns V of the logits
        self.hidden_size: int = model.config.hidden_size
        self.layers = int(model.config.num_hidden_layers)
        self.end: tuple[int, ...] = checkpoint.vocabulary.end
        self.suppressed: tuple[int, ...] = ()  # ids that a target never chooses
        self.context = context_of(model.config)

    @property
    def back_end(self) -> BackEnd:
        """Return what computes the layer."""
        return self._back_end

    @property
    def routing(self) -> Routing | None:
        """Return the number of experts of all layers; None: none, or not counted."""
        return self._back_end.routing

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for one session of at least `capacity` rows, those of trees included."""
        return self._back_end.new_cache(capacity)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Sequence[Segment],
        *,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return logits [R, V] of tokens and positions int64 [T] of all segments in order; caches
        their keys and values. ValueError for positions beyond the context."""
        return self.forward_with_states(tokens, positions, segments, wanted=(), rows=rows)[0]

    @property
    def captures(self) -> bool:
        """Return whether levels of trees are captured."""
        return isinstance(self._back_end, Captured) and self._back_end.captures

    @torch.inference_mode()
    def levels_of(self, parts: Sequence[AskedRows]) -> Sequence[Ranked | None]:
        """Return the results of each part's wanted rows by a captured pass; None: not captured."""
        if not isinstance(self._back_end, Captured):
            return [None] * len(parts)
        return self._back_end.levels_of(parts)

    @torch.inference_mode()
    def forward_with_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Sequence[Segment],
        *,
        wanted: Collection[int],
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """Return the logits of `forward`, and states [T, hidden_size] at the places `wanted`: the
        residual stream that enters a layer, or LAST, after the final norm."""
        self._check_positions(positions)
        kept = Kept(set(wanted))
        asked = ModelPass(tokens, positions, segments, rows, kept)
        return self._back_end.compute(asked).float(), kept.states

    @torch.inference_mode()
    def read_apart(
        self, tokens: Tensor, segment: Segment, *, wanted: Collection[int], rows: Tensor
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """`forward_with_states` of the first rows of a session, read by another device."""
        if not isinstance(self._back_end, Staged):
            raise TypeError(f"back end {self.backend} has no separate reader of prompts")
        positions = torch.arange(segment.count)
        self._check_positions(positions)
        kept = Kept(set(wanted))
        asked = ModelPass(tokens, positions, [segment], rows, kept)
        return self._back_end.read(asked).float(), kept.states

    def _check_positions(self, positions: Tensor) -> None:
        """ValueError for positions that the tables of the model do not have, nor its embeddings."""
        first, last = (int(end) for end in positions.aminmax())
        if first < 0 or last >= self.context:
            most = self.context - 1
            raise ValueError(f"positions {first} to {last}, and the context has 0 to {most}")


class NotFiniteError(CheckpointError):
    """A model whose logits are not finite: its numbers overflow the type of its weights."""


def check_attention(model: LanguageModel) -> None:
    """`UnprovableError` unless the model leaves attention, slots and positions to us: two tokens
    must give the same logits with a sibling in the slot between them."""
    plain, tree = model.new_cache(2), model.new_cache(3)
    for cache in (plain, tree):
        for rows in cache.tensors if isinstance(cache, KVCache) else ():
            rows[..., : cache.capacity, :].fill_(float("nan"))
    paths = Paths.of(0, [[0], [0, 1], [0, 2]])
    expected = model.forward(torch.tensor([0, 1]), torch.tensor([0, 1]), [Segment(plain, 0, 2)])[1]
    found = model.forward(
        torch.tensor([0, 2, 1]), torch.tensor([0, 1, 1]), [Segment(tree, 0, 3, paths)]
    )[2]
    if len(expected) != model.vocabulary_size:
        raise UnprovableError(f"{len(expected)} logits for {model.vocabulary_size} tokens")
    if not bool(torch.isfinite(expected).all()):
        remedy = (
            "fetch the model again"
            if model.weights == "fp32"
            else "use weights fp32, or fetch the model again"
        )
        text = f"the model computes no finite logits with {model.weights} weights"
        raise NotFiniteError(f"{model.checkpoint.source}: {text}; {remedy}")
    unwritten = isinstance(plain, KVCache) and not all(
        bool(torch.isfinite(rows[..., : plain.capacity, :]).all()) for rows in plain.tensors
    )
    tolerance = PER_TENSOR_SLACK if model.weights == "int8-per-tensor" else 0.05
    if unwritten or float((expected - found).norm()) > tolerance * float(expected.norm()):
        raise UnprovableError("it does not leave masks and positions to its attention function")
