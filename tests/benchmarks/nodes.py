"""The share of nodes of which a child is accepted, under each rule: over the same contexts, with
the code that decodes.

`target`, `draft`: processed logits [N, V] of N contexts. Each function returns [N]: 0 or 1, or the
probability where it can be had.
"""

import numpy as np
import torch
from torch import Tensor

from dovetail.protocol.tree import ROOT
from dovetail.workers.speculation.noise import gumbel_noise
from dovetail.workers.speculation.rejection import Draws, Remaining
from dovetail.workers.speculation.sampling import choose


def coupled(target: Tensor, draft: Tensor, children: int, key: bytes, share: float = 1.0) -> Tensor:
    """Return 1 where the target's choice is among the draft's best, else 0, both with the noise of
    the context's number as its position; the draft adds a share of it."""
    noise = torch.stack(
        [gumbel_noise(key, position, target.shape[1]) for position in range(len(target))]
    )
    named = (draft + share * noise[:, : draft.shape[1]]).topk(children, dim=-1).indices
    return (named == choose(target, noise)[0].unsqueeze(1)).any(-1).double()


def matched(target: Tensor, draft: Tensor, children: int) -> Tensor:
    """The target's probability of the draft's likeliest tokens: EAGLE's rule at temperature 1."""
    return target.double().softmax(-1).gather(1, draft.topk(children, dim=-1).indices).sum(-1)


def rejected(target: Tensor, draft: Tensor, children: int, key: bytes) -> Tensor:
    """The probability that one of the children drawn from the draft's distribution passes its
    test."""
    draws = Draws(key)
    accepted = []
    for context, (p, q) in enumerate(zip(target.double().softmax(-1).numpy(), draft, strict=True)):
        draws.begin(context)
        tokens, gains = draws.children(np.array([ROOT]), q.unsqueeze(0), children)
        remaining, refused = (
            Remaining(p, *draws.distributions(np.zeros(0, np.intp)).distribution(ROOT)),
            1.0,
        )
        for token in tokens[0][np.isfinite(gains[0])].tolist():
            refused *= 1.0 - min(1.0, remaining.chance(token))
            remaining.refuse(token)
        accepted.append(1.0 - refused)
    return torch.tensor(accepted, dtype=torch.float64)
