"""Names of blocks of a cached prompt. A block's name is the hash of its tokens and of the name of
the block before it, so that equal names stand for equal prefixes, and names of a prompt can be
looked up without its tokens. The root is the hash of what the rows depend on besides tokens, and of
the scope of the requests that may reuse them."""

from collections.abc import Sequence
from hashlib import blake2b

BLOCK_TOKENS = 64
"""Tokens of a block: a multiple of the 16 slots that the kernels interleave."""
NAME_BYTES = 32
TOKEN_BYTES = 4


def digest_of(*parts: str | bytes) -> bytes:
    """Return the hash of these parts, which differs if they are divided differently."""
    digest = blake2b(digest_size=NAME_BYTES)
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


def name_after(parent: bytes, tokens: bytes) -> bytes:
    """Return the name of the block with these packed tokens behind the block `parent`."""
    return blake2b(parent + tokens, digest_size=NAME_BYTES).digest()


def root_of(seed: bytes, scope: bytes, log: bytes, known: int) -> bytes:
    """Return the root of the names of a packed log. `seed`: of the worker; `known`: how many tokens
    after a row it depends on, by which blocks of tokens are ahead of blocks of rows."""
    return digest_of(seed, scope, log[: known * TOKEN_BYTES])


def names_of(
    seed: bytes, scope: bytes, log: bytes, known: int, most: int | None = None
) -> Sequence[bytes]:
    """Return the names of the whole blocks of a packed log, at most `most`."""
    names = [root_of(seed, scope, log, known)]
    for tokens in blocks_of(log, known)[:most]:
        names.append(name_after(names[-1], tokens))
    return names[1:]


def blocks_of(log: bytes, known: int) -> Sequence[bytes]:
    """Return the tokens of the whole blocks of a packed log."""
    first, size = known * TOKEN_BYTES, BLOCK_TOKENS * TOKEN_BYTES
    return [log[start : start + size] for start in range(first, len(log) - size + 1, size)]
