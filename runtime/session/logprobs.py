"""Checks a target's log-probabilities, and tracks which of them the client has."""

from collections.abc import Sequence

from dovetail.protocol.errors import ProtocolError, StaleError
from dovetail.protocol.messages import Scored, TokenLogprobs
from dovetail.runtime.session.request import Request


def check_logprobs(logprobs: Sequence[TokenLogprobs], tokens: int, request: Request) -> None:
    """Raise `ProtocolError` unless there are as many log-probabilities as requested."""
    expected = 0 if request.logprobs is None else tokens
    if len(logprobs) != expected or not _fit(logprobs, request):
        raise ProtocolError(
            f"{len(logprobs)} log-probabilities of {tokens} tokens, "
            f"requested with {request.logprobs} alternatives of each"
        )


def _fit(logprobs: Sequence[TokenLogprobs], request: Request) -> bool:
    """Return whether each has the requested number of alternatives, all of them valid tokens."""
    size = request.vocabulary_size
    most = min(request.logprobs or 0, size)
    return all(
        len(said.top) == most and all(token < size for token, _ in said.top) for said in logprobs
    )


class PromptScores:
    """Tracks the scores of a prompt's tokens, some of which another target may send again."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._next = 1  # position of the next token whose score the target sends
        self.told = 1  # position of the first token whose score was not sent to the client

    def restart(self) -> None:
        """Expect the scores from the beginning: another target prefills the prompt."""
        self._next = 1

    def take(
        self, event: Scored, request: Request, *, expected: bool
    ) -> tuple[int, tuple[TokenLogprobs, ...]] | None:
        """Return the position and the scores that were not sent to the client yet, or None. Raises
        `ProtocolError` unless the scores are `expected` and fit."""
        stop = event.start + len(event.logprobs)
        if event.start < self._next:
            raise StaleError(
                f"session {self._session} was not waiting for scores of position {event.start}"
            )
        if (
            not expected
            or event.start != self._next
            or not event.start < stop <= len(request.prompt)
            or not _fit(event.logprobs, request)
        ):
            raise ProtocolError(
                f"log-probabilities of positions {event.start} to {stop - 1} were not requested"
            )
        self._next = stop
        if stop <= self.told:
            return None
        start, self.told = max(event.start, self.told), stop
        return start, event.logprobs[start - event.start :]

    def check_whole(self, request: Request) -> None:
        """Raise `ProtocolError` unless all tokens of the prompt have been scored."""
        if self._next != len(request.prompt):
            raise ProtocolError(
                f"log-probabilities of {self._next - 1} tokens of a prompt of {len(request.prompt)}"
            )
