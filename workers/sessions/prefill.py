"""The reading of a prompt: its rows, part by part, with the features and scores of them that are
asked for."""

from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from dovetail.protocol.messages import Open, Reads
from dovetail.protocol.spans import Spans
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Cache, Segment
from dovetail.workers.sessions.features import PREFILL_ROWS, features_of, places_of, slices
from dovetail.workers.sessions.results import Part, ScoredPart
from dovetail.workers.sessions.session import TargetSession
from dovetail.workers.sessions.timing import timed_pass
from dovetail.workers.speculation.logprobs import token_logprobs

TURN_TAIL = 16
"""Rows at the end of a prompt behind a checkpoint of the cache: the next turn of a conversation
parts from this one where a template asks for the reply, some tokens before the end."""


def next_stop(cache: Cache, stop: int, step: int) -> int:
    """Return up to which row a prompt is read into a cache in the next pass: at most `step` rows,
    not beyond the checkpoint before its end, if the cache has a state to make one of."""
    start, mark = cache.length, stop - TURN_TAIL
    return min(start + step, mark if cache.base_bytes and start < mark else stop)


class Prefill:
    """Reads prompts into caches."""

    def __init__(self, model: LanguageModel, spans: Spans, *, reads_from: int) -> None:
        """`reads_from`: the fewest rows of a prompt for which the model's reader is used, where it
        has one."""
        self._model, self._spans, self._reads_from = model, spans, reads_from

    def rows_apart(self, order: Open, cache: Cache) -> int:
        """Return how many rows of a prompt the model's reader reads, of all that there are of the
        request's own prompt: a session that is begun anew elsewhere, or on the same worker, has the
        same rows read by it, and those of its reply computed as they were. A state is left in time
        for the checkpoint before the end."""
        told = len(order.prompt) - order.replied
        apart = (
            self._model.reads_apart > 0
            and not order.scored
            and not cache.length
            and told >= self._reads_from
        )
        return next_stop(cache, told, self._model.reads_apart) if apart else 0

    def read(
        self, session: TargetSession, order: Open, apart: int
    ) -> Generator[Part | ScoredPart, None, Tensor]:
        """Compute and commit the rows of the prompt that are missing, some at a time; return the
        logits [1, V] after its last token. `apart`: the first rows that the model's reader
        reads."""
        features_from, scored = order.features_from or 0, order.scored
        logits = torch.empty(0)
        if apart:
            logits, part = self._read(
                session.log[:apart],
                session.cache,
                session.reads,
                features_from=features_from,
                apart=True,
            )
            yield from slices(part)
        step, told = PREFILL_ROWS if scored else self._step, len(session.log)
        self._mark(session.cache, told)
        while (start := session.cache.length) < told:
            chunk = session.log[start : next_stop(session.cache, told, step)]
            logits, part = self._read(
                chunk, session.cache, session.reads, features_from=features_from, all_logits=scored
            )
            yield from slices(part)
            if scored and (tokens := session.log[start + 1 : start + 1 + len(chunk)]):
                yield ScoredPart(
                    start + 1, token_logprobs(logits[: len(tokens)], tokens, session.logprobs or 0)
                )
            self._mark(session.cache, told)
        return logits[-1:]

    def _mark(self, cache: Cache, told: int) -> None:
        """Make a checkpoint of a cache before the end of its prompt."""
        if cache.length == told - TURN_TAIL:
            cache.checkpoint()

    def recompute(
        self, log: Sequence[int], reads: Reads, start: int, prefix: int
    ) -> Iterator[Part]:
        """Compute the features of the positions `start` to `prefix` - 2 of a log anew, in a
        cache of their own."""
        rows = max(0, prefix - 1)
        cache = self._model.new_cache(rows)
        step = self._step
        for first in range(0, rows, step):
            _, part = self._read(
                log[first : min(first + step, rows)], cache, reads, features_from=start
            )
            yield from slices(part)

    @property
    def _step(self) -> int:
        """Rows of a prefill pass that computes the logits of the last one alone."""
        return max(PREFILL_ROWS, self._model.prompt_rows)

    def _read(
        self,
        tokens: Sequence[int],
        cache: Cache,
        reads: Reads | None,
        *,
        features_from: int,
        all_logits: bool = False,
        apart: bool = False,
    ) -> tuple[Tensor, Part | None]:
        """Compute and commit the rows of `tokens`, which stand behind those of `cache`; return the
        logits after the last or all of them, and the features of the rows from `features_from` on,
        if a draft reads them and there are any. `apart`: by the model's reader."""
        start, count = cache.length, len(tokens)
        unwanted = min(max(0, features_from - start), count)
        places = places_of(reads) if unwanted < count else ()
        last = torch.tensor([count - 1])
        positions, segment = torch.arange(start, start + count), Segment(cache, start, count)
        if apart:
            logits, states = self._model.read_apart(
                torch.tensor(tokens), segment, wanted=places, rows=last
            )
        else:
            rows = None if all_logits else last
            with timed_pass(self._spans):
                logits, states = self._model.forward_with_states(
                    torch.tensor(tokens), positions, [segment], wanted=places, rows=rows
                )
        cache.keep(range(start, start + count), count)
        if reads is None or not places:
            return logits, None
        return logits, Part(start + unwanted, features_of(reads, states, slice(unwanted, None)))
