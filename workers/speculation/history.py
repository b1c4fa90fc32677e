"""The history of a reply, for the processors that depend on it: logit bias, repetition, presence
and frequency penalty, and constraints, such as the minimum number of tokens.

This is their definition in plain numbers, one logit at a time, in this order: the bias is added;
the logit of a token in prompt or reply is divided by the repetition penalty, or multiplied if it is
negative (Keskar et al., CTRL, 2019; transformers' RepetitionPenaltyLogitsProcessor); presence + c *
frequency is subtracted for a token that occurs c > 0 times in the reply (OpenAI's definition);
tokens that a constraint or the grammar forbids, or that the model never chooses, are masked.
`sampling.py` has the version over tensors; a test compares the two.

A *path* is the continuation of the log before a choice: the tokens of a node's ancestors and its
own."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from dovetail.protocol.settings import Sampling

if TYPE_CHECKING:
    from dovetail.protocol.grammar import Allowed
    from dovetail.workers.speculation.constrained import Constrained


class Constraint(Protocol):
    """A mask of the tokens that may come next, on draft and target alike."""

    def applies(self, sampling: Sampling) -> bool:
        """Return whether it applies to requests with these settings."""

    def forbidden(self, history: "History", path: Sequence[int]) -> Collection[int]:
        """Return the ids that must not follow `path`; some must be left."""


class LeastTokens:
    """No token that ends the reply before `min_tokens` tokens."""

    def applies(self, sampling: Sampling) -> bool:
        return sampling.min_tokens > 0

    def forbidden(self, history: "History", path: Sequence[int]) -> Collection[int]:
        early = len(history.reply) + len(path) < history.sampling.min_tokens
        return history.end if early else ()


CONSTRAINTS: dict[str, Constraint] = {"min_tokens": LeastTokens()}
"""All constraints by their names."""


def looks_back(sampling: Sampling) -> bool:
    """Return whether a token's logit depends on the tokens before it, with these settings."""
    return sampling.looks_back or any(one.applies(sampling) for one in CONSTRAINTS.values())


class History:
    """Which tokens a session's log holds, and how often its reply does. Grows with the log; paths
    are not stored."""

    def __init__(
        self,
        sampling: Sampling,
        log: Sequence[int],
        end: Iterable[int],
        replied: int = 0,
        suppressed: Iterable[int] = (),
        constrained: "Constrained | None" = None,
    ) -> None:
        """`log` is a prompt, whose last `replied` tokens belong to the reply. `suppressed`: ids
        that the model never chooses. `constrained`: the grammar, at the beginning of the reply."""
        prompt = len(log) - replied
        self.sampling = sampling
        self.end, self._suppressed = frozenset(end), frozenset(suppressed)
        self.seen = set(log[:prompt])  # the tokens of prompt and reply
        self.counts: dict[int, int] = {}  # how often the reply has each token
        self.reply: list[int] = []
        self._bias = dict(sampling.logit_bias)
        self._constrained = constrained
        self._constraints = [one for one in CONSTRAINTS.values() if one.applies(sampling)]
        self.extend(log[prompt:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Note that the log has grown by `tokens` of the reply."""
        if self._constrained is not None:
            self._constrained.extend(tokens)
        self.reply += tokens
        self.seen.update(tokens)
        for token in tokens:
            self.counts[token] = self.counts.get(token, 0) + 1

    def penalty(self, token: int, path: Sequence[int] = ()) -> float:
        """Return the presence and frequency penalty on the logit of a token after `path`."""
        count = self.counts.get(token, 0) + path.count(token)
        return (
            self.sampling.presence_penalty + count * self.sampling.frequency_penalty
            if count
            else 0.0
        )

    def forbidden(self, path: Sequence[int] = ()) -> set[int]:
        """Return the tokens that the constraints mask after `path`."""
        return set().union(*(one.forbidden(self, path) for one in self._constraints))

    def allowed(self, path: Sequence[int] = ()) -> "Allowed | None":
        """Return which tokens [V] the grammar and the other constraints allow after `path`; where
        they contradict each other, the grammar's. None: there is no grammar."""
        if self._constrained is None:
            return None
        allowed = self._constrained.allowed(path)
        if masked := [token for token in self.forbidden(path) if token < len(allowed)]:
            less = allowed.copy()
            less[masked] = False
            allowed = less if less.any() else allowed
        return allowed

    def process(self, token: int, logit: float, path: Sequence[int] = ()) -> float:
        """Return the logit of one token after `path`, with all processors before temperature
        applied."""
        if token in self._suppressed:
            return -math.inf
        if (allowed := self.allowed(path)) is not None and not allowed[token]:
            return -math.inf
        if allowed is None and self._constraints and token in self.forbidden(path):
            return -math.inf
        logit += self._bias.get(token, 0.0)
        if token in self.seen or token in path:
            repetition = self.sampling.repetition_penalty
            logit = logit * repetition if logit < 0.0 else logit / repetition
        return logit - self.penalty(token, path)
