"""The names of the blocks of cached prompts that a worker stores, and how much of a prompt they
cover. Pure."""

from dataclasses import dataclass, field

from dovetail.protocol.prefixes import BLOCK_TOKENS, NAME_BYTES, TOKEN_BYTES, names_of
from dovetail.runtime.session.request import Base

INDEXED_BYTES = 128  # memory of a name, with its place in a set


@dataclass
class BlockIndex:
    """The stored blocks of one worker."""

    seed: bytes = b""  # from which their names begin; empty: it stores none
    known: int = 0  # how many tokens after a row the row depends on
    snapshots: bool = False  # whether blocks before a stored one need no names here
    damaged: int = 0  # files that were damaged and have been deleted
    _names: set[bytes] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._names)

    def note(self, names: bytes, *, stored: bool) -> None:
        """Note that blocks of these joined names were stored, or that they are gone."""
        every = [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]
        (self._names.update if stored else self._names.difference_update)(every)

    def find(self, scope: bytes, log: bytes, other: Base | None = None) -> Base | None:
        """Return the stored rows that a packed log begins with, if they are more than those of
        `other`, else `other`. The last token is always computed."""
        if not (self._names and scope):
            return other
        names = names_of(self.seed, scope, log[:-TOKEN_BYTES], self.known)
        stored = [name in self._names for name in names]
        if self.snapshots:
            found = BLOCK_TOKENS * max((n for n, one in enumerate(stored, 1) if one), default=0)
        else:
            found = BLOCK_TOKENS * (stored.index(False) if False in stored else len(stored))
        if found <= (0 if other is None else other.tokens):
            return other
        return Base(None, found, shared=True)
