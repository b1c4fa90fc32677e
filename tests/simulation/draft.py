"""A draft that has spoken already: the draft worker's own growth, over what a recording has in the
place of a model's passes.

The time of a pass moves the clock. What is asked for and was not recorded has no children, and is
counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np

from dovetail.launch.planning.acceptance import About, Floats, Ints, Position, Recording
from dovetail.protocol.messages import Open
from dovetail.protocol.tree import ROOT
from dovetail.workers.draft import DraftWorker, Identity
from dovetail.workers.drafters.head import HeadDrafter
from dovetail.workers.drafters.passes import EMPTY, Steps
from dovetail.workers.drafters.ranking import Ranking
from dovetail.workers.drafters.session import GrowingSession
from dovetail.workers.drafters.tree import Grower
from dovetail.workers.models.segment import Cache
from dovetail.workers.speculation.growth import NO_ROW, GrowingTree, Nodes
from dovetail.workers.speculation.policies import open_policy
from dovetail.workers.speculation.proposal import Shape
from dovetail.workers.speculation.score_calibration import Scale
from simulation.clockwork import Clock, ClockSpans
from simulation.prices import PlacedCosts


@cache
def _places(position: Position) -> tuple[Ints, Ints]:
    """Return for every node (the root last, at index -1) the first of its children, and how many it
    has."""
    parents = position.parents
    count = np.bincount(parents + 1, minlength=len(parents) + 1).astype(np.int32)
    first = np.full(len(count), -1, np.int32)
    first[(parents + 1)[::-1]] = np.arange(len(parents), dtype=np.int32)[::-1]
    return np.roll(first, -1), np.roll(count, -1)


def below(position: Position, path: Sequence[int], width: int) -> tuple[Ints, Floats] | None:
    """Return tokens and gains of the best `width` children of the node with that path; None if it
    is not here, or was not expanded."""
    firsts, counts = _places(position)
    node = ROOT
    for token in path:
        first = int(firsts[node])
        found = np.flatnonzero(position.tokens[first : first + int(counts[node])] == token)
        if not len(found):
            return None
        node = first + int(found[0])
    if not (node == ROOT or position.expanded[node]):
        return None
    first, count = int(firsts[node]), int(counts[node])
    stop = first + min(count, width)
    return position.tokens[first:stop], position.gains[first:stop]


def children(
    recording: Recording, position: int, path: Sequence[int], width: int, *, head: bool
) -> tuple[Ints, Floats] | None:
    """Return what the draft says after `path` below the root of `position`; None where that was not
    recorded.

    A small model says the same below any root. Of the target's own path the longest part is taken
    as given, below whose end more was recorded. What a head says depends on how much of the path it
    has guessed itself: there the tree of the position comes first.
    """
    own = recording.tokens[position + 1 : position + 1 + len(path)]
    pairs = enumerate(zip(own, path, strict=False))
    known = next((place for place, (one, other) in pairs if one != other), len(own))
    for start in (0, known) if head else (known,):
        if position + start < len(recording.positions):
            found = below(recording.positions[position + start], path[start:], width)
            if found is not None:
                return found
    return None


@dataclass
class Coverage:
    """Counts the nodes that were expanded while somebody waited, and those of them that a recording
    lacks.

    What is grown ahead goes deeper than any recording, but there nearly always off the target's
    path, where nothing can be accepted.
    """

    expanded: int = 0
    missing: int = 0

    @property
    def missing_share(self) -> float:
        return self.missing / self.expanded if self.expanded else 0.0


@dataclass
class Recalled:
    """Stands in for a `Ranking`: gives the recorded children."""

    recording: Recording
    head: bool
    coverage: Coverage
    awaited: bool = True  # true if somebody waits for the present pass
    noise: None = None
    draws: None = None

    def commit(self, tokens: Sequence[int], length: int) -> None:
        """The log grows as it was recorded."""

    def children(
        self, tree: GrowingTree, nodes: Nodes, root: int, width: int
    ) -> tuple[Ints, Floats]:
        """Ids and gains [N, width] of the children of `nodes`; a gain of -inf is no child."""
        tokens, gains = (
            np.zeros((len(nodes), width), np.int32),
            np.full((len(nodes), width), -np.inf, np.float32),
        )
        position = root - len(self.recording.prompt) - 1
        for row, node in enumerate(nodes.tolist()):
            path = tree.path_tokens(node)
            found = children(self.recording, position, path, width, head=self.head)
            self.coverage.expanded += self.awaited
            if found is None:
                self.coverage.missing += self.awaited
                continue
            tokens[row, : len(found[0])], gains[row, : len(found[1])] = found
        return tokens, gains

    def prepare(self, first: int, count: int) -> bool:
        """There is no noise to compute."""
        return False


@dataclass(kw_only=True)
class RecalledSession(GrowingSession):
    """One sequence; `read` tokens of its log have rows, of a head's all but the root, and the tree
    may have `tree_rows` more."""

    recalled: Recalled  # the recorded ranking, as `ranking` has it
    head: bool
    tree_rows: int
    read: int

    @property
    def rows(self) -> int:
        return self.read

    @property
    def missing_rows(self) -> int:
        return len(self.log) - self.head - self.read

    @property
    def free_rows(self) -> int:
        return self.tree_rows - self.tree.rows_used


@dataclass(frozen=True)
class _Rows:
    """Rows of one session in a pass."""

    count: int
    kind: None = None


class RecordedDrafter(Grower[RecalledSession]):
    """An engine of the draft worker."""

    def __init__(
        self,
        about: About,
        recordings: Sequence[Recording],
        costs: PlacedCosts,
        clock: Clock,
        spans: ClockSpans,
        coverage: Coverage,
    ) -> None:
        super().__init__(spans, Scale(about.sharpening, 1.0), ahead=True, clock=clock)
        self._about, self._costs, self._time, self._coverage = about, costs, clock, coverage
        if about.head:
            self.kept, self.given_up = HeadDrafter.kept, HeadDrafter.given_up
        self._replies = {recording.prompt: recording for recording in recordings}

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Every token was recorded."""

    def open(self, order: Open, base: None = None) -> RecalledSession:
        """Return a session of a prompt that was recorded."""
        tree, prompt = order.tree, order.prompt[: len(order.prompt) - order.replied]
        recalled = Recalled(self._replies[prompt], self._about.head, self._coverage)
        ranking, nothing = cast(Ranking, recalled), cast(Cache, None)
        return RecalledSession(
            log=list(order.prompt),
            cache=nothing,
            ranking=ranking,
            recalled=recalled,
            policy=open_policy(tree),
            depth=tree.most_levels,
            capacity=order.capacity,
            head=self._about.head,
            tree_rows=self._tree_rows(order.sampling, tree),
            read=len(order.prompt) - self._about.head,
        )

    def _move_root(
        self, session: RecalledSession, path: Sequence[int], root: int | None, width: int
    ) -> None:
        """Move the root as a small model or a head does: of a head the rows of nodes are no rows of
        the log, and the new root's children are ranked anew."""
        self._time.advance(self._costs.proposal_s)
        tree = session.tree
        if not session.head:
            way = path if root is None else (*path, root)
            session.read += sum(int(row) != NO_ROW for row in tree.rows[list(way)])
        if root is None or (session.head and not session.waiting_time.ahead):
            tree.clear()
            return
        tree.move_root(root, width)
        tree.root_expanded = tree.root_expanded and not session.head

    def _read_log(self, session: RecalledSession, shape: Shape) -> Steps:
        missing = session.missing_rows
        yield _Rows(missing)
        session.read += missing
        return EMPTY

    def _read_nodes(self, session: RecalledSession, nodes: Nodes, shape: Shape) -> Steps:
        session.tree.give_rows(nodes)
        yield _Rows(len(nodes))
        return EMPTY

    def compute(self, parts: Sequence[_Rows]) -> Sequence[None]:
        """Spend the time of a pass over the rows of all of them."""
        self._time.advance(self._costs.t_d.at(sum(part.count for part in parts)))
        return [None] * len(parts)

    def steps_ahead(self, session: RecalledSession, nodes: Nodes) -> Steps:
        """Compute what is not awaited."""
        session.recalled.awaited = False
        return super().steps_ahead(session, nodes)

    def _add_children(self, session: RecalledSession, logits: Any, nodes: Nodes, width: int) -> int:
        """Return what is left below a head's new root goes on below those of its children that are
        among the new ones."""
        tree = session.tree
        tokens, gains = session.recalled.children(tree, nodes, len(session.log), width)
        session.recalled.awaited = True
        if not tree.children_of(nodes).any():
            return tree.add_children(nodes, tokens, gains)
        added = tree.rank_again(nodes, tokens, gains)
        tree.prune(width)
        return added


def open_draft(
    about: About,
    recordings: Sequence[Recording],
    costs: PlacedCosts,
    clock: Clock,
    coverage: Coverage,
) -> DraftWorker[RecalledSession]:
    """The draft worker, on such an engine."""
    spans = ClockSpans(clock)
    engine = RecordedDrafter(about, recordings, costs, clock, spans, coverage)
    return DraftWorker(
        engine, Identity("draft", "recorded", "simulated", 1, about.context), spans, clock=clock
    )
