"""A token tree: drafted continuations of a sequence, sharing prefixes.

Nodes are numbered 0..N-1 and a parent precedes its children; -1 stands for the root, the last
committed token, which is not a node. Only tokens and parents are sent; depths, paths and ancestors
are derived from them. Independent of scores and models."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import lt

from dovetail.protocol.errors import TreeError

ROOT = -1


@dataclass(frozen=True)
class TokenTree:
    """N nodes: `tokens[i]` continues the path that ends in node `parents[i]` (-1: the root)."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def check(self, vocabulary_size: int) -> "TokenTree":
        """Return this tree if it is valid for the vocabulary, else `TreeError` with the node."""
        tokens, parents = self.tokens, self.parents
        if len(tokens) != len(parents):
            raise TreeError(f"a tree of {len(tokens)} tokens has {len(parents)} parents")
        if not tokens or (
            min(parents) >= ROOT
            and all(map(lt, parents, range(len(parents))))
            and min(tokens) >= 0
            and max(tokens) < vocabulary_size
            and len(set(zip(parents, tokens, strict=True))) == len(tokens)
        ):
            return self
        self._name_fault(vocabulary_size)
        raise AssertionError("an invalid tree without an invalid node")

    def _name_fault(self, vocabulary_size: int) -> None:
        """Raise `TreeError` for the first invalid node."""
        seen: set[tuple[int, int]] = set()
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if not ROOT <= parent < node:
                raise TreeError(f"node {node} has parent {parent}: a parent precedes its child")
            if not 0 <= token < vocabulary_size:
                raise TreeError(
                    f"node {node} has token {token}, beyond the vocabulary of {vocabulary_size}"
                )
            if (parent, token) in seen:
                raise TreeError(f"node {node} repeats token {token} below parent {parent}")
            seen.add((parent, token))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Levels below the root, 1 for its children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> dict[int, dict[int, int]]:
        """Parent -> token -> node."""
        children: dict[int, dict[int, int]] = {}
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            children.setdefault(parent, {})[token] = node
        return children

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from a child of the root down to `node`; empty for the root."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def prefix(self, nodes: int) -> "TokenTree":
        """Return the tree of the first `nodes` nodes."""
        return TokenTree(self.tokens[:nodes], self.parents[:nodes])

    def is_path(self, nodes: Sequence[int]) -> bool:
        """Return whether `nodes` leads down from a child of the root, parent by parent."""
        above = ROOT
        parents = self.parents
        for node in nodes:
            if not 0 <= node < len(parents) or parents[node] != above:
                return False
            above = node
        return True
