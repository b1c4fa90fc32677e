"""The target's engine: prefills prompts, verifies trees, commits accepted tokens.

A verification is one pass over the weights for the trees of several sessions. A tree's rows - its
root, then its nodes - are written after the session's committed rows; every row attends to the
committed ones, the root, its own ancestors and itself. The rows of the accepted path then move down
to become committed. The next root, the bonus, has no row yet. Every session is checked before the
pass and committed after it, so a pass that fails changes nothing; after it, each session is
committed separately, and one whose commit fails half-way is dropped.

A session whose draft reads its target gets features of every committed row, as they are computed:
of the prompt chunk by chunk, of a tree those of the root and the accepted nodes. Prompts are scored
in the same way on request. For a draft that joins later, features of committed rows are recomputed
in a separate cache.

A log may be prefilled in chunks, in separate passes or as further rows of a verification, with the
same bytes. A session that began elsewhere is opened with its log as the prompt, and continues as it
would have there.

The log and rows of an ended session can be kept for another one. Rows are reused as they are, so
this requires a model that computes the same bytes for a row in any chunk of a prompt.

Uses no messages except `VerifyItem` and `ReadItem`, and no links."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.protocol.errors import RequestError, TreeError
from dovetail.protocol.messages import AHEAD, ReadItem, Reads, VerifiedItem, VerifyItem
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import TokenTree
from dovetail.workers.devices.memory import without_graphs
from dovetail.workers.kernels import ranking
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Cache, Paths, Segment
from dovetail.workers.serving.failures import as_request_error
from dovetail.workers.sessions.blocks import BlockStore
from dovetail.workers.sessions.choosing import Asked, Outcome, outcomes_of
from dovetail.workers.sessions.features import features_of, places_of, with_features
from dovetail.workers.sessions.opener import Opener, ReadingStep
from dovetail.workers.sessions.prefill import Reading
from dovetail.workers.sessions.prefix_cache import KeptSessions, Left
from dovetail.workers.sessions.results import Verdict
from dovetail.workers.sessions.rounds import check_round, find_session
from dovetail.workers.sessions.session import TargetSession
from dovetail.workers.sessions.timing import timed_pass
from dovetail.workers.speculation.rejection import ProposalProbabilities

UNDRAWN: Mapping[int, ProposalProbabilities] = {}


@dataclass(frozen=True)
class _Pass:
    """The results of a pass: for each item in turn a row for its root, then one for each node;
    then, for each chunk of a log, its rows."""

    logits: Sequence[Tensor]  # [M, V] for each item, then [R, V] for each chunk of a log
    states: Mapping[int, Tensor]  # [rows, hidden] of every layer that any of the sessions reads
    starts: Sequence[int]  # the first row of each item, then of each chunk

    def index(self, reads: Reads, rows: Sequence[int]) -> Tensor | slice:
        """Return some rows, which ascend, as an index of the states that a draft reads."""
        states = self.states[places_of(reads)[0]]
        all_rows = len(rows) == len(states)
        return slice(None) if all_rows else torch.tensor(rows, device=states.device)

    def rows(self, reads: Reads, rows: Sequence[int]) -> list[Tensor]:
        """Return some rows [n, hidden], which ascend, of every layer that a draft reads."""
        index = self.index(reads, rows)
        return [self.states[place][index] for place in places_of(reads)]


class Verifier(Opener):
    """The sessions of a target. Raises `RequestError` and `StaleError` before anything is
    changed."""

    def __init__(
        self,
        model: LanguageModel,
        spans: Spans,
        *,
        kept_tokens: int = 0,
        reads_from: int = 1,
        blocks: BlockStore | None = None,
    ) -> None:
        super().__init__(
            model, spans, kept_tokens=kept_tokens, reads_from=reads_from, blocks=blocks
        )
        self._counts, self._experts = model.routing is not None, 0

    def check(self, item: VerifyItem, drawn: ProposalProbabilities | None = None) -> None:
        """Raise `StaleError` or `RequestError` unless the item can be verified."""
        session = find_session(self._sessions, item.session)
        check_round(
            item.session,
            last=session.round,
            round=item.round,
            length=len(session.log),
            prefix=item.prefix,
        )
        for found, most, what in (
            (len(item.tokens), session.tree.most_nodes, "nodes of a tree"),
            (len(session.log), session.capacity, "tokens"),
        ):
            if found > most:
                text = f"session {item.session}: {found} {what}, but it was opened for {most}"
                raise RequestError("capacity", text)
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
        """Verify checked items of different sessions in one pass. Return for each in turn the
        committed verdict, or why it failed. If it raises, nothing has changed. `drawn`: by session,
        the distributions from which trees under rejection sampling were drawn."""
        return self.verify_and_read(items, drawn, ())[0]

    def verify_and_read(
        self,
        items: Sequence[VerifyItem],
        drawn: Mapping[int, ProposalProbabilities],
        reads: Sequence[ReadItem],
    ) -> tuple[list[Verdict | RequestError], list[Sequence[ReadingStep] | RequestError]]:
        """Verify items, as `verify` does, in one pass with checked chunks of the logs of other
        sessions. Return the verdicts, and for each chunk what `read` yields or why it failed."""
        for item in items:
            self._begun.pop(item.session, None)  # an abandoned Refeed
        with self._spans.measure("verify"):
            readings = [self._begun[item.session] for item in reads]
            rows = [
                reading.next_rows(item.rows) for reading, item in zip(readings, reads, strict=True)
            ]
            passed = self._forward(items, readings, rows)
            with self._spans.finely("choose"):
                asked = [
                    Asked(
                        self._sessions[item.session],
                        logits,
                        item.tree,
                        drawn.get(item.session) or ProposalProbabilities.nothing(),
                    )
                    for item, logits in zip(items, passed.logits[: len(items)], strict=True)
                ]
                verdicts = [
                    self._judge(item, its, outcome)
                    for item, its, outcome in zip(items, asked, outcomes_of(asked), strict=True)
                ]
                verdicts = self._show(items, verdicts, passed)
        with self._spans.measure("commit"):
            committed = [
                self._commit(item, verdict) if isinstance(verdict, Verdict) else verdict
                for item, verdict in zip(items, verdicts, strict=True)
            ]
            steps = [
                self._take(item, count, passed, place)
                for place, (item, count) in enumerate(zip(reads, rows, strict=True), len(items))
            ]
        return committed, steps

    def _take(
        self, item: ReadItem, rows: int, passed: _Pass, place: int
    ) -> Sequence[ReadingStep] | RequestError:
        """Commit a chunk of a log that a pass has computed, and return its steps."""
        reading = self._begun.pop(item.session)
        try:
            told: list[ReadingStep] = [
                *reading.take(rows, passed.logits[place], passed.states, passed.starts[place])
            ]
            end = self._end(item.session, reading)
        except Exception as error:
            return as_request_error(error)
        return told if end is None else [*told, end]

    def take_experts(self) -> int:
        """Return how many experts the passes since the last call used; 0 for a model that does not
        count them."""
        experts, self._experts = self._experts, 0
        return experts

    def close(self, number: int, *, keep: bool = False) -> None:
        """Close a session, if it is open. `keep`: keep its log and rows."""
        if (session := self._sessions.pop(number, None)) is not None:
            session.store_rows()
        self._begun.pop(number, None)
        if not keep:
            self.kept.drop(number)
        elif session is not None and self.kept.takes(len(session.log)):
            if session.key != AHEAD:
                session.cache.resize(session.cache.length)
            self.kept.add(number, Left(session.log, session.cache))

    def suspend(self) -> KeptSessions[Left]:
        """Close all sessions, and return their rows and those kept before, regardless of the
        limit."""
        self._begun.clear()
        for number, session in self._sessions.items():
            session.cache.resize(session.cache.length)
            self.kept.hold(number, Left(session.log, session.cache))
        self._sessions.clear()
        return self.kept

    def lend(self, number: int) -> tuple[Sequence[int], Cache, int]:
        """Return a session's log, its cache, in which the rows of all tokens but the last are
        committed, and the first slot beyond those of verification."""
        session = find_session(self._sessions, number)
        return session.log, session.cache, session.own

    def prepare_noise(self) -> bool:
        """Compute the noise of one position that a coming round may need. Return False if all of it
        is known, or the kernels choose, which compute noise themselves."""
        return not ranking.ranks(self._model.device) and any(
            s.noise is not None and s.noise.prepare(len(s.log), s.tree.depth + 1)
            for s in self._sessions.values()
        )

    def _forward(
        self, items: Sequence[VerifyItem], readings: Sequence[Reading], rows: Sequence[int]
    ) -> _Pass:
        """Compute the roots and trees of all items and a chunk of each log in one pass; `rows`: of
        each chunk."""
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for item in items:
            session, tree = self._sessions[item.session], item.tree
            root = len(session.log) - 1
            tokens += (session.log[-1], *tree.tokens)
            # rows beyond the context are computed, though cut from the reply; the model may have no
            # position for them
            positions += (min(root + depth, self._model.context - 1) for depth in (0, *tree.depths))
            segments.append(
                Segment(
                    session.cache, root, len(tree) + 1, tree_paths(tree, root) if tree else None
                )
            )
        wanted = {place for item in items for place in self._sessions[item.session].places}
        counts = [segment.count for segment in segments]
        shown = list(range(len(tokens))) if readings else None
        for reading, count in zip(readings, rows, strict=True):
            assert shown is not None
            start, needed = reading.done, reading.logit_rows(count)
            shown += (len(tokens) + row for row in needed)
            counts.append(len(needed))
            tokens += reading.log[start : start + count]
            positions += range(start, start + count)
            segments.append(reading.segment(count))
            wanted.update(reading.places(count))
        with timed_pass(self._spans, counted=self._counts) as parts:
            logits, states = without_graphs(
                lambda: self._model.forward_with_states(
                    torch.tensor(tokens),
                    torch.tensor(positions),
                    segments,
                    wanted=wanted,
                    rows=None if shown is None else torch.tensor(shown),
                )
            )
        self._experts += parts.experts if self._counts and parts is not None else 0
        starts = [0, *itertools.accumulate(segment.count for segment in segments)][:-1]
        return _Pass(torch.split(logits, counts), states, starts)

    def _judge(
        self, item: VerifyItem, asked: Asked, outcome: Outcome | Exception
    ) -> Verdict | RequestError:
        """Return the verdict of an item from the outcome of its tree, without features, or why it
        failed."""
        session, logits, tree, _ = asked
        if isinstance(outcome, Exception):
            return as_request_error(outcome)
        accepted, bonus, margins = outcome
        try:
            tokens = [*(tree.tokens[node] for node in accepted), bonus]
            logprobs = session.scores(logits, _path(accepted), tokens)
        except Exception as error:  # must not affect the pass's other sessions
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
        """Return the verdicts with the features that the sessions' drafts read, after those held
        before; an item's own features may be held, too. Verdicts whose drafts read the same
        features are served together: a gather for each session would cost more than the copying."""
        shown = list(verdicts)
        readers: dict[tuple[Reads, bool], list[tuple[int, Verdict]]] = {}
        for place, (item, verdict) in enumerate(zip(items, verdicts, strict=True)):
            if isinstance(verdict, Verdict) and verdict.reads is not None:
                readers.setdefault((verdict.reads, item.hold), []).append((place, verdict))
        for (reads, hold), own in readers.items():
            held = [self._sessions[verdict.item.session].held for _, verdict in own]
            paths = [
                [passed.starts[place] + row for row in _path(verdict.item.accepted)]
                for place, verdict in own
            ]
            counts, rows = [len(path) for path in paths], [row for path in paths for row in path]
            try:
                if hold:
                    states = (part.split_with_sizes(counts) for part in passed.rows(reads, rows))
                    parts = [*zip(*states, strict=True)]
                    for its in held:
                        its.settle(reads)
                else:
                    features = features_of(reads, passed.states, passed.index(reads, rows))
                    bare = [verdict for _, verdict in own]
                    whole = with_features(bare, held, features.split_with_sizes(counts), reads)
            except Exception as error:
                for place, _ in own:
                    shown[place] = as_request_error(error)
                continue
            # a failure to assemble one session's features loses no others
            for number, ((place, _), its) in enumerate(zip(own, held, strict=True)):
                if hold:
                    its.hold(parts[number])
                else:
                    shown[place] = whole[number]
                    its.clear()
        return shown

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
    """Return the rows of an item on the accepted path: its root's, and row i + 1 of node i."""
    return [0, *(node + 1 for node in accepted)]


def tree_paths(tree: TokenTree, root: int) -> Paths:
    """Return the slots to which the rows of a tree attend, with the root in slot `root` and node i
    after it: all slots before, the root, their ancestors, themselves."""
    paths = [[root]]
    for node, parent in enumerate(tree.parents):
        paths.append([*paths[parent + 1], root + 1 + node])
    return Paths.of(root, paths)
