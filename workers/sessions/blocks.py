"""Blocks of cached prompts: copies of the rows of 64 tokens in a hash chain, in memory within a
bound and, on request, on disk. Blocks never change. A session begins with a copy of them, so they
outlive sessions, and prompts can share them up to where they differ. A model with recurrent states
can only go on where a snapshot of them is stored: behind the last whole block of a prompt."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import MAX_NAMES, Blocks, Open
from dovetail.protocol.prefixes import (
    BLOCK_TOKENS,
    blocks_of,
    digest_of,
    name_after,
    names_of,
    root_of,
)
from dovetail.workers.models.cache import SlotCache
from dovetail.workers.models.segment import Cache
from dovetail.workers.sessions.block_files import BlockFiles

LONG = 4
"""Blocks from which on a prompt is written to disk when it is read; a shorter one when it is used
again."""
Source = Literal["", "memory", "disk"]


@dataclass(frozen=True)
class Block:
    """The rows of 64 tokens behind those of the block `parent`, or of the root; or the states after
    these tokens."""

    parent: bytes
    tokens: bytes
    rows: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        return sum(part.nbytes for part in self.rows)

    @cached_property
    def digest(self) -> bytes:
        """Return the hash of the contents."""
        digest = sha256(self.parent + self.tokens)
        for part in self.rows:
            digest.update(part.contiguous().view(torch.uint8).numpy().data)
        return digest.digest()


def can_store(cache: Cache) -> bool:
    """Return whether the rows of such a cache can be stored as blocks: the caches of models over
    several devices cannot."""
    return isinstance(cache, SlotCache)


class BlockStore:
    """The blocks of one worker, the least recently used first."""

    def __init__(
        self,
        seed: bytes,
        new_cache: Callable[[int], Cache],
        most_bytes: int,
        files: BlockFiles | None = None,
        known: int = 0,
    ) -> None:
        """`seed`: the hash of what rows depend on besides tokens. `new_cache` returns an empty one
        of a capacity. `most_bytes`: of all blocks in memory; `files`: those on disk; `known`: how
        many tokens after a row it depends on."""
        self._new_cache = new_cache
        empty = new_cache(0)
        self.snapshots = isinstance(empty, SlotCache) and empty.states is not None
        """Whether a session can only go on where a snapshot of its states is stored. A snapshot
        then has the name of the last block, and blocks of rows have names of their own."""
        self.seed, self.known, self._most_bytes, self._files = seed, known, most_bytes, files
        self._held: OrderedDict[bytes, Block] = OrderedDict()
        self._bytes = 0
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()
        self._epoch = 0
        self._known: set[bytes] = set()  # names that the coordinator knows
        self._changed: set[bytes] = set()  # names that have come or gone since the last report

    def __contains__(self, name: bytes) -> bool:
        return name in self._held or (self._files is not None and name in self._files)

    def chain(self, scope: bytes, mark: int = 0) -> "Chain":
        """Return the blocks of a new session, none so far. `mark`: the rows after which its states
        are stored, if it has any."""
        return Chain(self, scope, mark)

    def row_name(self, name: bytes) -> bytes:
        """Return the name of the rows of the block `name`."""
        return digest_of(name, "rows") if self.snapshots else name

    def restore(self, order: Open, rows: int = 0) -> tuple[Cache, Source]:
        """Return a cache for `rows` rows or more with the first `kept` of a prompt, and whether a
        block came from disk. Raises `RequestError` of code "prefix" if a block is missing."""
        log, count = _packed(order.prompt), order.kept
        most = -(-count // BLOCK_TOKENS)
        names = names_of(self.seed, order.scope, log, self.known, most)
        needed = self._stored(names)
        source: Source = "memory" if all(name in self._held for name in needed) else "disk"
        cache = self._new_cache(max(rows, most * BLOCK_TOKENS))
        assert isinstance(cache, SlotCache)
        parents = (root_of(self.seed, order.scope, log, self.known), *names)
        blocks = [*zip(parents, blocks_of(log, self.known), strict=False)][: len(names)]
        for name, about in zip(needed, blocks, strict=False):
            if (block := self._find(name, *about)) is None:
                self._drop_files(needed)
                text = f"cannot reuse {count} tokens: rows from {cache.length} on are not stored"
                raise RequestError("prefix", f"{text}; open the session without them")
            cache.append(block.rows)
        if cache.length < count:
            text = f"cannot reuse {count} tokens of blocks of {cache.length}; reuse fewer"
            raise RequestError("prefix", text)
        if cache.states is not None:
            after = self._find(names[-1], *blocks[-1]) if cache.length == count else None
            if after is None:
                text = f"cannot reuse {count} tokens: the states after them are not stored"
                raise RequestError("prefix", f"{text}; open the session without them")
            cache.states.restore(count, after.rows)
        cache.truncate(count)
        self.use_again(names)
        return cache, source

    def put(self, names: Sequence[bytes], block: Block, name: bytes) -> None:
        """Store the last block of a chain with these names, or the states after it, as `name`."""
        self._hold(name, block)
        self._use(names)
        if len(names) >= LONG:
            self._write_later(names)

    def _hold(self, name: bytes, block: Block) -> None:
        self._held[name] = block
        self._bytes += block.size
        self._changed.add(name)

    def use_again(self, names: Sequence[bytes]) -> None:
        """Note another use of a chain, which makes it worth writing to disk."""
        self._use(names)
        if self._files is not None:
            self._files.use(self._stored(names))
        self._write_later(names)

    def _stored(self, names: Sequence[bytes]) -> Sequence[bytes]:
        """Return the names of all that is stored of a chain."""
        return [*map(self.row_name, names), names[-1]] if self.snapshots and names else names

    def _use(self, names: Sequence[bytes]) -> None:
        """Note the use of a chain, and drop the least recently used blocks beyond the bound: those
        behind others first."""
        for name in reversed(self._stored(names)):
            if name in self._held:
                self._held.move_to_end(name)
        while self._bytes > self._most_bytes:
            name, block = self._held.popitem(last=False)
            self._bytes -= block.size
            self._unwritten.pop(name, None)
            self._changed.add(name)

    def _find(self, name: bytes, parent: bytes, tokens: bytes) -> Block | None:
        """Return the block of these tokens behind `parent`, from memory or disk; None if there is
        none."""
        block = self._held.get(name) or self._read(name)
        return block if block and (block.parent, block.tokens) == (parent, tokens) else None

    def _read(self, name: bytes) -> Block | None:
        """Return a block that is on disk, and hold it in memory; None if there is none."""
        found = None if self._files is None else self._files.read(name)
        if found is None:
            self._changed.add(name)
            return None
        block = Block(found.parent, found.tokens, found.rows)
        if digest_of(name, block.digest) != found.digest:
            assert self._files is not None
            self._files.drop_damaged(name)
            self._changed.add(name)
            return None
        self._hold(name, block)
        return block

    def _drop_files(self, names: Sequence[bytes]) -> None:
        """Delete files that were not read, behind a block that is missing: their rows are written
        again with those of that block."""
        if (files := self._files) is not None:
            for name in (name for name in names if name in files and name not in self._held):
                files.drop(name)
                self._changed.add(name)

    def _write_later(self, names: Sequence[bytes]) -> None:
        if self._files is not None:
            for name in self._stored(names):
                if name in self._held and name not in self._files:
                    self._unwritten.setdefault(name)

    def idle(self) -> bool:
        """Write one block to disk; return False if there is nothing to write."""
        if self._files is None or not self._unwritten:
            return False
        name, _ = self._unwritten.popitem()  # so that the first blocks are deleted last
        if (block := self._held.get(name)) is not None:
            digest = digest_of(name, block.digest)  # a file is valid under its own name only
            self._changed.update(self._files.write(name, block, digest))
        return True

    def let_go(self) -> None:
        """Free the blocks in memory."""
        self._changed.update(self._held)
        self._held.clear()
        self._unwritten.clear()
        self._bytes = 0

    def begin(self, epoch: int) -> bytes:
        """Begin to report to a coordinator, and return the seed of the names."""
        self._epoch, self._known = epoch, set()
        self._changed = {*self._held, *(() if self._files is None else self._files.names)}
        return self.seed

    def news(self) -> Iterator[Blocks]:
        """Yield the names that have come and gone since the last report."""
        if not self._changed:
            return
        changed, self._changed = self._changed, set()
        made = [name for name in changed if name in self and name not in self._known]
        gone = [name for name in changed if name not in self and name in self._known]
        self._known.difference_update(gone)
        self._known.update(made)
        for stored, names in ((True, made), (False, gone)):
            for start in range(0, len(names), MAX_NAMES):
                packed = b"".join(names[start : start + MAX_NAMES])
                damaged = 0 if self._files is None else self._files.damaged
                yield Blocks(epoch=self._epoch, names=packed, stored=stored, damaged=damaged)


class Chain:
    """The blocks of one session's log, stored as its rows are computed."""

    def __init__(self, store: BlockStore, scope: bytes, mark: int) -> None:
        self._store, self._scope, self.mark = store, scope, mark
        self._names: list[bytes] = []

    def extend(self, log: Sequence[int], cache: Cache, length: int) -> None:
        """Store the whole blocks among the first `length` rows of a log that are not stored yet."""
        store, known = self._store, self._store.known
        if store.snapshots:
            length = min(length, self.mark)
        while (start := BLOCK_TOKENS * len(self._names)) + BLOCK_TOKENS <= length:
            assert isinstance(cache, SlotCache)
            tokens = _packed(log[start + known : start + known + BLOCK_TOKENS])
            root = root_of(store.seed, self._scope, _packed(log[:known]), known)
            parent = self._names[-1] if self._names else root
            self._names.append(name_after(parent, tokens))
            name = store.row_name(self._names[-1])
            if name in store:
                store.use_again(self._names)
            else:
                rows = cache.copied(start, start + BLOCK_TOKENS)
                store.put(self._names, Block(parent, tokens, rows), name)
            if cache.states is None or start + BLOCK_TOKENS < self.mark:
                continue
            if self._names[-1] not in store and (parts := cache.states.copied(self.mark)):
                store.put(self._names, Block(parent, tokens, parts), self._names[-1])


def _packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()
