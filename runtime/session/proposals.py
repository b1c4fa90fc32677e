"""Checks of a draft worker's proposals. Pure."""

from dovetail.protocol.errors import ProtocolError, TreeError
from dovetail.protocol.messages import MAX_CANDIDATES, Drafted
from dovetail.protocol.tree import TokenTree
from dovetail.runtime.session.request import Request


def read_proposal(event: Drafted, request: Request) -> TokenTree:
    """Return the tree of a proposal. Raises `TreeError` if it is not a tree, or too large, and
    `ProtocolError` if its other fields do not fit."""
    tree = event.tree
    nodes = len(tree)
    if nodes > request.most_nodes:
        raise TreeError(
            f"a proposal of {nodes} nodes, but at most {request.most_nodes} were requested"
        )
    if len(event.scores) != nodes:
        raise ProtocolError(f"a proposal of {nodes} nodes with {len(event.scores)} scores")
    if (highest := max(event.scores, default=0.0)) > 0.0:  # its exponential is a probability
        raise ProtocolError(
            f"a proposal with the score {highest:g}: the logarithm of a probability is at most 0"
        )
    tree.check(request.vocabulary_size)
    if request.rejects and nodes:
        _check_probabilities(event)
    return tree


def _check_probabilities(event: Drafted) -> None:
    """Raise `ProtocolError` unless each node has its children's probabilities."""
    candidates, probabilities = event.candidates, event.probabilities
    if (
        candidates is None
        or probabilities is None
        or (candidates.dtype, probabilities.dtype) != ("int32", "float32")
    ):
        raise ProtocolError("a proposal without the probabilities that it was drawn from")
    rows, count = candidates.shape if len(candidates.shape) == 2 else (0, 0)
    if (
        candidates.shape != probabilities.shape
        or rows != 1 + len(event.tokens)
        or not 1 <= count <= MAX_CANDIDATES
    ):
        raise ProtocolError(
            f"a proposal of {len(event.tokens)} nodes with candidates {candidates.shape} and "
            f"probabilities {probabilities.shape}"
        )
