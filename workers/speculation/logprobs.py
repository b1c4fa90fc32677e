"""Log-probabilities of tokens by a target's own distribution: log softmax of its logits as the
model gives them, before any processor and without noise.

Every row is computed by itself, in float64, and rounded to float32 in the end: the numbers of a
token depend neither on the rows of its pass nor on the threads. N rows, V vocabulary.
"""

from collections.abc import Sequence

from torch import Tensor

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import TokenLogprobs


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    """Return what each row of logits [N, V] says of its token, and of the `top` likeliest ones."""
    return tuple(_of_row(row, token, top) for row, token in zip(logits.cpu(), tokens, strict=True))


def _of_row(row: Tensor, token: int, top: int) -> TokenLogprobs:
    distribution = row.double().log_softmax(-1)
    ids = [token, *_likeliest(row, top)]
    logprob, *others = distribution[ids].float().tolist()
    if logprob != logprob:
        raise RequestError(
            "internal",
            "the target computed logits that are not numbers; its weights or its device are "
            "damaged",
        )
    return TokenLogprobs(logprob=logprob, top=tuple(zip(ids[1:], others, strict=True)))


def _likeliest(row: Tensor, count: int) -> list[int]:
    """The ids of the largest of logits [V], best first, of equals the lowest; topk leaves the order
    of equals open."""
    if not count:
        return []
    least = row.topk(min(count, len(row))).values[-1]
    ids = (row >= least).nonzero().squeeze(1)
    likeliest: list[int] = ids[row[ids].argsort(descending=True, stable=True)][:count].tolist()
    return likeliest
