"""Orders for sessions, as verifiers and drafters take them."""

from collections.abc import Sequence
from typing import Any

from dovetail.protocol.messages import Open


def opening(session: int, prompt: Sequence[int], **fields: Any) -> Open:
    """Return an order for a session, not checked as a message is; what is left out does not matter
    to the one who is asked."""
    left_out = {"epoch": 0, "key": bytes(16), "vocabulary_size": 1 << 24}
    return Open.model_construct(**{**left_out, **fields}, session=session, prompt=tuple(prompt))
