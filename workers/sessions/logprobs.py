"""Log-probabilities of tokens under a target's own distribution: log softmax of the model's logits,
before any processor and without noise.

Every row is computed separately, in float32, to 1e-5: the values of a token depend neither on the
other rows of its pass nor on the number of threads. V vocabulary."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import TokenLogprobs
from dovetail.protocol.settings import Sampling
from dovetail.workers.kernels.ranking import Ids, Values, likeliest, ranks


def token_logprobs(
    rows: Sequence[Tensor] | Tensor, tokens: Sequence[int], top: int
) -> tuple[TokenLogprobs, ...]:
    """Return the log-probability of each row's token from its logits [V], and those of the `top`
    likeliest tokens; of equals, the lowest id comes first."""
    return tuple(_of_row(row.cpu(), token, top) for row, token in zip(rows, tokens, strict=True))


def _of_row(row: Tensor, token: int, top: int) -> TokenLogprobs:
    ids, values = _likeliest(row, max(1, top))
    logits = row.numpy()
    logprob = float(logits[token] - logits[ids[0]] + values[0])
    if logprob != logprob:
        raise RequestError(
            "internal",
            "the target computed NaN logits; its weights or its device are damaged",
        )
    best = zip(ids[:top].tolist(), values[:top].tolist(), strict=True)
    return TokenLogprobs(logprob=logprob, top=tuple(best))


def _likeliest(row: Tensor, count: int) -> tuple[Ids, Values]:
    """Return the ids of the largest logits, best first, and their log-probabilities [count]."""
    if ranks(row.device):
        ids, values = likeliest(row.unsqueeze(0), count, sampling=Sampling(temperature=1.0))
        return ids[0], values[0]
    ordered, order = row.sort(descending=True, stable=True)
    z = (ordered - ordered[0]).double()
    best = (z[:count] - z.exp().sum().log()).float()
    return order[:count].numpy().astype(np.int32), best.numpy()
