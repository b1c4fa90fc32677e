"""The tokens that the target chooses after the rows of a tree, and how far they accept it."""

from torch import Tensor

from dovetail.protocol.errors import RequestError
from dovetail.protocol.tree import ROOT, TokenTree
from dovetail.workers.sessions.session import TargetSession
from dovetail.workers.speculation.acceptance import walk
from dovetail.workers.speculation.rejection import Choices, ProposalProbabilities, rejection_walk
from dovetail.workers.speculation.sampling import choose, process_logits


def outcome_of(
    session: TargetSession, logits: Tensor, tree: TokenTree, drawn: ProposalProbabilities
) -> tuple[tuple[int, ...], int, tuple[float, ...]]:
    """Return the accepted nodes, the bonus and the margins of these tokens, by the logits [M, V]
    after the end of the session's log and after each node of `tree`."""
    if session.sampling.rejects:
        outcome = rejection_walk(
            tree,
            drawn,
            lambda row: _process(session, logits, tree, row)[0],
            Choices(session.key, len(session.log)),
        )
        _check_number(outcome[2][-1])
        return outcome
    greedy = session.noise is None and session.looking_back is None
    choices = _Greedy(logits) if greedy else _Processed(session, logits, tree)
    accepted, bonus = walk(tree, choices)
    return accepted, bonus, tuple(choices.margin(node + 1) for node in (ROOT, *accepted))


class _Greedy:
    """The choices of all rows at once: an argmax of each is cheap."""

    def __init__(self, logits: Tensor) -> None:
        ids, margins = choose(logits)
        self._ids, self._margins = ids.tolist(), margins.tolist()

    def __getitem__(self, row: int) -> int:
        token: int = self._ids[row]
        _check_number(self._margins[row])
        return token

    def margin(self, row: int) -> float:
        margin: float = self._margins[row]
        return margin


class _Processed:
    """The choices of the rows that are asked for, one by one: processing a row costs far more than
    looking at it, and few lie on the path."""

    def __init__(self, session: TargetSession, logits: Tensor, tree: TokenTree) -> None:
        self._session, self._logits, self._tree = session, logits, tree
        self._chosen: dict[int, tuple[int, float]] = {}

    def __getitem__(self, row: int) -> int:
        return self._choose(row)[0]

    def margin(self, row: int) -> float:
        return self._choose(row)[1]

    def _choose(self, row: int) -> tuple[int, float]:
        if row not in self._chosen:
            session = self._session
            path = self._tree.path(row - 1)
            noise = (
                session.noise.row(len(session.log) + len(path)).unsqueeze(0)
                if session.noise is not None
                else None
            )
            ids, margins = choose(_process(session, self._logits, self._tree, row), noise)
            self._chosen[row] = int(ids[0]), float(margins[0])
            _check_number(self._chosen[row][1])
        return self._chosen[row]


def _process(session: TargetSession, logits: Tensor, tree: TokenTree, row: int) -> Tensor:
    """Return a row of `logits` [M, V] as the session's processors leave it, [1, V]."""
    if session.looking_back is None:
        return process_logits(logits[row : row + 1], session.sampling)
    path = [tree.tokens[node] for node in tree.path(row - 1)]
    return process_logits(
        session.looking_back.process(logits[row : row + 1], [path]), session.sampling
    )


def _check_number(margin: float) -> None:
    if margin != margin:
        raise RequestError(
            "internal",
            "the target computed logits that are not numbers; its weights or its device are "
            "damaged",
        )
