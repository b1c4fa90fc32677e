"""The engine of a small draft model, with the target's vocabulary or a `Translation`.

A session holds the model's KV cache. Slots 0..length-1 are rows of the log, followed by the rows of
the tree's expanded nodes. After a verdict, rows of accepted nodes become rows of the log, rows of
the surviving subtree follow them, and the rest is free. The root is the last token of the log; it
has a row once it has been expanded. The log and rows of an ended session can be kept for another
one. Rows are those of `DraftSession.ids`, the log in the draft's tokens."""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from torch import Tensor

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Open
from dovetail.protocol.spans import Spans
from dovetail.workers.drafters.engine import Keeper
from dovetail.workers.drafters.passes import EMPTY, Rows, read_alone, wanted_rows
from dovetail.workers.drafters.ranking import Ranking
from dovetail.workers.drafters.session import MOST_TRUE, THE_ROOT, GrowingSession
from dovetail.workers.drafters.translation import Retokenised, Translation, shared_length
from dovetail.workers.drafters.tree import CHUNK, Grower
from dovetail.workers.models.backends.device.levels import Ranked, joined
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Cache, Paths, Segment
from dovetail.workers.sessions.prefill import TURN_TAIL, next_stop
from dovetail.workers.sessions.prefix_cache import Left
from dovetail.workers.sessions.room import base_rows, check_rows, host_row_bytes
from dovetail.workers.speculation.growth import NO_ROW, Nodes
from dovetail.workers.speculation.policies import open_policy
from dovetail.workers.speculation.proposal import Shape
from dovetail.workers.speculation.score_calibration import Scale

SHARPENING = 1.0
"""The initial value of sharpening "auto". Committed tokens a round on 16 of the demonstration
prompts with the embedded pair, gamma 15, depth 8, width 10: at 0.3 / 0.5 / 0.8 / 1.0 / 1.25 they
are 5.62 / 5.66 / 5.78 / 5.74 / 5.62 at temperature 0 and 5.02 / 4.96 / 5.08 / 5.15 / 4.87 at
temperature 1; sharper scores grow more nodes (388 a round at 0.3, 329 at 1.0)."""
SUBSTITUTE_SHARPENING = 0.2  # the sharpening of a target's own substitute (SubSpec, section 4.2)

Passes = Generator[Rows, Ranked, Ranked]
"""Yields rows, receives the results, and returns those of the last rows."""
Steps = Generator[Rows, Ranked, Tensor]


@dataclass(kw_only=True)
class DraftSession(GrowingSession):
    """One sequence. `room`: the number of tokens that fit into the draft's context. `text`: the log
    in the draft's tokens; None: they are the target's."""

    room: int
    text: Retokenised | None = None
    ids: list[int] = field(init=False)
    """The log in the draft's tokens: the same list as `log` or that of `text`, which grow."""

    def __post_init__(self) -> None:
        self.ids = self.log if self.text is None else self.text.tokens

    @property
    def readable(self) -> bool:
        """Whether the log fits into the draft's context."""
        return len(self.ids) <= self.room

    @property
    def missing_rows(self) -> int:
        return len(self.ids) - self.rows

    def within_reach(self, shape: Shape) -> Shape:
        """`shape`, also limited to the levels for which the draft's context has room."""
        shape = super().within_reach(shape)
        if self.text is not None and self.text.waiting:
            return Shape(shape.nodes, 0, shape.width)
        return Shape(shape.nodes, min(shape.depth, self.room - len(self.ids) + 1), shape.width)


@dataclass(frozen=True)
class DraftLeft(Left):
    """A log with its rows as far as it has been read: missing ones will be computed. `ids`: the
    tokens of a log that the draft reads in its own."""

    ids: Sequence[int] | None = None

    @property
    def there(self) -> int:
        return len(self.log)

    @property
    def whole(self) -> int:
        return self.cache.length if self.ids is None else 0

    def branch(self, kept: int) -> Self:
        return super().branch(kept if self.ids is None else self.cache.length)


class Drafter(Grower[DraftSession], Keeper[DraftSession]):
    """The engine of a small model; makes one pass at a time."""

    prompt_rows = CHUNK

    def __init__(
        self,
        model: LanguageModel,
        spans: Spans,
        *,
        ahead: bool = False,
        merges: bool = False,
        sharpening: float = SHARPENING,
        translation: Translation | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`ahead`: give sessions rows for growth ahead. `merges`: see `Grower`; not with a
        translation, since a guess may have no token of the model's. `sharpening`: the initial value
        of "auto". `translation`: to the vocabulary of the target, if it is not the model's."""
        scale, merges = Scale(sharpening, noise_share=1.0), merges and translation is None
        super().__init__(spans, scale, ahead=ahead, merges=merges, clock=clock)
        self.model, self.translation = model, translation
        self.vocabulary_size = (
            model.vocabulary_size if translation is None else translation.facts.size
        )
        if translation is not None:
            self.prompt_rows = 0  # the target's chunks are not those of its own tokens
        self._row_bytes, self._base_rows = host_row_bytes(model), base_rows(model.new_cache(0))

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raise `RequestError` of code "vocabulary" if one of `tokens` is outside the model's
        vocabulary, or of the one that it translates."""
        if (largest := max(tokens)) >= (size := self.vocabulary_size):
            text = f"token {largest} is beyond the draft's vocabulary of {size}"
            raise RequestError("vocabulary", f"{text}; choose a draft of the same family")

    def open(self, order: Open, base: DraftLeft | None = None) -> DraftSession:
        """Open a session and prefill its prompt, or its first `order.read` rows, if it fits into
        the context. `base`: the rows of a session that began with the first `kept` tokens; it must
        not be used any more."""
        room, text = min(order.capacity, self.model.context), None
        rows, kept = self._tree_rows(order.sampling, order.tree), order.kept
        if self.translation is not None:
            room, text = self.model.context, Retokenised(self.translation, order.prompt)
            if base is not None:
                assert base.ids is not None
                kept = min(shared_length(base.ids, text.tokens), len(text.tokens) - 1)
        ids = order.prompt if text is None else text.tokens
        slots = room if text is None else min(room, len(ids) + order.capacity)
        log = list(order.prompt)
        session = DraftSession(
            log=log,
            tree=self._new_tree(),
            looked_up=self._look_up(order, log),
            ranking=self._ranking(order),
            policy=open_policy(order.tree),
            depth=order.tree.most_levels,
            capacity=order.capacity,
            cache=self._open_cache(slots + rows, base, kept)
            if len(ids) <= room
            else self.model.new_cache(0),
            rows_ahead=rows,
            room=room,
            text=text,
        )
        if session.readable and order.read != 0:
            self.read(session, order.read)
        return session

    def read(self, session: DraftSession, rows: int | None) -> None:
        """Prefill at most `rows` more rows of the log; None: all of them."""
        with self._spans.measure("prefill"):
            read_alone(self._read_missing(session, rows), self.compute)

    def rows(self, session: DraftSession) -> tuple[int, int]:
        return session.rows, session.missing_rows if session.readable else 0

    def _ranking(self, order: Open) -> Ranking:
        return Ranking.begin(
            order,
            most_tokens=self.vocabulary_size,
            score_calibration=self.score_calibration,
            device=self.model.device,
            constrained=self.constrained(order),
        )

    def keep(self, session: DraftSession) -> DraftLeft:
        session.cache.resize(session.cache.length)
        return self._left(session, 0)

    def left(self, session: DraftSession) -> DraftLeft:
        return self._left(session, session.tree.rows_used)

    def _left(self, session: DraftSession, used: int) -> DraftLeft:
        ids = None if session.text is None else session.text.tokens
        return DraftLeft(session.log, session.cache, used, ids)

    def restored(self, log: list[int], cache: Cache) -> DraftLeft:
        return DraftLeft(log, cache)

    @property
    def shares(self) -> bool:
        return self.model.new_cache(0).branches

    def _open_cache(self, rows: int, base: DraftLeft | None, kept: int) -> Cache:
        """Return a cache for `rows` rows: empty, or with those of the first `kept` tokens of
        another session."""
        if base is None:
            check_rows(rows + self._base_rows, 0, self._row_bytes)
            return self.model.new_cache(rows)
        base.cache.truncate(base.cache.restorable(min(kept, base.cache.length)))
        self._resize(base.cache, rows)
        return base.cache

    def _resize(self, cache: Cache, rows: int) -> None:
        check_rows(rows + self._base_rows, 0, self._row_bytes)
        cache.resize(rows)

    def _way(self, session: DraftSession, tokens: Sequence[int]) -> list[int]:
        """Follow the nodes as far as they agree with the log in the draft's tokens. Appended text
        may change the last of these; the rows of changed tokens are dropped."""
        way = super()._way(session, tokens)
        if self.translation is None or session.text is None:
            return way
        ids, cache, count = session.text.tokens, session.cache, len(session.text.tokens)
        same = session.text.extend(tokens)
        nodes = self.translation.own[session.tree.tokens[way]].tolist() if way else []
        agreed = shared_length(nodes, ids[count:]) if same == count else 0
        if agreed == len(tokens) == len(ids) - count:
            return way
        # the last token is computed again: its logits are needed
        way = way[: max(0, min(agreed, len(tokens) - 1, len(ids) - 1 - count))]
        if session.readable and len(ids) + session.rows_ahead > cache.capacity:
            way = []
        if not way:
            cache.truncate(cache.restorable(min(cache.length, same, len(ids) - 1)))
        if session.readable and len(ids) + session.rows_ahead > cache.capacity:
            self._resize(cache, min(2 * len(ids), session.room) + session.rows_ahead)
        return way

    def _move_root(
        self, session: DraftSession, path: Sequence[int], root: int | None, width: int
    ) -> None:
        """Turn the rows of the accepted nodes into rows of the log, and keep the subtree below the
        new root."""
        tree, cache = session.tree, session.cache
        way = path if root is None else (*path, root)
        # a node with children in the pool has a row: only the last node of the path may lack one
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
        own = self.translation
        return found.logits if own is None else own.logits(found.logits)

    def _read_few(self, session: DraftSession) -> Passes:
        """Compute the missing rows of the log in the fixed shapes of a level."""
        cache, tokens = session.cache, session.ids[session.cache.length :]
        start, count = cache.length, len(tokens)
        found = yield Rows(
            torch.tensor(tokens),
            torch.arange(start, start + count),
            Segment(cache, start, count, Paths.growing(start, count)),
            wanted=1,
            ranking=session.ranking_of(THE_ROOT) if self.translation is None else None,
        )
        cache.keep(range(start, start + count), count)
        return found

    def _read_missing(self, session: DraftSession, rows: int | None = None) -> Passes:
        """Compute the missing rows of the log, or the first `rows` of them; return the last one's
        result."""
        cache, found, ids = session.cache, Ranked(EMPTY, None), session.ids
        told = len(ids)
        stop = told if rows is None else cache.length + rows
        while missing := ids[cache.length : min(stop, next_stop(cache, told, CHUNK))]:
            start, count = cache.length, len(missing)
            tokens, positions = torch.tensor(missing), torch.arange(start, start + count)
            found = yield Rows(tokens, positions, Segment(cache, start, count), wanted=1)
            cache.keep(range(start, start + count), count)
            if cache.length == told - TURN_TAIL:
                cache.checkpoint()
        return found

    def _read_nodes(self, session: DraftSession, nodes: Nodes, shape: Shape) -> Steps:
        tree, cache = session.tree, session.cache
        segment_start = cache.length + tree.rows_used
        tree.give_rows(nodes)
        segment = Segment(
            cache, segment_start, len(nodes), Paths.behind(cache.length, *tree.lineage(nodes))
        )
        own = tree.tokens[nodes].astype(np.int64)
        tokens = torch.from_numpy(own if self.translation is None else self.translation.own[own])
        positions = torch.from_numpy(len(session.ids) - 1 + tree.levels[nodes].astype(np.int64))
        return (yield from self._ranked(session, nodes, tokens, positions, segment))

    def _ranked(
        self,
        session: DraftSession,
        nodes: Nodes,
        tokens: Tensor,
        positions: Tensor,
        segment: Segment,
    ) -> Steps:
        """Compute the rows of `nodes`; where passes over the target's vocabulary are captured, the
        device also ranks their children."""
        own = self.translation
        ranking = session.ranking_of(nodes) if own is None and self.model.captures else None
        found = yield Rows(tokens, positions, segment, len(nodes), ranking=ranking)
        session.note_ranking(nodes, found.best)
        return found.logits if own is None else own.logits(found.logits)

    def compute(self, parts: Sequence[Rows]) -> Sequence[Ranked]:
        """Compute parts: if levels are captured, all levels in one pass and the others one by one;
        else all in one pass."""
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
