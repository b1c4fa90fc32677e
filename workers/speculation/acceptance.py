"""Which drafted nodes the target accepts: those that equal its own choices, from the root down.

The choices do not depend on the tree, so the tokens are those of the target alone; the tree only
decides how many of them one pass yields. Independent of logits and noise."""

from typing import Protocol

from dovetail.protocol.tree import ROOT, TokenTree


class Choices(Protocol):
    """The target's choice after each row of a pass: row 0 is the root, row i + 1 is node i. Only
    rows on the accepted path are computed."""

    def __getitem__(self, row: int, /) -> int: ...


def walk(tree: TokenTree, choices: Choices) -> tuple[tuple[int, ...], int]:
    """Return the accepted nodes, a path from below the root, and the bonus: the target's choice
    after the last of them."""
    accepted: list[int] = []
    node = ROOT
    while (child := tree.children.get(node, {}).get(choices[node + 1])) is not None:
        accepted.append(child)
        node = child
    return tuple(accepted), choices[node + 1]
