"""The results of a target's engine: features and scores of a prompt, prefill progress, the first
token, verdicts."""

from dataclasses import dataclass

from torch import Tensor

from dovetail.protocol.messages import Reads, TokenLogprobs, VerifiedItem
from dovetail.workers.sessions.blocks import Source


@dataclass(frozen=True)
class Part:
    """Features of a prefilled part of a prompt."""

    start: int
    features: Tensor  # [n, row], of the positions start, start + 1, ... in the requested type


@dataclass(frozen=True)
class ScoredPart:
    """Log-probabilities of tokens of a prompt."""

    start: int  # position of the first of them
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class Unread:
    """A chunk of a log has been prefilled, and rows are left."""

    done: int  # rows of the log prefilled so far


@dataclass(frozen=True)
class First:
    """A prompt has been prefilled, and its session is open: the first token of the reply."""

    token: int
    margin: float
    logprobs: TokenLogprobs | None  # log-probabilities of the token; None: not requested
    apart: bool = False  # True if the prefill device read the prompt
    restored: Source = ""  # where its first rows came from, if from stored blocks


@dataclass(frozen=True)
class Verdict:
    """The outcome of a pass for one session."""

    item: VerifiedItem
    reads: Reads | None
    features: Tensor | None = None
    """[held + 1 + accepted, row], of the held rows, the root and the accepted nodes; None: the
    session's draft reads none, or they are held."""
