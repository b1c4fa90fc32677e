"""The tokens that the target chooses after the rows of trees, and the nodes that it accepts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from torch import Tensor

from dovetail.protocol.errors import RequestError
from dovetail.protocol.settings import Sampling
from dovetail.protocol.tree import ROOT, TokenTree
from dovetail.workers.kernels import ranking
from dovetail.workers.sessions.session import TargetSession
from dovetail.workers.speculation.acceptance import walk
from dovetail.workers.speculation.noise import Noise
from dovetail.workers.speculation.rejection import Choices, ProposalProbabilities, rejection_walk
from dovetail.workers.speculation.sampling import choose, process_logits

Outcome = tuple[tuple[int, ...], int, tuple[float, ...]]
"""The accepted nodes, the bonus and the margins of these tokens."""
T = TypeVar("T")


class Asked(NamedTuple):
    """The inputs of a tree's outcome."""

    session: TargetSession
    logits: Tensor  # [M, V], after the end of the session's log and after each node of the tree
    tree: TokenTree
    drawn: ProposalProbabilities


def outcomes_of(asked: Sequence[Asked]) -> list[Outcome | Exception]:
    """Return the outcome of each tree of a pass, or why it failed."""
    begun = [_attempt(partial(_Choices, one)) for one in asked]
    waiting = [choices for choices in begun if isinstance(choices, _Choices) and choices.root]
    if waiting:
        found = ranking.choose([choices.root for choices in waiting if choices.root])
        for choices, (token, margin) in zip(waiting, found, strict=True):
            choices.take(0, token, margin)
    return [
        choices if isinstance(choices, Exception) else _attempt(choices.outcome)
        for choices in begun
    ]


def outcome_of(asked: Asked) -> Outcome:
    """Return the outcome of one tree, or raise its exception."""
    (outcome,) = outcomes_of([asked])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _attempt(step: Callable[[], T]) -> T | Exception:
    try:
        return step()
    except Exception as error:  # must not affect the pass's other sessions
        return error


class _Choices:
    """The choices after rows, made on demand: processing a row is expensive, and few rows are on
    the path."""

    def __init__(self, asked: Asked) -> None:
        self._session, self._logits, self._tree, self._drawn = asked
        self._chosen: dict[int, tuple[int, float]] = {}
        self._native = ranking.ranks(asked.logits.device)
        self.root = self._row(0) if self._native and not asked.session.sampling.rejects else None
        """The kernels' inputs for the first row; None if they do not choose here."""

    def outcome(self) -> Outcome:
        if self._session.sampling.rejects:
            key, length = self._session.key, len(self._session.log)
            outcome = rejection_walk(
                self._tree,
                self._drawn,
                lambda row: process_logits(self._looked_back(row), self._session.sampling)[0],
                Choices(key, length),
            )
            _check_number(outcome[2][-1])
            return outcome
        accepted, bonus = walk(self._tree, self)
        return accepted, bonus, tuple(self._choose(node + 1)[1] for node in (ROOT, *accepted))

    def __getitem__(self, row: int) -> int:
        return self._choose(row)[0]

    def take(self, row: int, token: int, margin: float) -> None:
        """Note the kernels' choice after a row, if they made one."""
        if token >= 0:
            self._chosen[row] = token, margin

    def _choose(self, row: int) -> tuple[int, float]:
        if self._native and row not in self._chosen:
            self.take(row, *ranking.choose([self._row(row)])[0])
        if row not in self._chosen:
            self._choose_by_torch(row)
        _check_number(self._chosen[row][1])
        return self._chosen[row]

    def _choose_by_torch(self, row: int) -> None:
        session, noise = self._session, self._noise(row)
        if noise is None and session.looking_back is None:  # an argmax of all rows is cheap
            ids, margins = choose(self._logits)
            chosen = zip(ids.tolist(), margins.tolist(), strict=True)
            self._chosen.update(enumerate(chosen))
            return
        z = process_logits(self._looked_back(row), session.sampling)
        ids, margins = choose(z, None if noise is None else noise.row.unsqueeze(0))
        self._chosen[row] = int(ids[0]), float(margins[0])

    def _row(self, row: int) -> tuple[Tensor, Sampling, int | None]:
        """Return the kernels' parameters for choosing a token after a row."""
        noise = self._noise(row)
        word = None if noise is None else noise.word
        plain = self._session.looking_back is None
        logits = self._logits[row] if plain else self._looked_back(row)[0]
        return logits, self._session.sampling, word

    def _noise(self, row: int) -> Noise | None:
        noise, length = self._session.noise, len(self._session.log)
        return None if noise is None else noise.at(length + len(self._tree.path(row - 1)))

    def _looked_back(self, row: int) -> Tensor:
        """Return a row [1, V] after the processors that look back."""
        logits = self._logits[row : row + 1]
        if self._session.looking_back is None:
            return logits
        path = [self._tree.tokens[node] for node in self._tree.path(row - 1)]
        return self._session.looking_back.process(logits, [path])


def _check_number(margin: float) -> None:
    if margin != margin:
        raise RequestError(
            "internal",
            "the target computed NaN logits; its weights or its device are damaged",
        )
