"""How far each type of weights moves the logits of a text from transformers' in fp32. Types are
loaded in turn, one in memory at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.checkpoint import Checkpoint
from dovetail.workers.models.checkpoints.footprint import read_tensors, weights_bytes
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.parity.reference import reference_logits
from dovetail.workers.models.segment import Segment
from dovetail.workers.models.wanted import type_of

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
