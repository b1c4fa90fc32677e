"""The target's engine: prefill a prompt, verify trees, commit what is accepted.

A verification is one pass over the weights for the trees of several sessions. Each tree's rows -
its root, then its nodes - are written behind the session's committed rows, every row sees the
committed ones, the root and its own ancestors, and the rows of the accepted path move down to
become committed. The next root, the bonus, has no row yet. Every session is checked before the pass
and committed after it, so that a pass that fails changes nothing; after it, each session is judged
and committed for itself, and one whose commit fails half-way is forgotten.

A session whose draft reads its target gets features of every committed row, as they are computed:
of the prompt part by part, of a tree those of the root and the accepted nodes. In the same way the
tokens of a prompt are scored, where that is asked for. For a draft that joins later the features of
rows that have been committed are computed anew, beside the session.

A session that was begun elsewhere is opened with its token log for a prompt, and goes on as it
would have there.

What is left of a session that has ended, its log and its rows, can be kept for one that goes on
from it. A row is taken over as it is, so that this is for models alone that compute the same bytes
for it in whatever part of a prompt it stands.

Knows sessions as token logs and caches; nothing of messages about them beyond a `VerifyItem`, and
nothing of links.
"""

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dovetail.protocol.errors import RequestError, TreeError
from dovetail.protocol.messages import Reads, TokenLogprobs, VerifiedItem, VerifyItem
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import ROOT, TokenTree
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import PROMPT_ROWS, Cache, Paths, Segment
from dovetail.workers.models.states import LAST
from dovetail.workers.serving.failures import as_request_error
from dovetail.workers.sessions.prefix_cache import KeptSessions, check_prefix
from dovetail.workers.sessions.room import check_rows, host_row_bytes
from dovetail.workers.sessions.rounds import check_round, find_session
from dovetail.workers.sessions.timing import timed_pass
from dovetail.workers.sessions.wire import narrowed
from dovetail.workers.speculation.acceptance import walk
from dovetail.workers.speculation.logprobs import token_logprobs
from dovetail.workers.speculation.noise import NoiseCache
from dovetail.workers.speculation.rejection import Choices, Drawn, judge
from dovetail.workers.speculation.sampling import LookingBack, choose, process_logits

PREFILL_ROWS = PROMPT_ROWS
"""Rows of a prefill pass, unless weights stream; and of what is said of a prompt at a time."""
MAX_SESSIONS = 64
UNDRAWN: Mapping[int, Drawn] = {}


@dataclass(frozen=True)
class Part:
    """A part of a prompt has been read."""

    start: int
    features: Tensor
    """[n, row] of positions start, start + 1, ... in the type that was asked for."""


@dataclass(frozen=True)
class ScoredPart:
    """What the target thinks of tokens of a prompt."""

    start: int
    """Position of the first of them."""
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class First:
    """A prompt has been read, and its session is open: the first token of the reply."""

    token: int
    margin: float
    logprobs: TokenLogprobs | None
    """If they were asked for."""
    apart: bool = False
    """Whether the model's reader read the prompt."""


@dataclass(frozen=True)
class Verdict:
    """What a pass says of a session."""

    item: VerifiedItem
    reads: Reads | None
    features: Tensor | None = None
    """[1 + accepted, row] of the root and the accepted nodes, if the session's draft reads them."""


@dataclass(frozen=True)
class _Pass:
    """What a pass computed: for each item in turn a row of its root, then one of each node."""

    logits: Sequence[Tensor]
    """[M, V] for each item."""
    states: Mapping[int, Tensor]
    """[rows, hidden] of every place that one of the sessions reads."""
    starts: Sequence[int]
    """The row of each item's root."""


@dataclass
class _Session:
    log: list[int]
    """The prompt and every committed token; the last one is the root and has no row in the
    cache."""
    cache: Cache
    capacity: int
    sampling: Sampling
    tree: TreeSettings
    key: bytes
    noise: NoiseCache | None
    """None: greedy, or nothing is coupled."""
    looking_back: LookingBack | None
    """None: no processor looks back."""
    reads: Reads | None
    """What the session's draft reads of this target."""
    logprobs: int | None
    """With how many alternatives the target says what it thinks of each token; None: it does
    not."""
    round: int = 0
    own: int = 0
    """Slots of the cache that verification writes to; those behind them are somebody else's."""

    @property
    def places(self) -> Sequence[int]:
        """Where the states are that the draft reads."""
        return _places(self.reads)

    def scores(
        self, logits: Tensor, rows: Sequence[int], tokens: Sequence[int]
    ) -> tuple[TokenLogprobs, ...]:
        """What some rows of logits [M, V] say of the `tokens` that follow them, if that was asked
        for."""
        return () if self.logprobs is None else token_logprobs(logits[rows], tokens, self.logprobs)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append what has been committed."""
        self.log += tokens
        if self.looking_back is not None:
            self.looking_back.extend(tokens)


@dataclass(frozen=True)
class _Left:
    """What is left of a session."""

    log: list[int]
    cache: Cache
    """Rows of all of it but the last token."""

    def check(self, prompt: Sequence[int], kept: int) -> None:
        check_prefix(self.log, prompt, kept, there=self.cache.length)


class Verifier:
    """The sessions of a target. `RequestError` and `StaleError` say what cannot be done; then
    nothing has changed."""

    def __init__(
        self, model: LanguageModel, spans: Spans, *, kept_tokens: int = 0, reads_from: int = 1
    ) -> None:
        """`kept_tokens`: so many of sessions that have ended are kept at most. `reads_from`: the
        fewest rows of a prompt for which the model's reader is used, where it has one."""
        self._reads_from = reads_from
        self._model = model
        self._spans = spans
        self._row_bytes = host_row_bytes(model)
        self._sessions: dict[int, _Session] = {}
        self._kept: KeptSessions[_Left] = KeptSessions(kept_tokens)
        self.rows_beside: Callable[[Sampling, TreeSettings], int] = lambda _sampling, _tree: 0
        """Slots that a session's cache has besides, for a draft that shares it."""

    def __len__(self) -> int:
        """How many sessions are open."""
        return len(self._sessions)

    def __contains__(self, session: int) -> bool:
        """Whether a session is open, or kept: its number is taken."""
        return session in self._sessions or session in self._kept

    @property
    def kept(self) -> int:
        """Sessions that have ended and are kept."""
        return len(self._kept)

    def open(
        self,
        number: int,
        *,
        key: bytes,
        prompt: Sequence[int],
        capacity: int,
        sampling: Sampling,
        tree: TreeSettings,
        end: Sequence[int] = (),
        reads: Reads | None = None,
        base: int | None = None,
        kept: int = 0,
        logprobs: int | None = None,
        scored: bool = False,
        round: int = 0,
        replied: int = 0,
        features_from: int = 0,
    ) -> Iterator[Part | ScoredPart | First]:
        """Prefill the prompt of a new session that may grow to `capacity` tokens: its parts, if
        there are `reads`, as they are done, and the first token.

        `end`: ids that end the reply. `base`: a kept session whose rows of the first `kept` tokens
        this one takes over. `logprobs`: tokens come with their log-probabilities and those of so
        many others; if `scored`, the prompt's too, which then has no base. `round`: the last one
        that was done elsewhere, where the reply was begun and has the last `replied` tokens of the
        prompt. `features_from`: of rows before this one nobody wants features.
        """
        self._check_room(prompt, capacity)
        self._check_biases(sampling)
        self._check_reads(reads)
        if scored and base is not None:
            raise RequestError(
                "protocol",
                f"the prompt is to be scored, and session {base} to be its base: rows that are "
                "taken over have no logits",
            )
        own = capacity + tree.most_nodes
        self._check_memory(own + self.rows_beside(sampling, tree))
        left = self._kept.take(base, prompt, kept)
        with self._spans.measure("prefill"):
            coupled = sampling.temperature > 0.0 and not sampling.rejects
            noise = (
                NoiseCache(key, self._model.vocabulary_size, self._model.device)
                if coupled
                else None
            )
            size, device = self._model.vocabulary_size, self._model.device
            back = (
                LookingBack(sampling, prompt, end, size, device, replied=replied)
                if sampling.looks_back
                else None
            )
            cache = self._open_cache(own + self.rows_beside(sampling, tree), left, kept)
            session = _Session(
                list(prompt),
                cache,
                capacity,
                sampling,
                tree,
                key,
                noise,
                back,
                reads,
                logprobs,
                round,
                own,
            )
            told = len(prompt) - replied
            apart = (
                self._model.reads_apart > 0
                and not scored
                and not cache.length
                and told >= self._reads_from
            )
            logits = yield from self._prefill(
                session,
                scored,
                features_from,
                apart=min(told, self._model.reads_apart) if apart else 0,
            )
            _, bonus, (margin,) = _outcome(session, logits, TokenTree(), Drawn.nothing())
            said = session.scores(logits, [0], [bonus])
        session.extend([bonus])
        self._sessions[number] = session
        yield First(bonus, margin, said[0] if said else None, apart)

    def refeed(self, number: int, reads: Reads, start: int, prefix: int) -> Iterator[Part]:
        """Compute the features of positions `start` to `prefix` - 2 of a session's log anew, beside
        its cache; from now on verdicts come with theirs."""
        session = find_session(self._sessions, number)
        self._check_reads(reads)
        if prefix > len(session.log):
            raise RequestError(
                "prefix",
                f"session {number}: features of {prefix} tokens were asked for, the log here "
                f"has {len(session.log)}",
            )
        with self._spans.measure("prefill"):
            rows = max(0, prefix - 1)
            cache = self._model.new_cache(rows)
            step = self._step
            for first in range(0, rows, step):
                _, part = self._read(
                    session.log[first : min(first + step, rows)], cache, reads, features_from=start
                )
                yield from _slices(part)
        session.reads = reads

    def check(self, item: VerifyItem, drawn: Drawn | None = None) -> None:
        """Passes an item that `verify` can do; else `StaleError` or `RequestError`."""
        session = find_session(self._sessions, item.session)
        check_round(
            item.session,
            last=session.round,
            round=item.round,
            length=len(session.log),
            prefix=item.prefix,
        )
        if len(item.tokens) > session.tree.most_nodes:
            raise RequestError(
                "capacity",
                f"session {item.session}: a tree of {len(item.tokens)} nodes, where it was "
                f"opened for at most {session.tree.most_nodes}",
            )
        if len(session.log) > session.capacity:
            raise RequestError(
                "capacity",
                f"session {item.session}: {len(session.log)} tokens, where it was opened for "
                f"at most {session.capacity}",
            )
        try:
            item.tree.check(self._model.vocabulary_size)
            if session.sampling.rejects and len(item.tokens):
                (drawn or Drawn.nothing()).check(item.tree, self._model.vocabulary_size)
        except TreeError as error:
            raise RequestError("protocol", f"session {item.session}: {error}") from None

    def verify(
        self, items: Sequence[VerifyItem], drawn: Mapping[int, Drawn] = UNDRAWN
    ) -> list[Verdict | RequestError]:
        """One pass for checked items of different sessions; for each in turn the verdict,
        committed, or why there is none. If it raises, nothing changed.

        `drawn`: by session, from what the trees of those were drawn that accept by rejection.
        """
        with self._spans.measure("verify"):
            passed = self._forward(items)
            with self._spans.finely("choose"):
                verdicts = [
                    self._judge(item, logits, drawn.get(item.session))
                    for item, logits in zip(items, passed.logits, strict=True)
                ]
                verdicts = _with_features(verdicts, passed)
        with self._spans.measure("commit"):
            return [
                self._commit(item, verdict) if isinstance(verdict, Verdict) else verdict
                for item, verdict in zip(items, verdicts, strict=True)
            ]

    def close(self, number: int, *, keep: bool = False) -> None:
        """Forget a session; unknown ones are forgotten already. `keep`: but for its log and its
        rows."""
        session = self._sessions.pop(number, None)
        if not keep:
            self._kept.drop(number)
        elif session is not None and self._kept.takes(len(session.log)):
            session.cache.resize(session.cache.length)
            self._kept.add(number, _Left(session.log, session.cache))

    def clear(self) -> None:
        """Forget all sessions, and what is left of others."""
        self._sessions.clear()
        self._kept.clear()

    def lend(self, number: int) -> tuple[Sequence[int], Cache, int]:
        """A session's log, its cache, which has committed the rows of all of that but the last
        token, and the first slot that nothing here writes to."""
        session = find_session(self._sessions, number)
        return session.log, session.cache, session.own

    def prepare_noise(self) -> bool:
        """Compute the noise of one position that a coming round may ask for; False if all of it is
        there."""
        return any(
            s.noise is not None and s.noise.prepare(len(s.log), s.tree.depth + 1)
            for s in self._sessions.values()
        )

    def _check_room(self, prompt: Sequence[int], capacity: int) -> None:
        context, size = self._model.context, self._model.vocabulary_size
        if len(prompt) >= context:
            raise RequestError(
                "prompt_too_long",
                f"the prompt has {len(prompt)} tokens; the model's context of {context} has "
                f"room for at most {context - 1}",
            )
        if not len(prompt) < capacity <= context:
            raise RequestError(
                "capacity",
                f"a capacity of {capacity} tokens does not lie between the prompt's "
                f"{len(prompt)} and the context's {context}",
            )
        if len(self._sessions) >= MAX_SESSIONS:
            raise RequestError(
                "capacity",
                f"{MAX_SESSIONS} sessions are open, the most that this worker holds; close one",
            )
        if max(prompt) >= size:
            raise RequestError(
                "vocabulary", f"the prompt has token {max(prompt)}, beyond the vocabulary of {size}"
            )

    def _check_memory(self, rows: int) -> None:
        """`RequestError` where the host's memory does not hold a cache of so many rows; a GPU says
        so itself."""
        promised = sum(
            max(0, session.own - session.cache.length) for session in self._sessions.values()
        )
        check_rows(rows, promised, self._row_bytes)

    def _check_biases(self, sampling: Sampling) -> None:
        size = self._model.vocabulary_size
        if (largest := max((token for token, _ in sampling.logit_bias), default=0)) >= size:
            raise RequestError(
                "vocabulary", f"logit_bias names token {largest}, beyond the vocabulary of {size}"
            )

    def _check_reads(self, reads: Reads | None) -> None:
        own = (self._model.hidden_size, self._model.vocabulary_size, self._model.layers)
        if reads is not None and (
            (reads.width, reads.vocabulary_size) != own[:2] or max(reads.taps, default=0) >= own[2]
        ):
            text = (
                f"width {reads.width}, vocabulary {reads.vocabulary_size} and layers "
                f"{reads.taps}, where this model has width {own[0]}, vocabulary {own[1]}"
            )
            raise RequestError(
                "settings",
                f"features of {text} and {own[2]} layers were asked for: use a draft that was "
                "made for this target",
            )

    def _open_cache(self, rows: int, left: _Left | None, kept: int) -> Cache:
        """A cache for `rows` rows: empty, or with `kept` of what is left of another session."""
        if left is None:
            return self._model.new_cache(rows)
        left.cache.truncate(kept)
        left.cache.resize(rows)
        return left.cache

    @property
    def _step(self) -> int:
        """Rows of a prefill pass that computes the logits of the last one alone."""
        return max(PREFILL_ROWS, self._model.prompt_rows)

    def _prefill(
        self, session: _Session, scored: bool, features_from: int, apart: int = 0
    ) -> Generator[Part | ScoredPart, None, Tensor]:
        """Compute and commit the rows of the prompt that are missing, some at a time; returns the
        logits [1, V] after its last token.

        `apart`: the first rows that the model's reader reads, of all that there are of the
        request's own prompt: a session that is begun anew elsewhere, or on the same worker, has the
        same rows read by it, and those of its reply computed as they were.
        """
        logits = torch.empty(0)
        if apart:
            logits, part = self._read(
                session.log[:apart],
                session.cache,
                session.reads,
                features_from=features_from,
                apart=True,
            )
            yield from _slices(part)
        step = PREFILL_ROWS if scored else self._step
        for start in range(session.cache.length, len(session.log), step):
            chunk = session.log[start : start + step]
            logits, part = self._read(
                chunk, session.cache, session.reads, features_from=features_from, all_logits=scored
            )
            yield from _slices(part)
            if scored and (tokens := session.log[start + 1 : start + 1 + len(chunk)]):
                yield ScoredPart(
                    start + 1, token_logprobs(logits[: len(tokens)], tokens, session.logprobs or 0)
                )
        return logits[-1:]

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
        """Compute and commit the rows of `tokens`, which stand behind those of `cache`: logits
        after the last or all of them, and the features of the rows from `features_from` on, if a
        draft reads them and there are any. `apart`: by the model's reader."""
        start, count = cache.length, len(tokens)
        unwanted = min(max(0, features_from - start), count)
        places = _places(reads) if unwanted < count else ()
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
        return logits, Part(start + unwanted, _features(reads, states, slice(unwanted, None)))

    def _forward(self, items: Sequence[VerifyItem]) -> _Pass:
        """Compute the roots and trees of all items in one pass."""
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for item in items:
            session, tree = self._sessions[item.session], item.tree
            root = len(session.log) - 1
            tokens += (session.log[-1], *tree.tokens)
            # what lies beyond the context is cut from the reply, but its rows are computed, and a
            # model need have no position for them
            positions += (min(root + depth, self._model.context - 1) for depth in (0, *tree.depths))
            segments.append(
                Segment(
                    session.cache, root, len(tree) + 1, tree_paths(tree, root) if tree else None
                )
            )
        wanted = {place for item in items for place in self._sessions[item.session].places}
        with timed_pass(self._spans):
            logits, states = self._model.forward_with_states(
                torch.tensor(tokens), torch.tensor(positions), segments, wanted=wanted
            )
        counts = [segment.count for segment in segments]
        starts = [0, *itertools.accumulate(counts)][:-1]
        return _Pass(torch.split(logits, counts), states, starts)

    def _judge(
        self, item: VerifyItem, logits: Tensor, drawn: Drawn | None
    ) -> Verdict | RequestError:
        """Return the verdict of an item from the logits [M, V] of its root and nodes, without
        features, or why there is none."""
        session, tree = self._sessions[item.session], item.tree
        try:
            accepted, bonus, margins = _outcome(session, logits, tree, drawn or Drawn.nothing())
            tokens = [*(tree.tokens[node] for node in accepted), bonus]
            logprobs = session.scores(logits, _path(accepted), tokens)
        except Exception as error:  # the other sessions of the pass have their verdicts
            return as_request_error(error)
        verdict = VerifiedItem(
            session=item.session,
            round=item.round,
            accepted=accepted,
            bonus=bonus,
            margins=margins,
            logprobs=logprobs,
        )
        return Verdict(verdict, session.reads)

    def _commit(self, item: VerifyItem, verdict: Verdict) -> Verdict | RequestError:
        try:
            self._append(self._sessions[item.session], item.tree, verdict.item)
        except Exception as error:  # its log may have moved and its cache not
            self.close(item.session)
            return as_request_error(error)
        return verdict

    def _append(self, session: _Session, tree: TokenTree, verdict: VerifiedItem) -> None:
        root = session.cache.length
        path = [root, *(root + 1 + node for node in verdict.accepted)]
        session.cache.keep(path, len(path))
        session.extend([*(tree.tokens[node] for node in verdict.accepted), verdict.bonus])
        session.round = verdict.round
        if session.noise is not None:
            session.noise.drop_before(len(session.log))


def _slices(part: Part | None) -> Iterator[Part]:
    """The features of a pass, no more rows at a time than travel together."""
    if part is not None:
        for first in range(0, len(part.features), PREFILL_ROWS):
            yield Part(part.start + first, part.features[first : first + PREFILL_ROWS])


def _places(reads: Reads | None) -> Sequence[int]:
    """Where the states are that a draft reads."""
    return () if reads is None else reads.taps or (LAST,)


def _path(accepted: Sequence[int]) -> list[int]:
    """Return the rows of an item that lie on the accepted path: its root's, row i + 1 of node i."""
    return [0, *(node + 1 for node in accepted)]


def _with_features(
    verdicts: Sequence[Verdict | RequestError], passed: _Pass
) -> list[Verdict | RequestError]:
    """Return the verdicts with what the sessions' drafts read of the target. Verdicts whose drafts
    read the same are served at once: a gather for each session costs more than the numbers."""
    shown = list(verdicts)
    readers: dict[Reads, list[tuple[int, Verdict]]] = {}
    for place, verdict in enumerate(verdicts):
        if isinstance(verdict, Verdict) and verdict.reads is not None:
            readers.setdefault(verdict.reads, []).append((place, verdict))
    for reads, own in readers.items():
        paths = [
            [passed.starts[place] + row for row in _path(verdict.item.accepted)]
            for place, verdict in own
        ]
        rows = [row for path in paths for row in path]
        try:
            device = passed.states[_places(reads)[0]].device
            features = _features(reads, passed.states, torch.tensor(rows, device=device))
        except Exception as error:
            for place, _ in own:
                shown[place] = as_request_error(error)
            continue
        parts = torch.split(features, [len(path) for path in paths])
        for (place, verdict), part in zip(own, parts, strict=True):
            shown[place] = replace(verdict, features=part)
    return shown


def _features(reads: Reads, states: Mapping[int, Tensor], rows: Tensor | slice) -> Tensor:
    """Return what a draft reads of some rows of a pass, [n, row] on the CPU."""
    return narrowed(
        torch.cat([states[place][rows] for place in _places(reads)], dim=1), reads.dtype
    ).cpu()


def tree_paths(tree: TokenTree, root: int) -> Paths:
    """What the rows of a tree see whose root is written to slot `root` and node i behind it: all
    slots before, the root, their ancestors, themselves."""
    paths = [[root]]
    for node, parent in enumerate(tree.parents):
        paths.append([*paths[parent + 1], root + 1 + node])
    return Paths.of(root, paths)


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

    def __init__(self, session: _Session, logits: Tensor, tree: TokenTree) -> None:
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


def _process(session: _Session, logits: Tensor, tree: TokenTree, row: int) -> Tensor:
    """[1, V]: a row of `logits` [M, V] as the session's processors leave it."""
    if session.looking_back is None:
        return process_logits(logits[row : row + 1], session.sampling)
    path = [tree.tokens[node] for node in tree.path(row - 1)]
    return process_logits(
        session.looking_back.process(logits[row : row + 1], [path]), session.sampling
    )


def _outcome(
    session: _Session, logits: Tensor, tree: TokenTree, drawn: Drawn
) -> tuple[tuple[int, ...], int, tuple[float, ...]]:
    """The accepted nodes, the bonus and the margins of these tokens, by the logits [M, V] after the
    end of the session's log and after each node of `tree`."""
    if session.sampling.rejects:
        outcome = judge(
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


def _check_number(margin: float) -> None:
    if margin != margin:
        raise RequestError(
            "internal",
            "the target computed logits that are not numbers; its weights or its device are "
            "damaged",
        )
