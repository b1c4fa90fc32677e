"""Which drafted nodes the target accepts: those that equal its own choices, from the root down.

The choices do not depend on the tree, so the emitted tokens are what the target alone would have
emitted; the tree decides only how many of them one pass reads off. Knows neither logits nor noise.
"""

from typing import Protocol

from dovetail.protocol.tree import ROOT, TokenTree


class Choices(Protocol):
    """The target's choice after each row of a pass: row 0 is the root, row i + 1 is node i. Asked
    only for rows on the accepted path."""

    def __getitem__(self, row: int, /) -> int: ...


def walk(tree: TokenTree, choices: Choices) -> tuple[tuple[int, ...], int]:
    """The accepted nodes, a path from below the root, and the bonus: the target's choice after the
    last of them."""
    accepted: list[int] = []
    node = ROOT
    while (child := tree.children.get(node, {}).get(choices[node + 1])) is not None:
        accepted.append(child)
        node = child
    return tuple(accepted), choices[node + 1]
