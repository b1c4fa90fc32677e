"""Ended sessions: the cache that a worker keeps of each, and its reuse by another session."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

TOKEN_BYTES = 4


@dataclass(frozen=True)
class Base:
    """The session whose cache another one reuses, and the number of reused tokens."""

    session: int
    tokens: int
    shared: bool = False
    """True if the base stays unchanged, running or kept; False if it was kept and is taken over."""


@dataclass(frozen=True)
class Kept:
    """A session, ended or running: its packed log, and the worker's rows of it."""

    session: int
    log: bytes
    rows: int
    tokens: int
    """Tokens that the worker may have in its log, including some beyond the end of the reply."""
    owner: str = ""
    """The owner of the request: no other owner may reuse it, or find out how much of a prompt was
    sent before."""


def pack(tokens: Sequence[int]) -> bytes:
    """Return token ids as the prefix cache compares them."""
    return struct.pack(f"<{len(tokens)}I", *tokens)
