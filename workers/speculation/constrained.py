"""The grammar of a session's reply: which tokens it allows at the end of the log, and along paths
beyond it.

What is allowed after a path depends on the tokens of the reply and of the path alone, so a target's
choices are the same with any tree, and without one."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dovetail.protocol.errors import RequestError
from dovetail.protocol.grammar import Allowed, Matcher
from dovetail.protocol.tree import ROOT, TokenTree
from dovetail.workers.speculation.proposal import Proposal

Path = tuple[int, ...]


class Constrained:
    """The places of a session in its grammar. Grows with the log; places beyond the log are kept
    while they can still become part of it."""

    def __init__(self, matcher: Matcher, *, drafts: bool = False) -> None:
        """`matcher`: at the beginning of the reply. `drafts`: nothing is allowed after a path that
        the grammar excludes; otherwise that is an error."""
        self._root, self._drafts = matcher, drafts
        self._ahead: dict[Path, Matcher] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Note that the log has grown by `tokens`. Raises `RequestError` of code "constraint" if
        the grammar does not allow them."""
        path = tuple(tokens)
        known = next((n for n in range(len(path), 0, -1) if path[:n] in self._ahead), 0)
        root = self._ahead[path[:known]] if known else self._root
        count = len(path)
        self._ahead = {
            one[count:]: there
            for one, there in self._ahead.items()
            if len(one) > count and one[:count] == path
        }
        root.consume(path[known:])
        self._root = root

    def allowed(self, path: Sequence[int]) -> Allowed:
        """Return which tokens [V] may follow a path. Raises `RequestError` of code "constraint" if
        a limit of the grammar is reached."""
        try:
            return self._at(tuple(path)).allowed()
        except RequestError:
            if not self._drafts:
                raise
            return np.zeros(self._root.size, np.bool_)

    def completed(self, proposal: Proposal, most: int) -> tuple[Proposal, tuple[int, ...]]:
        """Return a proposal with the tokens that must follow its leaves, which cost no pass of the
        draft, and the place of each node in the original, -1 for a new one. A new node has the
        score of its leaf. `most`: the most nodes, of which the best stay."""
        tree, places = proposal.tree, {ROOT: ROOT}
        nodes: list[tuple[int, int, float, int]] = []  # token, parent, score, place
        for node in range(ROOT, len(tree)):
            score = proposal.scores[node] if node != ROOT else 0.0
            if node != ROOT:
                places[node] = len(nodes)
                nodes.append((tree.tokens[node], places[tree.parents[node]], score, node))
            if node in tree.children:
                continue
            parent = places[node]
            for token in self._forced([tree.tokens[one] for one in tree.path(node)]):
                nodes.append((token, parent, score, -1))
                parent = len(nodes) - 1
        tokens, parents, scores, origins = zip(*nodes[:most], strict=True) if nodes else ((),) * 4
        return replace(proposal, tree=TokenTree(tokens, parents), scores=scores), origins

    def _forced(self, path: Sequence[int]) -> list[int]:
        """Return the tokens that must follow a path; none if the grammar excludes it."""
        try:
            return self._at(tuple(path)).forced()
        except RequestError:
            return []

    def _at(self, path: Path) -> Matcher:
        """Return the place after a path."""
        if not path:
            return self._root
        if (there := self._ahead.get(path)) is None:
            there = self._at(path[:-1]).copy()
            there.consume(path[-1:])
            self._ahead[path] = there
        return there
