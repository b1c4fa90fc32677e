"""The token tree against a slow reading of its definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.protocol.errors import ProtocolError, TreeError
from dovetail.protocol.tree import ROOT, TokenTree

# root ── 5 (0) ── 7 (2) ── 5 (4)
#      └─ 6 (1) ── 7 (3)
TREE = TokenTree((5, 6, 7, 7, 5), (ROOT, ROOT, 0, 1, 2))


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Valid trees over a vocabulary of 50."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, 25))):
        parent = draw(st.integers(ROOT, node - 1))
        siblings = {token for token, above in zip(tokens, parents, strict=True) if above == parent}
        tokens.append(
            draw(st.integers(0, 49).filter(lambda token, siblings=siblings: token not in siblings))
        )
        parents.append(parent)
    return TokenTree(tuple(tokens), tuple(parents))


def slow_path(tree: TokenTree, node: int) -> tuple[int, ...]:
    return () if node == ROOT else (*slow_path(tree, tree.parents[node]), node)


@given(trees())
def test_depths_paths_and_children_agree_with_the_parents(tree: TokenTree) -> None:
    assert tree.check(50) is tree
    for node in range(len(tree)):
        assert tree.path(node) == slow_path(tree, node)
        assert tree.depths[node] == len(slow_path(tree, node))
        assert tree.children[tree.parents[node]][tree.tokens[node]] == node
        assert tree.is_path(slow_path(tree, node))
    assert sum(map(len, tree.children.values())) == len(tree)


@given(trees(), st.data())
def test_every_prefix_of_a_tree_is_a_tree(tree: TokenTree, data: st.DataObject) -> None:
    nodes = data.draw(st.integers(0, len(tree)))
    prefix = tree.prefix(nodes)
    prefix.check(50)
    assert len(prefix) == nodes
    assert prefix.depths == tree.depths[:nodes]


@given(st.lists(st.integers(-3, 60), max_size=6), st.lists(st.integers(-3, 6), max_size=6))
def test_check_accepts_exactly_what_the_definition_says(
    tokens: list[int], parents: list[int]
) -> None:
    is_tree = (
        len(tokens) == len(parents)
        and all(ROOT <= parent < node for node, parent in enumerate(parents))
        and all(0 <= token < 50 for token in tokens)
        and len(set(zip(tokens, parents, strict=True))) == len(tokens)
    )
    tree = TokenTree(tuple(tokens), tuple(parents))
    if is_tree:
        tree.check(50)
    else:
        with pytest.raises(TreeError):
            tree.check(50)


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        (TokenTree((1,), ()), "a tree of 1 tokens has 0 parents"),
        (TokenTree((1, 2), (1, ROOT)), "node 0 has parent 1"),
        (TokenTree((1, 2), (ROOT, 1)), "node 1 has parent 1"),
        (TokenTree((1,), (-2,)), "node 0 has parent -2"),
        (TokenTree((50,), (ROOT,)), "node 0 has token 50, beyond the vocabulary of 50"),
        (TokenTree((-1,), (ROOT,)), "node 0 has token -1"),
        (TokenTree((4, 4), (ROOT, ROOT)), "node 1 repeats token 4 below parent -1"),
    ],
)
def test_what_is_no_tree_is_refused_by_the_name_of_its_node(
    tree: TokenTree, complaint: str
) -> None:
    with pytest.raises(TreeError, match=complaint):
        tree.check(50)


def test_equal_tokens_below_different_parents_are_two_nodes() -> None:
    assert TREE.check(8).children == {ROOT: {5: 0, 6: 1}, 0: {7: 2}, 1: {7: 3}, 2: {5: 4}}


def test_a_path_leads_from_a_child_of_the_root_downwards() -> None:
    assert TREE.is_path(())
    assert TREE.is_path((0, 2, 4))
    for nodes in ((2,), (0, 4), (0, 3), (0, 1), (4, 2, 0), (0, 2, 4, 4), (5,), (-1,)):
        assert not TREE.is_path(nodes)


def test_the_empty_tree_is_a_tree() -> None:
    assert len(TokenTree().check(1)) == 0
    assert TokenTree().path(ROOT) == ()


def test_a_broken_tree_is_the_mistake_of_a_peer() -> None:
    assert issubclass(TreeError, ProtocolError)
