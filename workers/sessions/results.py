"""The answers of a target's engine: parts of a prompt, what of it is unread, the first token,
verdicts."""

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
    """Rows of a log have been read, and there are more."""

    done: int
    """Rows that have been read."""


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
