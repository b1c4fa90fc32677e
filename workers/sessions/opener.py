"""Opens a target's sessions: prompts, and logs of sessions that began elsewhere, are prefilled, in
chunks or whole; features of logs are recomputed for drafts that join later. Sessions are token logs
and caches here, without trees."""

from collections.abc import Callable, Iterator, Sequence

import torch

from dovetail.protocol.errors import RequestError, StaleError
from dovetail.protocol.grammar import GrammarVocabulary
from dovetail.protocol.messages import Open, ReadItem, Reads
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import TokenTree
from dovetail.workers.devices.memory import HELD, without_graphs, without_spare
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Cache
from dovetail.workers.sessions.blocks import BlockStore, Source
from dovetail.workers.sessions.choosing import Asked, outcome_of
from dovetail.workers.sessions.features import PREFILL_ROWS, HeldFeatures
from dovetail.workers.sessions.prefill import Reading, last_block, next_stop
from dovetail.workers.sessions.prefix_cache import KeptSessions, Left
from dovetail.workers.sessions.results import First, Part, ScoredPart, Unread
from dovetail.workers.sessions.room import base_rows, check_rows, host_row_bytes
from dovetail.workers.sessions.rounds import check_chunk, find_session
from dovetail.workers.sessions.session import TargetSession
from dovetail.workers.sessions.timing import timed_pass
from dovetail.workers.speculation.constrained import Constrained
from dovetail.workers.speculation.history import looks_back
from dovetail.workers.speculation.noise import NoiseCache
from dovetail.workers.speculation.rejection import ProposalProbabilities
from dovetail.workers.speculation.sampling import LookingBack

MAX_SESSIONS = 1024
"""Maximum number of sessions of a target; memory is the real bound. A pass has up to 64 trees."""
FEW_SESSIONS = 64
"""Maximum number of sessions of a target over several devices, if it is unknown how many fit."""
ReadingStep = Part | ScoredPart | Unread | First


class Opener:
    """Opens the sessions of a target."""

    def __init__(
        self,
        model: LanguageModel,
        spans: Spans,
        *,
        kept_tokens: int = 0,
        reads_from: int = 1,
        blocks: BlockStore | None = None,
    ) -> None:
        """`kept_tokens`: the maximum number of kept tokens of ended sessions. `reads_from`: the
        minimum number of prompt rows for the model's prefill device, if it has one. `blocks`: of
        cached prompts; None: none are stored."""
        self._model, self._spans, self._reads_from = model, spans, reads_from
        self._row_bytes, self._base_rows = host_row_bytes(model), base_rows(model.new_cache(0))
        self._sessions: dict[int, TargetSession] = {}
        self._begun: dict[int, Reading] = {}  # by session: logs that are partly prefilled
        self.kept: KeptSessions[Left] = KeptSessions(kept_tokens, self._base_rows)
        self.blocks = blocks
        self.rows_beside: Callable[[Sampling, TreeSettings], int] = lambda _sampling, _tree: 0
        """Returns the additional slots of a session's cache for a draft that shares it."""
        HELD.add(self)

    def __len__(self) -> int:
        """Return how many sessions are open, or being opened."""
        return len(self._sessions) + len(self._opening)

    def __contains__(self, session: int) -> bool:
        """Return whether a session is open or kept: its number is taken."""
        return session in self._sessions or session in self.kept or session in self._begun

    def let_go(self) -> None:
        """Free the rows of ended sessions; sessions that would have reused them start from
        scratch."""
        self.kept.clear()
        if self.blocks is not None:
            self.blocks.let_go()

    def let_graphs_go(self) -> bool:
        """Return False: graphs are held by the arenas of caches."""
        return False

    @property
    def prompt_rows(self) -> int:
        """The rows in a chunk of a prompt while no other session waits, and in a pass over a prompt
        that computes only the last row's logits."""
        return max(PREFILL_ROWS, self._model.prompt_rows)

    @property
    def _opening(self) -> Sequence[TargetSession]:
        return [begun.session for begun in self._begun.values() if not begun.refeed]

    def open(self, order: Open) -> Iterator[ReadingStep]:
        """Prefill the prompt of a new session, or its first `order.read` rows. Yield the requested
        features or scores as they are computed, then the first token of the reply, or Unread if
        rows are left."""
        self._check(order)
        own = order.capacity + order.tree.most_nodes
        rows = own + self.rows_beside(order.sampling, order.tree)
        promised = sum(
            max(0, session.own - session.cache.length)
            for session in (*self._sessions.values(), *self._opening)
        )  # what open sessions may still take
        check_rows(rows + self._base_rows, promised, self._row_bytes)
        restored: Source = ""
        if self.blocks is not None and order.base is None and order.kept:
            cache, restored = self.blocks.restore(order, rows)
        else:
            kept = self.kept.base(order, self._open_base(order.base))
            cache = self._open_cache(rows, kept, order.kept)
        session = self._begin(order, cache, own)
        session.restored = restored
        if self.blocks is not None and order.scope:
            session.chain = self.blocks.chain(order.scope, last_block(len(order.prompt)))
        reading = Reading(
            session,
            order.prompt,
            session.cache,
            order.round,
            reads=order.features,
            features_from=order.kept if order.features_from is None else order.features_from,
            scored=(order.logprobs or 0) if order.scored else None,
            apart=self._rows_apart(order, session.cache),
        )
        yield from self._read(order.session, reading, order.read)

    def read(self, item: ReadItem) -> Iterator[ReadingStep]:
        """Prefill the next chunk of a log, given by a checked item. Yields the same as the `open`
        or `refeed` that started the log."""
        yield from self._read(item.session, self._begun[item.session], item.rows)

    def _read(self, number: int, reading: Reading, rows: int | None) -> Iterator[ReadingStep]:
        """Prefill the next `rows` rows of a log, or all, in as many passes as needed; those for the
        model's prefill device come first, all at once. If this fails, or is not run to its end, the
        log has to be started again."""
        self._begun.pop(number, None)
        with self._spans.measure("prefill"):
            if reading.apart and not reading.done:
                yield from self._read_rows(reading, reading.apart, apart=True)
            stop = len(reading.log) if rows is None else min(reading.done + rows, len(reading.log))
            step = PREFILL_ROWS if reading.scored else self.prompt_rows
            while (left := stop - reading.done) > 0:
                yield from self._read_rows(reading, reading.next_rows(min(step, left)))
            end = self._end(number, reading)
        if end is not None:
            yield end

    def _read_rows(
        self, reading: Reading, rows: int, *, apart: bool = False
    ) -> Iterator[Part | ScoredPart]:
        """Compute and commit the next rows of a log in one pass, `apart` on the prefill device."""
        start, segment, wanted = reading.done, reading.segment(rows), reading.places(rows)
        tokens, last = torch.tensor(reading.log[start : start + rows]), torch.tensor([rows - 1])
        if apart:
            found = self._model.read_apart(tokens, segment, wanted=wanted, rows=last)
            return reading.take(rows, *found, 0)
        with timed_pass(self._spans):
            found = without_graphs(
                lambda: self._model.forward_with_states(
                    tokens,
                    torch.arange(start, start + rows),
                    [segment],
                    wanted=wanted,
                    rows=None if reading.scored else last,
                )
            )
        return reading.take(rows, *found, 0)

    def _rows_apart(self, order: Open, cache: Cache) -> int:
        """Return how many rows of a prompt the prefill device reads. Only the request's own
        prompt counts, so that when a session is reopened, here or elsewhere, the device reads the
        same rows, and those of the reply are computed as before. It stops at the checkpoint before
        the end."""
        prompt, apart = len(order.prompt) - order.replied, self._model.reads_apart
        if not apart or order.scored or cache.length or prompt < self._reads_from:
            return 0
        return next_stop(cache, prompt, apart)

    def _end(self, number: int, reading: Reading) -> Unread | First | None:
        """Return Unread if rows of a log are left; else open the session and return its first
        token, or None if the log was prefilled to recompute features."""
        session = reading.session
        if reading.left:
            self._begun[number] = reading
            return Unread(reading.done)
        if reading.refeed:
            session.reads, session.held = reading.reads, HeldFeatures()
            return None
        _, bonus, (margin,) = outcome_of(
            Asked(session, reading.logits, TokenTree(), ProposalProbabilities.nothing())
        )
        logprobs = session.scores(reading.logits, [0], [bonus])
        session.extend([bonus])
        self._sessions[number] = session
        first = logprobs[0] if logprobs else None
        return First(bonus, margin, first, reading.apart > 0, session.restored)

    def _begin(self, order: Open, cache: Cache, own: int) -> TargetSession:
        """Return a session whose prompt is not prefilled yet."""
        sampling, size, device = order.sampling, self._model.vocabulary_size, self._model.device
        coupled = sampling.temperature > 0.0 and not sampling.rejects
        suppressed = self._model.suppressed
        back = (
            LookingBack(
                sampling,
                order.prompt,
                order.end,
                size,
                device,
                replied=order.replied,
                suppressed=suppressed,
                constrained=self._constrained(order),
            )
            if looks_back(sampling) or suppressed or order.constraint is not None
            else None
        )
        return TargetSession(
            list(order.prompt),
            cache,
            order.capacity,
            sampling,
            order.tree,
            order.key,
            NoiseCache(order.key, size, device) if coupled else None,
            back,
            order.features,
            order.logprobs,
            order.round,
            own,
        )

    def _constrained(self, order: Open) -> Constrained | None:
        """Return the grammar of a session at the beginning of its reply, if it has one. Raises
        `RequestError` of code "constraint" for one that cannot be followed."""
        if order.constraint is None:
            return None
        own = self._model.checkpoint
        vocabulary = GrammarVocabulary.of(own.table, own.vocabulary)
        return Constrained(vocabulary.follow(order.constraint))

    def refeed(
        self,
        number: int,
        reads: Reads,
        start: int,
        prefix: int,
        *,
        round: int = 0,
        rows: int | None = None,
    ) -> Iterator[ReadingStep]:
        """Recompute the features of positions `start` to `prefix` - 2 of a session's log, in a
        separate cache; `rows`: only this many rows now. Once all are computed, verdicts come with
        features."""
        session = find_session(self._sessions, number)
        self._check_reads(reads)
        if prefix > (tokens := len(session.log)):
            text = f"features of {prefix} tokens were requested, but the log here has {tokens}"
            raise RequestError("prefix", f"session {number}: {text}")
        count = max(0, prefix - 1)
        log, cache = session.log[:count], self._model.new_cache(count)
        reading = Reading(session, log, cache, round, reads=reads, refeed=True, features_from=start)
        yield from self._read(number, reading, rows)

    def recomputes(self, number: int, round: int) -> bool:
        """Return whether features of a session are being recomputed for the Refeed of this
        round."""
        begun = self._begun.get(number)
        return begun is not None and begun.refeed and begun.round == round

    def check_read(self, item: ReadItem) -> None:
        """Raise `StaleError` or `RequestError` for a chunk of a log that cannot be prefilled."""
        begun = self._begun.get(item.session)
        if begun is None or begun.round != item.round:
            if item.session in self._sessions:
                raise StaleError(f"the log of session {item.session} has already been read")
            raise RequestError(
                "session", f"session {item.session} is not being read here; open it first"
            )
        check_chunk(item, begun.done)

    def _check(self, order: Open) -> None:
        """Raise `RequestError` for a session that this target cannot serve."""
        prompt, tokens, capacity = order.prompt, len(order.prompt), order.capacity
        context, size = self._model.context, self._model.vocabulary_size
        if tokens >= context:
            raise RequestError(
                "prompt_too_long",
                f"the prompt has {tokens} tokens; the model's context of {context} has room for "
                f"at most {context - 1}",
            )
        if not tokens < capacity <= context:
            raise RequestError(
                "capacity",
                f"a capacity of {capacity} tokens is not between the prompt's {tokens} and "
                f"the context's {context}",
            )
        if len(self) >= MAX_SESSIONS:
            raise RequestError(
                "capacity",
                f"{MAX_SESSIONS} sessions are open, the most that this worker holds; close one",
            )
        biased = max((token for token, _ in order.sampling.logit_bias), default=0)
        for what, token in (("the prompt has", max(prompt)), ("logit_bias names", biased)):
            if token >= size:
                text = f"{what} token {token}, beyond the vocabulary of {size}"
                raise RequestError("vocabulary", text)
        self._check_reads(order.features)
        self._constrained(order)
        if order.scored and order.base is not None:
            raise RequestError(
                "protocol",
                f"cannot score a prompt that reuses rows of session {order.base}: reused rows have "
                "no logits",
            )

    def _check_reads(self, reads: Reads | None) -> None:
        """Raise `RequestError` unless the features that a draft reads are this model's."""
        own = (self._model.hidden_size, self._model.vocabulary_size, self._model.layers)
        if reads is not None and (
            (reads.width, reads.vocabulary_size) != own[:2] or max(reads.taps, default=0) > own[2]
        ):
            text = (
                f"width {reads.width}, vocabulary {reads.vocabulary_size} and layers "
                f"{reads.taps}, where this model has width {own[0]}, vocabulary {own[1]}"
            )
            raise RequestError(
                "settings",
                f"features of {text} and {own[2]} layers were requested: use a draft that was made "
                "for this target",
            )

    def _open_base(self, number: int | None) -> Left | None:
        """Return the log and the rows of a session that is open, or being opened."""
        begun = self._begun.get(number or 0)
        session = self._sessions.get(number or 0) if begun is None else begun.session
        return None if session is None else Left(session.log, session.cache)

    def _open_cache(self, rows: int, base: Left | None, kept: int) -> Cache:
        """Return a cache for `rows` rows: empty, or with the first `kept` rows of `base`, or as
        many as can be restored. If there is no memory for it, kept sessions are dropped first."""
        if base is None:
            return without_spare(lambda: self._model.new_cache(rows))
        base.cache.truncate(base.cache.restorable(kept))
        without_spare(lambda: base.cache.resize(rows))
        return base.cache
