"""From logits to a token: the processors of a session, and the choice.

First the processors that look back (`LookingBack`), then temperature and truncation
(`process_logits`), then the choice: with Gumbel noise g, argmax(z + g) is an exact sample of
softmax(z); without noise it is the greedy one. N rows, V vocabulary. Independent of keys and
positions."""

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from dovetail.protocol.grammar import Allowed
from dovetail.protocol.settings import Sampling
from dovetail.workers.devices.opening import in_fp64
from dovetail.workers.speculation.constrained import Constrained
from dovetail.workers.speculation.history import History

MASKED = float("-inf")
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BOUNDS = np.where(BITS, np.float32(np.inf), np.float32(MASKED))
"""The upper bounds of 8 logits for each byte of a mask."""
LARGEST_MARGIN = torch.finfo(torch.float32).max
"""Stands for the margin of the only possible token: infinity cannot be sent."""
SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny
NUCLEUS_SIZES = (256, 8192)
"""A nucleus is searched among this many of the likeliest tokens before the whole vocabulary is
sorted."""


class LookingBack:
    """The processors of `history.py` over tensors. Penalties of the log's tokens are precomputed,
    one number per distinct token, so only these logits change. Tokens on a row's path are corrected
    in that row alone, by the same operations: a logit has the same bytes whether a token is
    committed or only drafted."""

    def __init__(
        self,
        sampling: Sampling,
        log: Sequence[int],
        end: Sequence[int],
        size: int,
        device: torch.device | None = None,
        *,
        replied: int = 0,
        suppressed: Sequence[int] = (),
        constrained: Constrained | None = None,
    ) -> None:
        """`log` is a prompt, whose last `replied` tokens belong to the reply. `size` is V: biased,
        ending and suppressed ids at and beyond it are ignored. `constrained`: the grammar, at the
        beginning of the reply."""
        self._history = History(sampling, log, end, replied, suppressed, constrained)
        self.constrained = constrained is not None
        known_ids = [token for token in suppressed if 0 <= token < size]
        self._suppressed = torch.tensor(known_ids, dtype=torch.long, device=device)
        self._repetition = sampling.repetition_penalty
        biases = [(token, bias) for token, bias in sampling.logit_bias if token < size]
        self._biased = torch.tensor([token for token, _ in biases], dtype=torch.long, device=device)
        self._biases = torch.tensor([bias for _, bias in biases], device=device)
        self._size = size
        self._slots: dict[int, int] = {}
        """Token -> the place of its id and penalty in the two tensors."""
        self._tokens = torch.empty(size, dtype=torch.long, device=device)
        self._penalties = torch.empty(size, device=device)
        if known := self._history.seen if self._repetition != 1.0 else self._history.counts:
            self._note(known)

    def extend(self, tokens: Sequence[int]) -> None:
        """Note that the log has grown by `tokens` of the reply."""
        self._history.extend(tokens)
        self._note(tokens)

    def process(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Process logits [N, V] float32 of rows that follow `paths` after the log; masked entries
        are -inf."""
        z = self._copied(logits)
        if len(self._biased):
            z.index_add_(1, self._biased, self._biases.expand(len(z), -1))
        ahead = [(row, token) for row, path in enumerate(paths) for token in set(path)]
        if ahead:
            where = tuple(torch.tensor(ahead, device=z.device).unbind(1))
            unpenalised = z[where]
        if count := len(self._slots):
            z.index_copy_(
                1,
                self._tokens[:count],
                self._penalised(z.index_select(1, self._tokens[:count]), self._penalties[:count]),
            )
        if ahead:
            penalties = torch.tensor(
                [self._history.penalty(token, paths[row]) for row, token in ahead], device=z.device
            )
            z[where] = self._penalised(unpenalised, penalties)
        masked = list[tuple[int, int]]()
        for row, path in enumerate(paths):
            if (allowed := self._history.allowed(path)) is None:
                ids = (token for token in self._history.forbidden(path) if token < self._size)
                masked += ((row, token) for token in ids)
            else:
                _mask(z[row], allowed[: self._size])
        if masked:
            z[tuple(torch.tensor(masked, device=z.device).unbind(1))] = MASKED
        return z.index_fill_(1, self._suppressed, MASKED) if len(self._suppressed) else z

    def _copied(self, logits: Tensor) -> Tensor:
        if logits.device.type != "cpu":
            return logits.clone()
        # torch would copy with several threads, which keep cores busy for a while afterwards
        return torch.from_numpy(logits.numpy().copy())

    def _note(self, tokens: Collection[int]) -> None:
        """Update the penalties of these tokens from the history."""
        slots = [self._slots.setdefault(token, len(self._slots)) for token in tokens]
        self._tokens[slots] = torch.tensor(list(tokens), device=self._tokens.device)
        self._penalties[slots] = torch.tensor(
            [self._history.penalty(token) for token in tokens], device=self._tokens.device
        )

    def _penalised(self, z: Tensor, penalties: Tensor) -> Tensor:
        return torch.where(z < 0, z * self._repetition, z / self._repetition) - penalties


def _mask(row: Tensor, allowed: Allowed) -> None:
    """Set the logits [V] of tokens that are not allowed to -inf."""
    if row.device.type != "cpu":
        row.masked_fill_(torch.from_numpy(~allowed).to(row.device), MASKED)
        return
    most = BOUNDS.take(np.packbits(allowed, bitorder="little"), axis=0).reshape(-1)[: len(row)]
    np.minimum(row.numpy(), most, out=row.numpy())  # a fifth of masked_fill_'s time


def process_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Apply temperature, top-k, top-p, min-p in this order to logits [N, V] float32; masked entries
    are -inf. Unchanged at temperature 0. Ties at the edge of top-k and min-p all stay; in top-p the
    lowest ids come first."""
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


def tempered(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Return logits [N, V] at a temperature above 0, of all rows or [N, 1], shifted so that the
    largest of a row is 0: no tiny temperature can overflow."""
    if isinstance(temperature, Tensor):
        heat: float | Tensor = temperature.clamp(min=SMALLEST_TEMPERATURE)
    else:
        heat = max(temperature, SMALLEST_TEMPERATURE)
    return (logits - logits.amax(-1, keepdim=True)) / heat


def _nucleus(z: Tensor, top_p: float) -> Tensor:
    """Return bool [N, V]: the smallest set of likeliest tokens of z (largest 0) whose probability
    reaches top_p; of equals the lowest ids, never empty. Sorting a vocabulary takes longer than a
    small draft's pass, so the likeliest tokens are tried first, which are nearly always enough."""
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
    """Return the ids [N] of the largest sums of logits and noise [N, V], the lowest id on ties, and
    their distances [N] to the runner-up."""
    z = logits if noise is None else logits + noise
    ids = z.argmax(-1)
    if z.shape[-1] == 1:
        return ids, torch.full_like(z[..., 0], LARGEST_MARGIN)
    best = z.topk(2, dim=-1).values
    return ids, (best[..., 0] - best[..., 1]).clamp(max=LARGEST_MARGIN)
