"""Prefill of a log, chunk by chunk, with the requested features and scores."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dovetail.protocol.messages import Open, Reads
from dovetail.protocol.spans import Spans
from dovetail.workers.devices.memory import without_graphs
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Cache, Segment
from dovetail.workers.sessions.features import PREFILL_ROWS, features_of, places_of, slices
from dovetail.workers.sessions.logprobs import token_logprobs
from dovetail.workers.sessions.results import Part, ScoredPart
from dovetail.workers.sessions.timing import timed_pass

TURN_TAIL = 16
"""Rows between a checkpoint of the cache and the end of the prompt: the next turn of a conversation
differs from where the template prompts for the reply, some tokens before the end."""


def next_stop(cache: Cache, stop: int, step: int) -> int:
    """Return the row at which the next pass ends: at most `step` rows on, and not beyond the
    checkpoint before the end if the cache has states."""
    start, mark = cache.length, stop - TURN_TAIL
    return min(start + step, mark if cache.base_bytes and start < mark else stop)


class Reading:
    """A log that is prefilled in chunks, with the features and scores to send."""

    def __init__(
        self,
        log: Sequence[int],
        cache: Cache,
        *,
        reads: Reads | None = None,
        features_from: int = 0,
        scored: int | None = None,
        apart: int = 0,
    ) -> None:
        """`cache` has the first rows of `log`, or none. `reads`: the features to send, of positions
        from `features_from` on; `scored`: how many alternatives each token's score has, None for no
        scores; `apart`: the number of first rows that the model's prefill device reads."""
        self.log, self.cache, self.apart = log, cache, apart
        self.logits = torch.empty(0)
        """[1, V] after the last token, once all rows have been computed."""
        self._reads, self._features_from, self._scored = reads, features_from, scored
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
        return next_stop(self.cache, len(self.log), most) - self.cache.length

    def places(self, rows: int) -> Collection[int]:
        """Return the layers whose states are needed for the next `rows` rows."""
        return places_of(self._reads) if self._features_from < self.done + rows else ()

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
        if self._reads is not None and unwanted < rows:
            wanted = slice(first + unwanted, first + rows)
            yield from slices(Part(start + unwanted, features_of(self._reads, states, wanted)))
        tokens = self.log[start + 1 : start + 1 + rows]
        if self._scored is not None and tokens:
            scores = token_logprobs(logits[: len(tokens)], tokens, self._scored)
            yield ScoredPart(start + 1, scores)

    def _mark(self) -> None:
        """Checkpoint the cache shortly before the end of its prompt."""
        if self.cache.length == len(self.log) - TURN_TAIL:
            self.cache.checkpoint()


class Prefill:
    """Prefills logs in separate passes."""

    def __init__(self, model: LanguageModel, spans: Spans, *, reads_from: int) -> None:
        """`reads_from`: the fewest rows of a prompt for the model's prefill device, if it has
        one."""
        self._model, self._spans, self._reads_from = model, spans, reads_from

    def begin(self, order: Open, cache: Cache) -> Reading:
        """Return a Reading of a prompt; the cache has its first rows, or none."""
        return Reading(
            order.prompt,
            cache,
            reads=order.features,
            features_from=order.features_from or 0,
            scored=(order.logprobs or 0) if order.scored else None,
            apart=self._rows_apart(order, cache),
        )

    def begin_anew(self, log: Sequence[int], reads: Reads, start: int, prefix: int) -> Reading:
        """Return a Reading of the first `prefix` - 1 tokens of a log in a new cache, for the
        features of positions from `start` on."""
        rows = max(0, prefix - 1)
        return Reading(log[:rows], self._model.new_cache(rows), reads=reads, features_from=start)

    def _rows_apart(self, order: Open, cache: Cache) -> int:
        """Return how many rows of a prompt the prefill device reads. It counts only the request's
        own prompt, so that in a reopened session the device reads the same rows, and those of the
        reply are computed as before. It stops at the checkpoint before the end."""
        told = len(order.prompt) - order.replied
        apart = (
            self._model.reads_apart > 0
            and not order.scored
            and not cache.length
            and told >= self._reads_from
        )
        return next_stop(cache, told, self._model.reads_apart) if apart else 0

    def read(self, reading: Reading, rows: int | None = None) -> Iterator[Part | ScoredPart]:
        """Compute and commit the next `rows` rows of a log, or all, in as many passes as needed.
        Those for the model's prefill device come first, all at once."""
        if reading.apart and not reading.done:
            yield from self._read_apart(reading, reading.apart)
        stop = len(reading.log) if rows is None else min(reading.done + rows, len(reading.log))
        step = PREFILL_ROWS if reading.scored else self.rows
        while (left := stop - reading.done) > 0:
            yield from self._read(reading, reading.next_rows(min(step, left)))

    @property
    def rows(self) -> int:
        """Rows of a prefill pass that computes only the last row's logits."""
        return max(PREFILL_ROWS, self._model.prompt_rows)

    def _read(self, reading: Reading, rows: int) -> Iterator[Part | ScoredPart]:
        start = reading.done
        with timed_pass(self._spans):
            logits, states = without_graphs(
                lambda: self._model.forward_with_states(
                    torch.tensor(reading.log[start : start + rows]),
                    torch.arange(start, start + rows),
                    [reading.segment(rows)],
                    wanted=reading.places(rows),
                    rows=None if reading.scored else torch.tensor([rows - 1]),
                )
            )
        return reading.take(rows, logits, states, 0)

    def _read_apart(self, reading: Reading, rows: int) -> Iterator[Part | ScoredPart]:
        logits, states = self._model.read_apart(
            torch.tensor(reading.log[:rows]),
            reading.segment(rows),
            wanted=reading.places(rows),
            rows=torch.tensor([rows - 1]),
        )
        return reading.take(rows, logits, states, 0)
