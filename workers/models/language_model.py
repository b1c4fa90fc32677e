"""A causal language model whose linears, cache and attention are ours, around what transformers has
of it.

One pass over the weights computes rows of several sessions, wherever in their trees they lie.
Target and small draft use the same class. A back end takes the layers over as they are read: the
C++ kernels where they can compute the model, else what torch brings. Knows tokens, positions and
slots; nothing of prompts, trees or sampling.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.experts import Routing
from dovetail.workers.models.backends.device.levels import Captured, LevelRows
from dovetail.workers.models.backends.device.ranked import Ranked
from dovetail.workers.models.backends.staged import Staged
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.checkpoints.checkpoint import Checkpoint
from dovetail.workers.models.checkpoints.context import context_of, digest_within
from dovetail.workers.models.parity.following import UnprovableError
from dovetail.workers.models.segment import Cache, Paths, Segment
from dovetail.workers.models.states import Kept

WHOLE_TOLERANCE = {"fp32": 1e-3, "fp16": 1e-3, "int8-per-tensor": 0.5}
"""The distance at which logits with our own attention may lie from transformers' own on a CPU,
relative to their norm, in weights of a type: all else is the same."""
ROUNDED_TOLERANCE = 0.1
"""The distance where states are rounded to 16 bits between the layers."""
PER_TENSOR_SLACK = 0.5
"""The distance by which a token's logits may move with its neighbours under torch's own int8; a
mask that is ignored moves them by as much as they are."""


class BackEnd(Protocol):
    """The back end that computes a model's layers: it takes them over one by one, each as soon as
    it has its numbers, and then the rest of the model."""

    backend: str
    """kernels or library."""
    prompt_rows: int
    """Rows of a prompt that are best computed in a pass."""
    reads_apart: int
    """So many of the first rows of a prompt another device can read, by `read`; 0: there is
    none."""

    @property
    def kernels(self) -> str:
        """Return what computes, as it stands in a fingerprint."""

    @property
    def cache(self) -> str:
        """Return the type of keys and values: fp32, or half for 16 bits."""

    @property
    def routing(self) -> Routing | None:
        """Return the experts of all layers, where those that a pass goes through are counted
        (`timing.py`); None: they are not, or there are none."""

    def take_layer(self, layer: nn.Module, index: int) -> nn.Module:
        """Return what is to stand in the layer's place; the layer itself is not needed
        afterwards."""

    def finish(self, model: Any) -> None:
        """Finish the back end once it has all layers and the rest of the model has its weights."""

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for `capacity` rows."""

    def compute(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Sequence[Segment],
        rows: Tensor | None,
        kept: Kept,
    ) -> Tensor:
        """Logits [R, V] of a pass, see `LanguageModel.forward`; the states that are wanted are
        kept, and change no byte of the logits."""


class LanguageModel:
    """A causal model on one device. Logits are float32, T rows of a pass, R rows asked for, V
    vocabulary."""

    def __init__(
        self, model: Any, back_end: BackEnd, checkpoint: Checkpoint, *, weights: str, choice: str
    ) -> None:
        self._back_end = back_end
        self.checkpoint = checkpoint
        self.checkpoint_digest = digest_within(checkpoint.digest, model.config)
        self.weights = weights
        """fp32, fp16, bf16, int8, int8-per-tensor, or int4 or file with the activations; `half` is
        what the checkpoint has."""
        self.backend, self.kernels = back_end.backend, back_end.kernels
        self.cache = back_end.cache
        self.prompt_rows, self.reads_apart = back_end.prompt_rows, back_end.reads_apart
        self.choice = choice
        """Why this back end."""
        self.proved = ""
        """The day of the remembered proof by which it was loaded; empty: it was proved again."""
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.vocabulary_size = int(model.config.vocab_size)
        """Columns V of the logits; the embedding may have more rows, which are never predicted."""
        self.hidden_size: int = model.config.hidden_size
        self.layers = int(model.config.num_hidden_layers)
        self.end: tuple[int, ...] = checkpoint.vocabulary.end
        self.context = context_of(model.config)

    @property
    def back_end(self) -> BackEnd:
        """Return what computes it."""
        return self._back_end

    @property
    def routing(self) -> Routing | None:
        """Return the experts of all layers; None: it has none, or does not count those of a
        pass."""
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
        """tokens, positions [T] (int64; the rows of all segments, one after the other) -> logits
        [R, V]; their keys and values go into the caches. ValueError for positions that the context
        does not have."""
        self._check_positions(positions)
        return self._back_end.compute(tokens, positions, segments, rows, Kept()).float()

    @property
    def captures(self) -> bool:
        """Return whether levels of trees are captured."""
        return isinstance(self._back_end, Captured) and self._back_end.captures

    @torch.inference_mode()
    def levels_of(self, parts: Sequence[LevelRows]) -> Sequence[Ranked | None]:
        """Return what follows the wanted rows of each part, all of other sessions, by a captured
        pass, with their children if these are to be ranked there; None: such rows are not captured,
        and `forward` computes them."""
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
        """Return the logits of `forward`, and hidden states [T, hidden_size] of all rows in the
        type that the model computes in.

        `wanted`: decoder layers of the checkpoint, of which it is the residual stream that enters
        them, and LAST, the states behind the final norm.
        """
        self._check_positions(positions)
        kept = Kept(set(wanted))
        logits = self._back_end.compute(tokens, positions, segments, rows, kept).float()
        return logits, kept.states

    @torch.inference_mode()
    def read_apart(
        self, tokens: Tensor, segment: Segment, *, wanted: Collection[int], rows: Tensor
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """`forward_with_states` of the first rows of a session, read by the device that there is
        for it beside those that compute the model."""
        if not isinstance(self._back_end, Staged):
            raise TypeError(f"back end {self.backend} has no separate reader of prompts")
        positions = torch.arange(segment.count)
        self._check_positions(positions)
        kept = Kept(set(wanted))
        logits = self._back_end.read(tokens, positions, segment, rows, kept).float()
        return logits, kept.states

    def _check_positions(self, positions: Tensor) -> None:
        """ValueError for positions that the tables of the model do not have, nor its embeddings."""
        first, last = (int(end) for end in positions.aminmax())
        if first < 0 or last >= self.context:
            raise ValueError(
                f"positions {first} to {last}, where the model's context has 0 to "
                f"{self.context - 1}"
            )


class NotFiniteError(CheckpointError):
    """A model whose logits are not finite: its numbers overflow the type of its weights."""


def check_attention(model: LanguageModel) -> None:
    """Prove on three tokens that the model leaves attention, slots and positions to us;
    `UnprovableError` if it does not.

    Two tokens in a row must give the same logits as the same two with a sibling in the slot between
    them.
    """
    plain, tree = model.new_cache(2), model.new_cache(3)
    for cache in (plain, tree):
        if isinstance(cache, KVCache):
            cache.rows[..., : cache.capacity, :].fill_(float("nan"))
    paths = Paths.of(0, [[0], [0, 1], [0, 2]])
    expected = model.forward(torch.tensor([0, 1]), torch.tensor([0, 1]), [Segment(plain, 0, 2)])[1]
    found = model.forward(
        torch.tensor([0, 2, 1]), torch.tensor([0, 1, 1]), [Segment(tree, 0, 3, paths)]
    )[2]
    if len(expected) != model.vocabulary_size:
        raise UnprovableError(
            f"it computes {len(expected)} logits for a vocabulary of {model.vocabulary_size} tokens"
        )
    if not bool(torch.isfinite(expected).all()):
        remedy = (
            "fetch the model again"
            if model.weights == "fp32"
            else "use weights fp32, or fetch the model again"
        )
        raise NotFiniteError(
            f"{model.checkpoint.source}: the model computes no finite logits with "
            f"{model.weights} weights; {remedy}"
        )
    unwritten = isinstance(plain, KVCache) and not bool(
        torch.isfinite(plain.rows[..., : plain.capacity, :]).all()
    )
    tolerance = PER_TENSOR_SLACK if model.weights == "int8-per-tensor" else 0.05
    if unwritten or float((expected - found).norm()) > tolerance * float(expected.norm()):
        raise UnprovableError("it does not leave masks and positions to its attention function")
