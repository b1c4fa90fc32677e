"""The sequences of features one by one, whole: what rows are drawn from."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dovetail.workers.training.data.features import Features


@dataclass(frozen=True)
class Sample:
    """A sequence: tokens [n], learn [n], g [n, H], taps [n, K * H] or None."""

    tokens: Tensor
    learn: Tensor
    g: Tensor
    taps: Tensor | None


def samples(features: Features) -> Iterator[Sample]:
    """The sequences in view, in the order in which they were given."""
    source, width = features.source, features.origin.width
    for start, stop in pairwise(source.offsets[features.first : features.last + 1].tolist()):
        states = source.read(start, stop)
        tokens, learn = (
            torch.tensor(source.tokens[start:stop].tolist()),
            torch.tensor(source.learn[start:stop].tolist()).bool(),
        )
        yield Sample(
            tokens, learn, states[:, :width], states[:, width:] if features.origin.taps else None
        )
