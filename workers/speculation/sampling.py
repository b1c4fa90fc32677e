"""From logits to a token: the processors of a session, and the choice.

N rows, V vocabulary. With Gumbel noise g the choice argmax(z + g) is an exact sample of softmax(z); without noise it is the greedy one. Knows neither
keys nor positions.
"""

import torch
from torch import Tensor

from dovetail.protocol.settings import Sampling

MASKED = float("-inf")
LARGEST_MARGIN = torch.finfo(torch.float32).max
"""Stands for the margin of the only possible token: infinity does not travel."""


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
        probabilities = z.softmax(-1)
        z = z.masked_fill(probabilities < sampling.min_p * probabilities.amax(-1, keepdim=True), MASKED)
    return z


def _nucleus(z: Tensor, top_p: float) -> Tensor:
    """bool [N, V]: the smallest set of likeliest tokens whose probability reaches top_p; never empty."""
    ordered, order = z.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1, dtype=torch.float64)
    before = probabilities.cumsum(-1) - probabilities
    kept = before < top_p
    kept[..., 0] = True
    return torch.zeros_like(kept).scatter_(-1, order, kept)


def choose(logits: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits, noise [N, V] -> the ids [N] of the largest sums, the lowest id on ties, and their distances [N] to the runner-up."""
    z = logits if noise is None else logits + noise
    ids = z.argmax(-1)
    if z.shape[-1] == 1:
        return ids, torch.full_like(z[..., 0], LARGEST_MARGIN)
    best = z.topk(2, dim=-1).values
    return ids, (best[..., 0] - best[..., 1]).clamp(max=LARGEST_MARGIN)
