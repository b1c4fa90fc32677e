"""From logits to a token: the processors of a session, and the choice.

First those that look back (`LookingBack`), then temperature and truncation (`process_logits`), then
the choice: with Gumbel noise g, argmax(z + g) is an exact sample of softmax(z); without noise it is
the greedy one. N rows, V vocabulary. Knows neither keys nor positions.
"""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from dovetail.protocol.settings import Sampling
from dovetail.workers.devices.opening import in_fp64
from dovetail.workers.speculation.history import History

MASKED = float("-inf")
LARGEST_MARGIN = torch.finfo(torch.float32).max
"""Stands for the margin of the only possible token: infinity does not travel."""
SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny
NUCLEUS_SIZES = (256, 8192)
"""A nucleus is searched for among this many of the likeliest tokens before the whole vocabulary is
sorted."""


class LookingBack:
    """The processors of `history.py` over tensors. What the log holds stands ready, a number for
    each different token, so that only these logits are touched; what is on a row's path is put
    right in that row alone, by the same operations: a token has the same bytes committed or only
    drafted.
    """

    def __init__(
        self,
        sampling: Sampling,
        log: Sequence[int],
        end: Sequence[int],
        size: int,
        device: torch.device | None = None,
        *,
        replied: int = 0,
    ) -> None:
        """`log` is a prompt, its last `replied` tokens those of the reply. `size` is V: biased and
        ending ids at and beyond it are of no concern here."""
        self._history = History(sampling, log, end, replied)
        self._repetition = sampling.repetition_penalty
        biases = [(token, bias) for token, bias in sampling.logit_bias if token < size]
        self._biased = torch.tensor([token for token, _ in biases], dtype=torch.long, device=device)
        self._biases = torch.tensor([bias for _, bias in biases], device=device)
        self._end = torch.tensor(
            [token for token in end if token < size], dtype=torch.long, device=device
        )
        self._slots: dict[int, int] = {}
        """Token -> where its id and its penalty stand in the two tensors."""
        self._tokens = torch.empty(size, dtype=torch.long, device=device)
        self._penalties = torch.empty(size, device=device)
        if known := self._history.seen if self._repetition != 1.0 else self._history.counts:
            self._note(known)

    def extend(self, tokens: Sequence[int]) -> None:
        """The log has grown by `tokens`, all of the reply."""
        self._history.extend(tokens)
        self._note(tokens)

    def process(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """[N, V] float32 -> [N, V], of rows that follow `paths` behind the log; masked entries
        -inf."""
        z = self._copied(logits)
        if len(self._biased):
            z.index_add_(1, self._biased, self._biases.expand(len(z), -1))
        ahead = [(row, token) for row, path in enumerate(paths) for token in set(path)]
        if ahead:
            where = tuple(torch.tensor(ahead, device=z.device).unbind(1))
            unpenalised = z[where]
        if said := len(self._slots):
            z.index_copy_(
                1,
                self._tokens[:said],
                self._penalised(z.index_select(1, self._tokens[:said]), self._penalties[:said]),
            )
        if ahead:
            penalties = torch.tensor(
                [self._history.penalty(token, paths[row]) for row, token in ahead], device=z.device
            )
            z[where] = self._penalised(unpenalised, penalties)
        if early := [row for row, path in enumerate(paths) if self._history.too_early(path)]:
            z[torch.tensor(early, device=z.device).unsqueeze(1), self._end] = MASKED
        return z

    def _copied(self, logits: Tensor) -> Tensor:
        if logits.device.type != "cpu":
            return logits.clone()
        # torch would divide a copy among threads, which then keep cores busy for a while
        return torch.from_numpy(logits.numpy().copy())

    def _note(self, tokens: Collection[int]) -> None:
        """Apply the penalties of the history to tokens of the log."""
        slots = [self._slots.setdefault(token, len(self._slots)) for token in tokens]
        self._tokens[slots] = torch.tensor(list(tokens), device=self._tokens.device)
        self._penalties[slots] = torch.tensor(
            [self._history.penalty(token) for token in tokens], device=self._tokens.device
        )

    def _penalised(self, z: Tensor, penalties: Tensor) -> Tensor:
        return torch.where(z < 0, z * self._repetition, z / self._repetition) - penalties


def process_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """[N, V] float32 -> [N, V]: temperature, top-k, top-p, min-p in this order, masked entries
    -inf; unchanged at temperature 0.

    Ties at the edge of top-k and min-p all stay; in top-p the lowest ids come first.
    """
    if sampling.temperature == 0.0:
        return logits
    z = tempered(logits, sampling.temperature)
    if 0 < sampling.top_k < z.shape[-1]:
        z = z.masked_fill(z < z.topk(sampling.top_k).values[..., -1:], MASKED)
    if sampling.top_p < 1.0:
        z = z.masked_fill(~_nucleus(z, sampling.top_p), MASKED)
    if sampling.min_p > 0.0:
        z = z.masked_fill(z < math.log(sampling.min_p), MASKED)
    return z


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """logits [N, V] at a temperature above 0, the largest of a row at 0: the distribution is the
    same, and no tiny temperature can overflow."""
    return (logits - logits.amax(-1, keepdim=True)) / max(temperature, SMALLEST_TEMPERATURE)


def _nucleus(z: Tensor, top_p: float) -> Tensor:
    """bool [N, V]: the smallest set of likeliest tokens of z (largest 0) whose probability reaches
    top_p; of equals the lowest ids, never empty.

    Sorting a vocabulary takes longer than a small draft's pass, so the likeliest tokens are tried
    first; they are nearly always enough.
    """
    size = z.shape[-1]
    exact = in_fp64(z)
    total = exact.logsumexp(-1, keepdim=True)
    values, before = z, exact
    for most in (*(s for s in NUCLEUS_SIZES if s < size), size):
        values = z.topk(most).values
        probabilities = (in_fp64(values) - total).exp()
        upto = probabilities.cumsum(-1)
        before = upto - probabilities
        if bool((upto[..., -1] >= top_p).all()):
            break
    kept = (before < top_p).sum(-1, keepdim=True).clamp(min=1).to(z.device)
    least = values.gather(-1, kept - 1)
    above, equal = z > least, z == least
    return above | (equal & (equal.cumsum(-1) <= kept - above.sum(-1, keepdim=True)))


def choose(logits: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits, noise [N, V] -> the ids [N] of the largest sums, the lowest id on ties, and their
    distances [N] to the runner-up."""
    z = logits if noise is None else logits + noise
    ids = z.argmax(-1)
    if z.shape[-1] == 1:
        return ids, torch.full_like(z[..., 0], LARGEST_MARGIN)
    best = z.topk(2, dim=-1).values
    return ids, (best[..., 0] - best[..., 1]).clamp(max=LARGEST_MARGIN)
