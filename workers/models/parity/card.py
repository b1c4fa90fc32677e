"""How far each type of weights moves the logits of a text from transformers' in fp32. Types are
loaded in turn, one in memory at a time. transformers' eager forward has one layer in memory: all
parts of a text pass a layer before the next is read. Models that transformers rearranges, or that
compute between layers, are loaded whole."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.memory import release_memory
from dovetail.workers.models import attention
from dovetail.workers.models.checkpoints.checkpoint import Checkpoint
from dovetail.workers.models.checkpoints.configured import base_model, decoder_layers
from dovetail.workers.models.checkpoints.footprint import read_tensors, weights_bytes
from dovetail.workers.models.checkpoints.loader import Types, open_skeleton
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.parity.following import (
    EAGER,
    Call,
    Recorder,
    UnprovableError,
    Widened,
    follow,
    implementation,
    stand_in,
)
from dovetail.workers.models.parity.oracle import ClaimedCache, Oracle
from dovetail.workers.models.segment import Segment
from dovetail.workers.models.transformers import DynamicCache
from dovetail.workers.models.wanted import type_of

PART = 128  # tokens of a text that are read at a time
HEAD_ROWS = 8192  # rows of the head that are in fp32 at a time


class _TextCache(ClaimedCache):
    """Keys and values, or the state, of one layer for the parts read so far."""

    def __init__(self, config: Any) -> None:
        super().__init__(0)
        self.layers = DynamicCache(config=config).layers
        self._rows: tuple[Tensor, Tensor] | None = None

    get_conv_state, update_conv_state = DynamicCache.get_conv_state, DynamicCache.update_conv_state
    get_recurrent_state = DynamicCache.get_recurrent_state
    update_recurrent_state = DynamicCache.update_recurrent_state

    def update(
        self, key_states: Tensor, value_states: Tensor, *unused: Any, **also_unused: Any
    ) -> tuple[Tensor, Tensor]:
        new = (key_states, value_states)
        self._rows = (
            new  # type: ignore[assignment]
            if self._rows is None
            else tuple(torch.cat(pair, dim=-2) for pair in zip(self._rows, new, strict=True))
        )
        assert self._rows is not None
        self._length = self._rows[0].shape[-2]
        return self._rows


class _Head(nn.Module):
    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self._weight, self._bias = head.weight, head.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> [..., vocabulary]."""
        y = torch.cat(
            [linear(x, rows.float()) for rows in torch.split(self._weight, HEAD_ROWS)], dim=-1
        )
        return y if self._bias is None else y + self._bias.float()


@torch.inference_mode()
def reference_logits(
    checkpoint: Checkpoint,
    tokens: Sequence[int],
    context: int,
    tell: Callable[[int, int], None] = lambda _done, _all: None,
) -> Iterator[Tensor]:
    """Yield the logits [part, V] of a text; `UnprovableError` if transformers' forward cannot be
    followed."""
    attention.register()
    skeleton = open_skeleton(checkpoint)
    model, types = skeleton.model, Types(None, None)
    name, found = decoder_layers(model)
    layers = list(found)
    skeleton.fill(model, "", types, but=found)
    _widen_beside(model)
    oracle = Oracle(model, layers, context)
    if not oracle.isolated:
        raise UnprovableError("transformers computes something between the layers")
    text = torch.tensor(tokens)
    parts = [slice(start, min(start + PART, len(text))) for start in range(0, len(text), PART)]
    with implementation(model, EAGER, *layers):
        calls = [_calls(model, layers, text, part, tuples=oracle.tuples) for part in parts]
        states = [of_part[0].states for of_part in calls]
        for index, layer in enumerate(layers):
            tell(index, len(layers))
            skeleton.fill(layer, f"{name}.{index}", types)
            own, cache = stand_in(layer, {}), _TextCache(model.config)
            with implementation(own, EAGER):
                states = [
                    _run(own, of_part[index], rows, cache)
                    for of_part, rows in zip(calls, states, strict=True)
                ]
            del own
            layer.to_empty(device="meta")
            release_memory()
        tell(len(layers), len(layers))
        model.set_output_embeddings(_Head(model.get_output_embeddings()))
        for part, rows in zip(parts, states, strict=True):
            results = [rows.new_zeros(1).expand(rows.shape)] * (len(layers) - 1) + [rows]
            recorder = Recorder(layers, results, tuples=oracle.tuples)
            follow(
                model,
                recorder,
                text[part],
                torch.arange(len(text))[part],
                ClaimedCache(part.start),
                head=True,
            )
            if recorder.final is None:
                raise UnprovableError("transformers' own forward fails behind the last layer")
            yield recorder.final


def _widen_beside(model: Any) -> None:
    base = base_model(model)
    for name, part in list(base.named_children()):
        if type(part) is nn.Linear:
            setattr(base, name, Widened(part))


def _calls(
    model: Any, layers: Sequence[nn.Module], text: Tensor, part: slice, *, tuples: int
) -> dict[int, Call]:
    width = model.config.get_text_config().hidden_size
    nothing = torch.zeros(1).expand(1, part.stop - part.start, width)
    recorder = Recorder(layers, [nothing] * len(layers), tuples=tuples)
    follow(model, recorder, text[part], torch.arange(len(text))[part], ClaimedCache(part.start))
    return recorder.calls


def _run(layer: nn.Module, call: Call, states: Tensor, cache: ClaimedCache) -> Tensor:
    args, kwargs = call.of(states)

    def change(value: Any) -> Any:
        return cache if isinstance(value, ClaimedCache) else value

    output = layer(*map(change, args), **{name: change(value) for name, value in kwargs.items()})
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result


TYPES = ("fp32", "half", "int8", "int4", "file")
"""Types of weights that have a line if a checkpoint can be computed in them."""
Tell = Callable[[str], None]  # is called with the next step


@dataclass(frozen=True)
class Line:
    """The changes that a type of weights makes, over all positions of a text."""

    weights: str
    size_bytes: int  # bytes of all weights in memory
    tokens: int
    error: float  # |found - exact| / |exact| of the logits, without the means of rows
    divergence: float  # the mean of KL(exact || found), in nats
    same: float  # the share of positions whose likeliest token is the same


def card_of(
    checkpoint: Checkpoint,
    text: Sequence[int],
    context: int,
    activations: str,
    tell: Tell = lambda _what: None,
) -> Iterator[Line]:
    """Yield a line for each type of weights; `activations`: int8 or fp32. `UnprovableError` if
    transformers' forward cannot be followed."""
    tell("transformers in fp32")
    exact = torch.cat([*reference_logits(checkpoint, text, context)])
    for weights in TYPES:
        try:
            type_of(weights, checkpoint)
        except CheckpointError:
            continue
        tell(weights)
        found = _logits(checkpoint, text, weights, activations)
        size = weights_bytes(read_tensors(checkpoint.folder), weights)
        yield _line(weights, size, found, exact)


@torch.inference_mode()
def _logits(checkpoint: Checkpoint, text: Sequence[int], weights: str, activations: str) -> Tensor:
    model = load_language_model(
        checkpoint.source, weights=weights, device="cpu", proof="auto", activations=activations
    )
    tokens, count = torch.tensor(text), len(text)
    return model.forward(tokens, torch.arange(count), [Segment(model.new_cache(count), 0, count)])


def _line(weights: str, size: int, found: Tensor, exact: Tensor) -> Line:
    moved = norm = divergence = 0.0
    for ours, theirs in zip(found, exact, strict=True):
        a, b = (row.double() - row.double().mean() for row in (ours, theirs))
        moved, norm = moved + float((a - b).square().sum()), norm + float(b.square().sum())
        certain = b.log_softmax(0)
        divergence += float((certain.exp() * (certain - a.log_softmax(0))).sum())
    same = float((found.argmax(1) == exact.argmax(1)).double().mean())
    count = len(exact)
    return Line(weights, size, count, (moved / norm) ** 0.5, max(0.0, divergence / count), same)
