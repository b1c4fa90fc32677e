"""The history of a reply for the processors that depend on it: logit bias, repetition, presence and
frequency penalty, least number of tokens.

This is their definition in plain numbers, one logit at a time, in this order: the bias is added; a
token of prompt or reply has its logit divided by the repetition penalty, or multiplied if it is
negative (Keskar et al., CTRL, 2019; transformers' RepetitionPenaltyLogitsProcessor); of a token
that the reply holds c > 0 times, presence + c * frequency is taken off (OpenAI's definition);
before the least number of tokens an id that ends the reply cannot be chosen. The version over
tensors is in `sampling.py`; a test holds the two together.

A *path* is what would be said after the log before the choice in question: the tokens of a node's
ancestors and its own. Knows no tensors and no trees.
"""

import math
from collections.abc import Iterable, Sequence

from dovetail.protocol.settings import Sampling


class History:
    """Which tokens a session's log holds, and how often its reply does. Grows with the log; a path
    is only looked at."""

    def __init__(
        self, sampling: Sampling, log: Sequence[int], end: Iterable[int], replied: int = 0
    ) -> None:
        """`log` is a prompt, its last `replied` tokens those of the reply."""
        prompt = len(log) - replied
        self.sampling = sampling
        self.end = frozenset(end)
        self.seen = set(log[:prompt])
        """The tokens of prompt and reply."""
        self.counts: dict[int, int] = {}
        """The number of times that the reply has each token."""
        self.said = 0
        """Tokens of the reply."""
        self._bias = dict(sampling.logit_bias)
        self.extend(log[prompt:])

    def extend(self, tokens: Sequence[int]) -> None:
        """The log has grown by `tokens`, all of the reply."""
        self.said += len(tokens)
        self.seen.update(tokens)
        for token in tokens:
            self.counts[token] = self.counts.get(token, 0) + 1

    def penalty(self, token: int, path: Sequence[int] = ()) -> float:
        """Return what presence and frequency take off the logit of a token behind `path`."""
        count = self.counts.get(token, 0) + path.count(token)
        return (
            self.sampling.presence_penalty + count * self.sampling.frequency_penalty
            if count
            else 0.0
        )

    def too_early(self, path: Sequence[int] = ()) -> bool:
        """Return whether the reply must not end behind `path`."""
        return self.said + len(path) < self.sampling.min_tokens

    def process(self, token: int, logit: float, path: Sequence[int] = ()) -> float:
        """The logit of one token behind `path` as the processors before temperature leave it."""
        if token in self.end and self.too_early(path):
            return -math.inf
        logit += self._bias.get(token, 0.0)
        if token in self.seen or token in path:
            repetition = self.sampling.repetition_penalty
            logit = logit * repetition if logit < 0.0 else logit / repetition
        return logit - self.penalty(token, path)
