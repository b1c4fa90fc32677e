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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.protocol.errors import RequestError, TreeError
from dovetail.protocol.messages import Open, Reads, VerifiedItem, VerifyItem
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import TokenTree
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Cache, Paths, Segment
from dovetail.workers.serving.failures import as_request_error
from dovetail.workers.sessions.admission import Admission
from dovetail.workers.sessions.choosing import outcome_of
from dovetail.workers.sessions.features import (
    HeldFeatures,
    HeldPasses,
    features_of,
    places_of,
    with_features,
)
from dovetail.workers.sessions.prefill import Prefill
from dovetail.workers.sessions.prefix_cache import KeptSessions
from dovetail.workers.sessions.results import First, Part, ScoredPart, Verdict
from dovetail.workers.sessions.room import base_rows
from dovetail.workers.sessions.rounds import check_round, find_session
from dovetail.workers.sessions.session import KeptSession, TargetSession
from dovetail.workers.sessions.timing import timed_pass
from dovetail.workers.speculation.noise import NoiseCache
from dovetail.workers.speculation.rejection import ProposalProbabilities
from dovetail.workers.speculation.sampling import LookingBack

UNDRAWN: Mapping[int, ProposalProbabilities] = {}


@dataclass(frozen=True)
class _Pass:
    """The results of a pass: for each item in turn a row of its root, then one of each node."""

    logits: Sequence[Tensor]
    """[M, V] for each item."""
    states: Mapping[int, Tensor]
    """[rows, hidden] of every place that one of the sessions reads."""
    starts: Sequence[int]
    """The row of each item's root."""

    def features(self, reads: Reads, rows: Sequence[int]) -> Tensor:
        """Return what a draft reads of some rows, which ascend: [n, row] on the CPU."""
        states = self.states[places_of(reads)[0]]
        if len(rows) == len(states):
            return features_of(reads, self.states, slice(None))
        return features_of(reads, self.states, torch.tensor(rows, device=states.device))


class Verifier:
    """The sessions of a target. `RequestError` and `StaleError` say what cannot be done; then
    nothing has changed."""

    def __init__(
        self, model: LanguageModel, spans: Spans, *, kept_tokens: int = 0, reads_from: int = 1
    ) -> None:
        """`kept_tokens`: so many of sessions that have ended are kept at most. `reads_from`: the
        fewest rows of a prompt for which the model's reader is used, where it has one."""
        self._model = model
        self._spans = spans
        self._admission = Admission(model)
        self._prefill = Prefill(model, spans, reads_from=reads_from)
        self._sessions: dict[int, TargetSession] = {}
        self._kept: KeptSessions[KeptSession] = KeptSessions(kept_tokens, base_rows(model))
        self._held: dict[tuple[Sequence[int], str], HeldPasses] = {}
        """Layers that are read and type -> passes that are held."""
        self.rows_beside: Callable[[Sampling, TreeSettings], int] = lambda _sampling, _tree: 0
        """Slots that a session's cache has besides, for a draft that shares it."""
        self._counts, self._experts = model.routing is not None, 0

    def __len__(self) -> int:
        """Return how many sessions are open."""
        return len(self._sessions)

    def __contains__(self, session: int) -> bool:
        """Return whether a session is open, or kept: its number is taken."""
        return session in self._sessions or session in self._kept

    @property
    def kept(self) -> int:
        """Sessions that have ended and are kept."""
        return len(self._kept)

    def open(self, order: Open) -> Iterator[Part | ScoredPart | First]:
        """Prefill the prompt of a new session: yield its parts as they are done, if features or
        scores are asked for, and then the first token of the reply."""
        self._admission.check(order, len(self._sessions))
        own = order.capacity + order.tree.most_nodes
        rows = own + self.rows_beside(order.sampling, order.tree)
        self._admission.check_memory(rows, self._sessions.values())
        kept = self._kept.take(order.base, order.prompt, order.kept)
        with self._spans.measure("prefill"):
            session = self._begin(order, self._open_cache(rows, kept, order.kept), own)
            apart = self._prefill.rows_apart(order, session.cache)
            logits = yield from self._prefill.read(session, order, apart)
            _, bonus, (margin,) = outcome_of(
                session, logits, TokenTree(), ProposalProbabilities.nothing()
            )
            logprobs = session.scores(logits, [0], [bonus])
        session.extend([bonus])
        self._sessions[order.session] = session
        yield First(bonus, margin, logprobs[0] if logprobs else None, apart > 0)

    def _begin(self, order: Open, cache: Cache, own: int) -> TargetSession:
        """Return a session whose prompt is not read yet."""
        sampling, size, device = order.sampling, self._model.vocabulary_size, self._model.device
        coupled = sampling.temperature > 0.0 and not sampling.rejects
        back = (
            LookingBack(sampling, order.prompt, order.end, size, device, replied=order.replied)
            if sampling.looks_back
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

    def refeed(self, number: int, reads: Reads, start: int, prefix: int) -> Iterator[Part]:
        """Compute the features of positions `start` to `prefix` - 2 of a session's log anew, beside
        its cache; from now on verdicts come with theirs."""
        session = find_session(self._sessions, number)
        self._admission.check_reads(reads)
        if prefix > len(session.log):
            raise RequestError(
                "prefix",
                f"session {number}: features of {prefix} tokens were asked for, the log here "
                f"has {len(session.log)}",
            )
        with self._spans.measure("prefill"):
            yield from self._prefill.recompute(session.log, reads, start, prefix)
        session.reads, session.held = reads, HeldFeatures()

    def check(self, item: VerifyItem, drawn: ProposalProbabilities | None = None) -> None:
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
                (drawn or ProposalProbabilities.nothing()).check(
                    item.tree, self._model.vocabulary_size
                )
        except TreeError as error:
            raise RequestError("protocol", f"session {item.session}: {error}") from None

    def verify(
        self, items: Sequence[VerifyItem], drawn: Mapping[int, ProposalProbabilities] = UNDRAWN
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
                verdicts = self._show(items, verdicts, passed)
        with self._spans.measure("commit"):
            return [
                self._commit(item, verdict) if isinstance(verdict, Verdict) else verdict
                for item, verdict in zip(items, verdicts, strict=True)
            ]

    def take_experts(self) -> int:
        """Return how many experts the passes since the last call went through; 0 for a model that
        has none, or does not count them."""
        experts, self._experts = self._experts, 0
        return experts

    def close(self, number: int, *, keep: bool = False) -> None:
        """Forget a session; unknown ones are forgotten already. `keep`: but for its log and its
        rows."""
        session = self._sessions.pop(number, None)
        if not keep:
            self._kept.drop(number)
        elif session is not None and self._kept.takes(len(session.log)):
            session.cache.resize(session.cache.length)
            self._kept.add(number, KeptSession(session.log, session.cache))

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

    def _open_cache(self, rows: int, base: KeptSession | None, kept: int) -> Cache:
        """A cache for `rows` rows: empty, or with `kept` of what is base of another session, or as
        many as can be gone back to."""
        if base is None:
            return self._model.new_cache(rows)
        base.cache.truncate(base.cache.restorable(kept))
        base.cache.resize(rows)
        return base.cache

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
        with timed_pass(self._spans, counted=self._counts) as parts:
            logits, states = self._model.forward_with_states(
                torch.tensor(tokens), torch.tensor(positions), segments, wanted=wanted
            )
        self._experts += parts.experts if self._counts and parts is not None else 0
        counts = [segment.count for segment in segments]
        starts = [0, *itertools.accumulate(counts)][:-1]
        return _Pass(torch.split(logits, counts), states, starts)

    def _judge(
        self, item: VerifyItem, logits: Tensor, drawn: ProposalProbabilities | None
    ) -> Verdict | RequestError:
        """Return the verdict of an item from the logits [M, V] of its root and nodes, without
        features, or why there is none."""
        session, tree = self._sessions[item.session], item.tree
        try:
            accepted, bonus, margins = outcome_of(
                session, logits, tree, drawn or ProposalProbabilities.nothing()
            )
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

    def _show(
        self,
        items: Sequence[VerifyItem],
        verdicts: Sequence[Verdict | RequestError],
        passed: _Pass,
    ) -> list[Verdict | RequestError]:
        """Return the verdicts with what the sessions' drafts read of the target, after all of it
        that was held; what an item has held is added to that. Verdicts whose drafts read the same
        are served at once: a gather for each session costs more than the numbers."""
        shown = list(verdicts)
        readers: dict[tuple[Reads, bool], list[tuple[int, Verdict]]] = {}
        for place, (item, verdict) in enumerate(zip(items, verdicts, strict=True)):
            if isinstance(verdict, Verdict) and verdict.reads is not None:
                readers.setdefault((verdict.reads, item.hold), []).append((place, verdict))
        for (reads, hold), own in readers.items():
            paths = [
                (
                    self._sessions[verdict.item.session].held,
                    [passed.starts[place] + row for row in _path(verdict.item.accepted)],
                )
                for place, verdict in own
            ]
            try:
                if hold:
                    self._held_of(reads).add(passed.states, paths)
                    continue
                features = passed.features(reads, [row for _, path in paths for row in path])
                whole = with_features([verdict for _, verdict in own], paths, features)
            except Exception as error:
                for place, _ in own:
                    shown[place] = as_request_error(error)
                continue
            for (place, _), (held, _), verdict in zip(own, paths, whole, strict=True):
                shown[place] = verdict
                held.clear()  # nobody's are lost if another's cannot be put together
        return shown

    def _held_of(self, reads: Reads) -> HeldPasses:
        read = places_of(reads), reads.dtype
        if (passes := self._held.get(read)) is None:
            passes = self._held[read] = HeldPasses(reads)
        return passes

    def _commit(self, item: VerifyItem, verdict: Verdict) -> Verdict | RequestError:
        try:
            self._append(self._sessions[item.session], item.tree, verdict.item)
        except Exception as error:  # its log may have moved and its cache not
            self.close(item.session)
            return as_request_error(error)
        return verdict

    def _append(self, session: TargetSession, tree: TokenTree, verdict: VerifiedItem) -> None:
        root = session.cache.length
        path = [root, *(root + 1 + node for node in verdict.accepted)]
        session.cache.keep(path, len(path))
        session.extend([*(tree.tokens[node] for node in verdict.accepted), verdict.bonus])
        session.round = verdict.round
        if session.noise is not None:
            session.noise.drop_before(len(session.log))


def _path(accepted: Sequence[int]) -> list[int]:
    """Return the rows of an item that lie on the accepted path: its root's, row i + 1 of node i."""
    return [0, *(node + 1 for node in accepted)]


def tree_paths(tree: TokenTree, root: int) -> Paths:
    """Return what the rows of a tree see whose root is written to slot `root` and node i behind it:
    all slots before, the root, their ancestors, themselves."""
    paths = [[root]]
    for node, parent in enumerate(tree.parents):
        paths.append([*paths[parent + 1], root + 1 + node])
    return Paths.of(root, paths)
