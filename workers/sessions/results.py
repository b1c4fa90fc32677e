"""The results of a target's engine: features and scores of a prompt, how much of it is unread, the
first token, verdicts."""

from dataclasses import dataclass

from torch import Tensor

from dovetail.protocol.messages import Reads, TokenLogprobs, VerifiedItem


@dataclass(frozen=True)
class Part:
    """A part of a prompt has been read."""

    start: int
    features: Tensor
    """[n, row], of the positions start, start + 1, ... in the type that was asked for."""


@dataclass(frozen=True)
class ScoredPart:
    """Log-probabilities of tokens of a prompt."""

    start: int
    """Position of the first of them."""
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class Unread:
    """A chunk of a log has been read, and rows are left."""

    done: int
    """Rows of the log that have been read so far."""


@dataclass(frozen=True)
class First:
    """A prompt has been read, and its session is open: the first token of the reply."""

    token: int
    margin: float
    logprobs: TokenLogprobs | None
    """Log-probabilities of the token; None: not requested."""
    apart: bool = False
    """True if the model's reader read the prompt."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a pass for one session."""

    item: VerifiedItem
    reads: Reads | None
    features: Tensor | None = None
    """[held + 1 + accepted, row], of what had been held, the root and the accepted nodes; None: the
    session's draft reads none, or these are held."""
