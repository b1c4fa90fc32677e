"""Prefill of a log, chunk by chunk, with the requested features and scores."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dovetail.protocol.messages import Reads
from dovetail.protocol.prefixes import BLOCK_TOKENS
from dovetail.workers.models.segment import Cache, Segment
from dovetail.workers.sessions.features import features_of, places_of, slices
from dovetail.workers.sessions.logprobs import token_logprobs
from dovetail.workers.sessions.results import Part, ScoredPart
from dovetail.workers.sessions.session import TargetSession

TURN_TAIL = 16
"""Rows between a checkpoint of the cache and the end of the prompt: the next turn of a conversation
differs from where the template prompts for the reply, some tokens before the end."""


def last_block(stop: int) -> int:
    """Return the rows of a prompt's whole blocks before the checkpoint of its cache."""
    return max(0, stop - TURN_TAIL) // BLOCK_TOKENS * BLOCK_TOKENS


def next_stop(cache: Cache, stop: int, step: int, block: int = 0) -> int:
    """Return the row at which the next pass ends: at most `step` rows on, and, if the cache has
    states, not beyond `block` rows, where they are stored, and the checkpoint before the end."""
    start = cache.length
    marks = (block, stop - TURN_TAIL) if cache.base_bytes else ()
    return min(start + step, next((mark for mark in marks if start < mark), stop))


class Reading:
    """A log that is prefilled in chunks, with the features and scores to send."""

    def __init__(
        self,
        session: TargetSession,
        log: Sequence[int],
        cache: Cache,
        round: int,
        *,
        reads: Reads | None,
        refeed: bool = False,
        features_from: int = 0,
        scored: int | None = None,
        apart: int = 0,
    ) -> None:
        """`cache` has the first rows of `log`, or none. `round`: that of the command that began it.
        `reads`: the features to send, of positions from `features_from` on; `refeed`: they are
        recomputed for an open session, else the session is being opened. `scored`: how many
        alternatives each token's score has, None for no scores; `apart`: how many of the first
        rows the model's prefill device reads."""
        self.session, self.log, self.cache, self.round = session, log, cache, round
        self.refeed, self.reads, self.apart = refeed, reads, apart
        self.logits = torch.empty(0)
        """[1, V] after the last token, once all rows have been computed."""
        self._features_from, self._scored = features_from, scored
        self._mark()

    @property
    def done(self) -> int:
        """The number of rows in the cache."""
        return self.cache.length

    @property
    def left(self) -> int:
        """The number of missing rows."""
        return len(self.log) - self.cache.length

    @property
    def scored(self) -> bool:
        """Whether the logits of all rows are needed."""
        return self._scored is not None

    def next_rows(self, most: int) -> int:
        """Return how many rows the next pass may compute, at most `most`."""
        block = 0 if self.session.chain is None else self.session.chain.mark
        return next_stop(self.cache, len(self.log), most, block) - self.cache.length

    def places(self, rows: int) -> Collection[int]:
        """Return the layers whose states are needed for the next `rows` rows."""
        return places_of(self.reads) if self._features_from < self.done + rows else ()

    def logit_rows(self, rows: int) -> Sequence[int]:
        """Return which of the next `rows` rows need logits."""
        return range(rows) if self.scored else range(rows - 1, rows)

    def segment(self, rows: int) -> Segment:
        return Segment(self.cache, self.done, rows)

    def take(
        self, rows: int, logits: Tensor, states: Mapping[int, Tensor], first: int
    ) -> Iterator[Part | ScoredPart]:
        """Commit the next `rows` rows, and yield their features and scores. `logits` [R, V]: of
        their `logit_rows`; `states`: by layer of their `places`, [T, hidden] of the whole pass, in
        which the rows begin at `first`."""
        start = self.done
        self.cache.keep(range(start, start + rows), rows)
        if not self.left:
            self.logits = logits[-1:]
        self._mark()
        unwanted = min(max(0, self._features_from - start), rows)
        if self.reads is not None and unwanted < rows:
            wanted = slice(first + unwanted, first + rows)
            yield from slices(Part(start + unwanted, features_of(self.reads, states, wanted)))
        tokens = self.log[start + 1 : start + 1 + rows]
        if self._scored is not None and tokens:
            scores = token_logprobs(logits[: len(tokens)], tokens, self._scored)
            yield ScoredPart(start + 1, scores)

    def _mark(self) -> None:
        """Store the rows, and checkpoint the cache shortly before the end of its prompt."""
        if not self.refeed:
            self.session.store_rows()
        if self.cache.length == len(self.log) - TURN_TAIL:
            self.cache.checkpoint()
