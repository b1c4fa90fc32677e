"""The delivery of a session's reply to its client and to the journal. Pure."""

from dataclasses import dataclass

from dovetail.protocol.messages import NOTHING_TOLD, Told
from dovetail.runtime.session.actions import Emit


@dataclass
class Delivery:
    """The delivery of one reply."""

    ticket: str = ""
    """The name of the reply in the journal; empty: it is not there."""
    ahead: Told = NOTHING_TOLD
    """Tokens that are yet to be committed, and that the client has already."""
    noted: int = 0
    """The undelivered actions that are in the journal."""
    fingerprint: str = ""
    """The fingerprint sent to the client with the last tokens."""
    finished: bool = False
    """True if its end was sent to the client."""

    def left_of(self, emit: Emit) -> Emit | None:
        """Return the part of newly committed tokens that the client does not have; None: it has
        all."""
        if self.ahead is NOTHING_TOLD:
            return emit
        tokens = min(self.ahead.tokens, len(emit.tokens))
        characters = min(self.ahead.characters, len(emit.text))
        left = Told(
            tokens=self.ahead.tokens - tokens, characters=self.ahead.characters - characters
        )
        self.ahead = left if left.tokens or left.characters else NOTHING_TOLD
        if tokens == len(emit.tokens) and characters == len(emit.text):
            return None
        return Emit(
            emit.tokens[tokens:],
            max(0, emit.drafted - tokens),
            emit.text[characters:].__str__,
            emit.logprobs[tokens:],
        )
