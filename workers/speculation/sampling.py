"""From logits to a token: the processors of a session, and the choice.

N rows, V vocabulary. With Gumbel noise g the choice argmax(z + g) is an exact sample of softmax(z); without noise it is the greedy one. Knows neither
keys nor positions.
"""

import math

import torch
from torch import Tensor

from dovetail.protocol.settings import Sampling

MASKED = float("-inf")
LARGEST_MARGIN = torch.finfo(torch.float32).max
"""Stands for the margin of the only possible token: infinity does not travel."""
NUCLEUS_SIZES = (256, 8192)
"""Among so many of the likeliest tokens a nucleus is looked for before the whole vocabulary is."""


def process_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """[N, V] float32 -> [N, V]: temperature, top-k, top-p, min-p in this order, masked entries -inf; unchanged at temperature 0.

    Ties at the edge of top-k and min-p all stay; in top-p the lowest ids come first.
    """
    if sampling.temperature == 0.0:
        return logits
    # the largest logit becomes 0 first: the law is the same, and no tiny temperature can overflow
    z = (logits - logits.amax(-1, keepdim=True)) / max(sampling.temperature, torch.finfo(torch.float32).tiny)
    if 0 < sampling.top_k < z.shape[-1]:
        z = z.masked_fill(z < z.topk(sampling.top_k).values[..., -1:], MASKED)
    if sampling.top_p < 1.0:
        z = z.masked_fill(~_nucleus(z, sampling.top_p), MASKED)
    if sampling.min_p > 0.0:
        z = z.masked_fill(z < math.log(sampling.min_p), MASKED)
    return z


def _nucleus(z: Tensor, top_p: float) -> Tensor:
    """bool [N, V]: the smallest set of likeliest tokens of z (largest 0) whose probability reaches top_p; of equals the lowest ids, never empty.

    Sorting a vocabulary takes longer than a small draft's pass, so the likeliest tokens are tried first; they are nearly always enough.
    """
    size = z.shape[-1]
    total = z.double().logsumexp(-1, keepdim=True)
    values, before = z, z
    for most in (*(s for s in NUCLEUS_SIZES if s < size), size):
        values = z.topk(most).values
        probabilities = (values.double() - total).exp()
        upto = probabilities.cumsum(-1)
        before = upto - probabilities
        if bool((upto[..., -1] >= top_p).all()):
            break
    kept = (before < top_p).sum(-1, keepdim=True).clamp(min=1)
    least = values.gather(-1, kept - 1)
    above, equal = z > least, z == least
    return above | (equal & (equal.cumsum(-1) <= kept - above.sum(-1, keepdim=True)))


def choose(logits: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits, noise [N, V] -> the ids [N] of the largest sums, the lowest id on ties, and their distances [N] to the runner-up."""
    z = logits if noise is None else logits + noise
    ids = z.argmax(-1)
    if z.shape[-1] == 1:
        return ids, torch.full_like(z[..., 0], LARGEST_MARGIN)
    best = z.topk(2, dim=-1).values
    return ids, (best[..., 0] - best[..., 1]).clamp(max=LARGEST_MARGIN)
