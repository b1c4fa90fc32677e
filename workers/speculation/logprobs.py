"""Log-probabilities of tokens by a target's own distribution: log softmax of its logits as the
model gives them, before any processor and without noise.

Every row is computed by itself, in float64, and rounded to float32 in the end: the numbers of a
token depend neither on the rows of its pass nor on the threads. N rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import TokenLogprobs

BLOCK = 64
"""Logits of which the largest is found first."""
PART = 16384
"""Logits that become float64 at a time, which stay in the cache."""


def token_logprobs(
    rows: Sequence[Tensor] | Tensor, tokens: Sequence[int], top: int
) -> tuple[TokenLogprobs, ...]:
    """Return what each row [V] of logits says of its token, and of the `top` likeliest ones."""
    return tuple(_of_row(row.cpu(), token, top) for row, token in zip(rows, tokens, strict=True))


def _of_row(row: Tensor, token: int, top: int) -> TokenLogprobs:
    # in numpy, since torch's threads keep cores busy for a while after what they have divided
    logits = row.numpy()
    ids = [token, *_likeliest(logits, top)]
    largest = logits.max().astype(np.float64)
    with np.errstate(invalid="ignore"):
        total = sum(
            np.exp(logits[first : first + PART].astype(np.float64) - largest).sum()
            for first in range(0, len(logits), PART)
        )
        logprobs = logits[ids].astype(np.float64) - largest - np.log(total)
    logprob, *others = logprobs.astype(np.float32).tolist()
    if logprob != logprob:
        raise RequestError(
            "internal",
            "the target computed logits that are not numbers; its weights or its device are "
            "damaged",
        )
    return TokenLogprobs(logprob=logprob, top=tuple(zip(ids[1:], others, strict=True)))


def _likeliest(row: NDArray[np.float32], count: int) -> list[int]:
    """The ids of the largest of logits [V], best first, of equals the lowest: they are among those
    that reach the last of the `count` largest of blocks."""
    if not count:
        return []
    blocks = np.maximum.reduceat(row, np.arange(0, len(row), BLOCK))
    least = np.partition(blocks, -count)[-count] if count < len(blocks) else -np.inf
    ids = np.flatnonzero(row >= least)
    likeliest: list[int] = ids[np.argsort(-row[ids], kind="stable")][:count].tolist()
    return likeliest
