"""The engine of a draft worker with a smaller causal model of the target's vocabulary.

A session holds the model's cache of its log. Cache slots 0..length-1 are rows of the log; behind
them lie the rows of the tree's expanded nodes. When a verdict comes, rows of accepted nodes become
rows of the log, rows of the surviving subtree stay behind them, and the rest is free. The root is
the last token of the log; it has a row as soon as it has been expanded.

What is left of a session that has ended, its log and the rows of it, can be kept for one that goes
on from it.

How a tree grows is the grower's business.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Open
from dovetail.protocol.spans import Spans
from dovetail.workers.drafters.passes import EMPTY, Rows, read_alone, wanted_rows
from dovetail.workers.drafters.ranking import Ranking
from dovetail.workers.drafters.session import MOST_TRUE, THE_ROOT, GrowingSession
from dovetail.workers.drafters.tree import CHUNK, Grower
from dovetail.workers.models.backends.device.levels import joined
from dovetail.workers.models.backends.device.ranked import Ranked
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Cache, Paths, Segment
from dovetail.workers.sessions.prefill import TURN_TAIL, next_stop
from dovetail.workers.sessions.prefix_cache import check_prefix
from dovetail.workers.sessions.room import base_rows, check_rows, host_row_bytes
from dovetail.workers.speculation.growth import NO_ROW, Nodes
from dovetail.workers.speculation.policies import open_policy
from dovetail.workers.speculation.proposal import Shape
from dovetail.workers.speculation.score_calibration import Scale

SHARPENING = 1.0
"""The sharpening that "auto" begins with. Committed tokens a round on 16 of the demonstration
prompts with the embedded pair, gamma 15, depth 8, width 10: at 0.3 / 0.5 / 0.8 / 1.0 / 1.25 they
are 5.62 / 5.66 / 5.78 / 5.74 / 5.62 at temperature 0 and 5.02 / 4.96 / 5.08 / 5.15 / 4.87 at
temperature 1; the sharper, the more nodes are grown for it (388 a round at 0.3, 329 at 1.0)."""
SUBSTITUTE_SHARPENING = 0.2
"""The sharpening of a target's own substitute: SubSpec's, section 4.2."""

Passes = Generator[Rows, Ranked, Ranked]
"""Yields rows, is sent what follows them, and returns what follows the last ones."""
Steps = Generator[Rows, Ranked, Tensor]


@dataclass(kw_only=True)
class DraftSession(GrowingSession):
    """One sequence. `room` is the number of tokens of it that the draft can hold."""

    room: int

    @property
    def readable(self) -> bool:
        """Return whether the draft's context holds the whole log."""
        return len(self.log) <= self.room

    def within_reach(self, shape: Shape) -> Shape:
        """`shape` also without the levels whose parents the draft cannot compute."""
        shape = super().within_reach(shape)
        return Shape(shape.nodes, min(shape.depth, self.room - len(self.log) + 1), shape.width)


@dataclass(frozen=True)
class DraftLeft:
    """The log and the rows of a session that has ended, or with which another begins."""

    log: list[int]
    cache: Cache
    """Rows of the log, as far as it has been read."""
    used: int = 0
    """Rows of the tree of a session that is open."""

    @property
    def there(self) -> int:
        """Return how many tokens of the log another session can go on from."""
        return len(self.log)

    def check(self, prompt: Sequence[int], kept: int) -> None:
        """`RequestError` unless a session with this prompt can go on from the first `kept` tokens
        of it; rows that are missing will be computed."""
        check_prefix(self.log, prompt, kept, there=self.there)

    def branch(self, kept: int) -> "DraftLeft":
        rows = min(kept, self.cache.length)
        return DraftLeft(self.log, self.cache.branch(rows, used=self.used))


class Drafter(Grower[DraftSession]):
    """Opens sessions and proposes; one pass at a time."""

    def __init__(
        self,
        model: LanguageModel,
        spans: Spans,
        *,
        ahead: bool = False,
        sharpening: float = SHARPENING,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`ahead`: sessions get rows for growth ahead of the orders. `sharpening`: what "auto"
        begins with."""
        super().__init__(spans, Scale(sharpening, noise_share=1.0), ahead=ahead, clock=clock)
        self.model = model
        self._row_bytes, self._base_rows = host_row_bytes(model), base_rows(model)

    prompt_rows = CHUNK

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """`RequestError` of code "vocabulary" if the model has no row for one of `tokens`."""
        if (largest := max(tokens)) >= self.model.vocabulary_size:
            raise RequestError(
                "vocabulary",
                f"token {largest} is beyond the draft's vocabulary of "
                f"{self.model.vocabulary_size}; choose a draft of the same family",
            )

    def open(self, order: Open, base: DraftLeft | None = None) -> DraftSession:
        """Return a session whose prompt has been read, or its first `order.read` rows, if it fits
        into the draft's context. `base`: the kept cache of a session that began with the first
        `kept` tokens; it is used up."""
        room = min(order.capacity, self.model.context)
        rows = self._tree_rows(order.sampling, order.tree)
        session = DraftSession(
            log=list(order.prompt),
            ranking=self._ranking(order),
            policy=open_policy(order.tree),
            depth=order.tree.most_levels,
            capacity=order.capacity,
            cache=self._open_cache(room + rows, base, order.kept)
            if len(order.prompt) <= room
            else self.model.new_cache(0),
            rows_ahead=rows,
            room=room,
        )
        if session.readable and order.read != 0:
            self.read(session, order.read)
        return session

    def read(self, session: DraftSession, rows: int | None) -> None:
        """Read at most `rows` further rows of the log, or all that are missing."""
        with self._spans.measure("prefill"):
            read_alone(self._read_missing(session, rows), self.compute)

    def rows(self, session: DraftSession) -> tuple[int, int]:
        """Return how many rows of the log have been read, and how many have not."""
        return session.rows, session.missing_rows if session.readable else 0

    def _ranking(self, order: Open) -> Ranking:
        return Ranking.begin(
            order,
            most_tokens=self.model.vocabulary_size,
            score_calibration=self.score_calibration,
            device=self.model.device,
        )

    def keep(self, session: DraftSession) -> DraftLeft:
        """Return what is left of a session that has ended, whose tree is free."""
        session.cache.resize(session.cache.length)
        return DraftLeft(session.log, session.cache)

    def left(self, session: DraftSession) -> DraftLeft:
        """Return the log and the rows of a session that is open."""
        return DraftLeft(session.log, session.cache, session.tree.rows_used)

    @property
    def shares(self) -> bool:
        """Return whether sessions may begin with rows of others that are open."""
        return self.model.new_cache(0).branches

    def _open_cache(self, rows: int, base: DraftLeft | None, kept: int) -> Cache:
        """A cache for `rows` rows: empty, or with those of the first `kept` tokens of another
        session."""
        check_rows(rows + self._base_rows, 0, self._row_bytes)
        if base is None:
            return self.model.new_cache(rows)
        base.cache.truncate(base.cache.restorable(min(kept, base.cache.length)))
        base.cache.resize(rows)
        return base.cache

    def _move_root(
        self, session: DraftSession, path: Sequence[int], root: int | None, width: int
    ) -> None:
        """The rows of the accepted nodes become rows of the log, and all that is known below the
        root is carried over."""
        tree, cache = session.tree, session.cache
        way = path if root is None else (*path, root)
        # a node with a child in the pool has a row: on the way only the last one may lack it, and
        # then nothing is behind it
        accepted, survivors = [int(row) for row in tree.rows[list(way)] if row != NO_ROW], []
        if root is None:
            tree.clear()
        else:
            survivors = tree.move_root(root, width)
        cache.keep([cache.length + row for row in (*accepted, *survivors)], len(accepted))

    def _read_log(self, session: DraftSession, shape: Shape) -> Steps:
        few = self.model.captures and session.missing_rows <= MOST_TRUE
        found = yield from (self._read_few(session) if few else self._read_missing(session))
        session.note_ranking(THE_ROOT, found.best)
        return found.logits

    def _read_few(self, session: DraftSession) -> Passes:
        """Compute the missing rows of the log as a level is computed."""
        cache, tokens = session.cache, session.log[session.cache.length :]
        start, count = cache.length, len(tokens)
        found = yield Rows(
            torch.tensor(tokens),
            torch.arange(start, start + count),
            Segment(cache, start, count, Paths.growing(start, count)),
            wanted=1,
            ranking=session.ranking_of(THE_ROOT),
        )
        cache.keep(range(start, start + count), count)
        return found

    def _read_missing(self, session: DraftSession, rows: int | None = None) -> Passes:
        """Compute the missing rows of the log, or the first `rows` of them. Return what follows the
        last one."""
        cache, found = session.cache, Ranked(EMPTY, None)
        told = len(session.log)
        stop = told if rows is None else cache.length + rows
        while missing := session.log[cache.length : min(stop, next_stop(cache, told, CHUNK))]:
            start, count = cache.length, len(missing)
            tokens, positions = torch.tensor(missing), torch.arange(start, start + count)
            found = yield Rows(tokens, positions, Segment(cache, start, count), wanted=1)
            cache.keep(range(start, start + count), count)
            if cache.length == told - TURN_TAIL:
                cache.checkpoint()
        return found

    def _read_nodes(self, session: DraftSession, nodes: Nodes, shape: Shape) -> Steps:
        """The rows of `nodes` go behind those of the tree."""
        tree, cache = session.tree, session.cache
        segment_start = cache.length + tree.rows_used
        tree.give_rows(nodes)
        segment = Segment(
            cache, segment_start, len(nodes), Paths.behind(cache.length, *tree.lineage(nodes))
        )
        tokens = torch.from_numpy(tree.tokens[nodes].astype(np.int64))
        positions = torch.from_numpy(len(session.log) - 1 + tree.levels[nodes].astype(np.int64))
        return (yield from self._ranked(session, nodes, tokens, positions, segment))

    def _ranked(
        self,
        session: DraftSession,
        nodes: Nodes,
        tokens: Tensor,
        positions: Tensor,
        segment: Segment,
    ) -> Steps:
        """Compute the rows of `nodes`, whose children are ranked where passes are captured."""
        ranking = session.ranking_of(nodes) if self.model.captures else None
        found = yield Rows(tokens, positions, segment, len(nodes), ranking=ranking)
        session.note_ranking(nodes, found.best)
        return found.logits

    def compute(self, parts: Sequence[Rows]) -> Sequence[Ranked]:
        """Compute parts in one pass; where levels are captured, all levels in one, and what else
        there is part by part."""
        if not self.model.captures:
            return self._as_they_come(parts)
        return [
            self._as_they_come([part])[0] if found is None else found
            for part, found in zip(parts, self.model.levels_of(parts), strict=True)
        ]

    def _as_they_come(self, parts: Sequence[Rows]) -> Sequence[Ranked]:
        logits = self.model.forward(
            joined([part.tokens for part in parts]),
            joined([part.positions for part in parts]),
            [part.segment for part in parts],
            rows=wanted_rows(parts),
        )
        return [Ranked(its, None) for its in torch.split(logits, [part.wanted for part in parts])]
