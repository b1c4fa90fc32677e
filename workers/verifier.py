"""The target's engine: prefill a prompt, verify trees, commit what is accepted.

A verification is one pass over the weights for the trees of several sessions. Each tree's rows - its root, then its nodes - are written behind the
session's committed rows, every row sees the committed ones, the root and its own ancestors, and the rows of the accepted path move down to become
committed. The next root, the bonus, has no row yet. Every session is checked before the pass and committed after it, so that a pass that fails changes
nothing; after it, each session is judged and committed for itself, and one whose commit fails half-way is forgotten.

Knows sessions as token logs and caches; nothing of messages about them beyond a `VerifyItem`, and nothing of links.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.protocol.errors import RequestError, TreeError
from dovetail.protocol.messages import VerifiedItem, VerifyItem
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import TokenTree
from dovetail.workers.failures import as_request_error
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Cache, Paths, Segment
from dovetail.workers.rounds import check_round, find_session
from dovetail.workers.speculation.acceptance import walk
from dovetail.workers.speculation.noise import NoiseCache
from dovetail.workers.speculation.sampling import LookingBack, choose, process_logits

PREFILL_ROWS = 256
"""Rows of a prefill pass: enough to be bound by arithmetic, few enough that activations stay small."""
MAX_SESSIONS = 64


@dataclass
class _Session:
    log: list[int]
    """The prompt and every committed token; the last one is the root and has no row in the cache."""
    cache: Cache
    capacity: int
    sampling: Sampling
    tree: TreeSettings
    noise: NoiseCache | None
    """None: greedy."""
    looking_back: LookingBack | None
    """None: no processor looks back."""
    round: int = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append what has been committed."""
        self.log += tokens
        if self.looking_back is not None:
            self.looking_back.extend(tokens)


class Verifier:
    """The sessions of a target. `RequestError` and `StaleError` say what cannot be done; then nothing has changed."""

    def __init__(self, model: LanguageModel, spans: Spans) -> None:
        self._model = model
        self._spans = spans
        self._sessions: dict[int, _Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: int) -> bool:
        return session in self._sessions

    def open(
        self, number: int, *, key: bytes, prompt: Sequence[int], capacity: int, sampling: Sampling, tree: TreeSettings, end: Sequence[int] = ()
    ) -> tuple[int, float]:
        """Prefill the prompt of a new session that may grow to `capacity` tokens; its first token and that one's margin. `end`: ids that end the reply."""
        self._check_room(prompt, capacity)
        self._check_biases(sampling)
        with self._spans.measure("prefill"):
            noise = NoiseCache(key, self._model.vocabulary_size, self._model.device) if sampling.temperature > 0.0 else None
            back = LookingBack(sampling, prompt, end, self._model.vocabulary_size, self._model.device) if sampling.looks_back else None
            session = _Session(list(prompt), self._model.new_cache(capacity + tree.gamma), capacity, sampling, tree, noise, back)
            logits = self._prefill(session)
            choices = _choices(session, logits, TokenTree())
            bonus, margin = choices[0], choices.margin(0)
        session.extend([bonus])
        self._sessions[number] = session
        return bonus, margin

    def check(self, item: VerifyItem) -> None:
        """Passes an item that `verify` can do; else `StaleError` or `RequestError`."""
        session = find_session(self._sessions, item.session)
        check_round(item.session, last=session.round, round=item.round, length=len(session.log), prefix=item.prefix)
        if len(item.tokens) > session.tree.gamma:
            raise RequestError("capacity", f"session {item.session}: a tree of {len(item.tokens)} nodes, where it was opened for at most {session.tree.gamma}")
        if len(session.log) > session.capacity:
            raise RequestError("capacity", f"session {item.session}: {len(session.log)} tokens, where it was opened for at most {session.capacity}")
        try:
            item.tree.check(self._model.vocabulary_size)
        except TreeError as error:
            raise RequestError("protocol", f"session {item.session}: {error}") from None

    def verify(self, items: Sequence[VerifyItem]) -> list[VerifiedItem | RequestError]:
        """One pass for checked items of different sessions; for each in turn the verdict, committed, or why there is none. If it raises, nothing changed."""
        with self._spans.measure("verify"):
            logits = self._forward(items)
            verdicts = [self._judge(item, rows) for item, rows in zip(items, logits, strict=True)]
        with self._spans.measure("commit"):
            return [self._commit(item, verdict) if isinstance(verdict, VerifiedItem) else verdict for item, verdict in zip(items, verdicts, strict=True)]

    def close(self, number: int) -> None:
        """Forget a session; unknown ones are forgotten already."""
        self._sessions.pop(number, None)

    def prepare_noise(self) -> bool:
        """Compute the noise of one position that a coming round may ask for; False if all of it is there."""
        return any(s.noise is not None and s.noise.prepare(len(s.log), s.tree.depth + 1) for s in self._sessions.values())

    def _check_room(self, prompt: Sequence[int], capacity: int) -> None:
        context, size = self._model.context, self._model.vocabulary_size
        if len(prompt) >= context:
            raise RequestError("prompt_too_long", f"the prompt has {len(prompt)} tokens; the model's context of {context} has room for at most {context - 1}")
        if not len(prompt) < capacity <= context:
            raise RequestError("capacity", f"a capacity of {capacity} tokens does not lie between the prompt's {len(prompt)} and the context's {context}")
        if len(self._sessions) >= MAX_SESSIONS:
            raise RequestError("capacity", f"{MAX_SESSIONS} sessions are open, the most that this worker holds; close one")
        if max(prompt) >= size:
            raise RequestError("vocabulary", f"the prompt has token {max(prompt)}, beyond the vocabulary of {size}")

    def _check_biases(self, sampling: Sampling) -> None:
        size = self._model.vocabulary_size
        if (largest := max((token for token, _ in sampling.logit_bias), default=0)) >= size:
            raise RequestError("vocabulary", f"logit_bias names token {largest}, beyond the vocabulary of {size}")

    def _prefill(self, session: _Session) -> Tensor:
        """Compute and commit the rows of the prompt, some at a time; the logits [1, V] after its last token."""
        logits = torch.empty(0)
        for start in range(0, len(session.log), PREFILL_ROWS):
            chunk = torch.tensor(session.log[start : start + PREFILL_ROWS])
            count = len(chunk)
            segment = Segment(session.cache, start, count)
            logits = self._model.forward(chunk, torch.arange(start, start + count), [segment], rows=torch.tensor([count - 1]))
            session.cache.keep(range(start, start + count), count)
        return logits

    def _forward(self, items: Sequence[VerifyItem]) -> tuple[Tensor, ...]:
        """The logits [M, V] of each item: row 0 follows the root, row i + 1 node i."""
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for item in items:
            session, tree = self._sessions[item.session], item.tree
            root = len(session.log) - 1
            tokens += (session.log[-1], *tree.tokens)
            # what lies beyond the context is cut from the reply, but its rows are computed, and a model need have no position for them
            positions += (min(root + depth, self._model.context - 1) for depth in (0, *tree.depths))
            segments.append(Segment(session.cache, root, len(tree) + 1, tree_paths(tree, root) if tree else None))
        logits = self._model.forward(torch.tensor(tokens), torch.tensor(positions), segments)
        return torch.split(logits, [segment.count for segment in segments])

    def _judge(self, item: VerifyItem, logits: Tensor) -> VerifiedItem | RequestError:
        session, tree = self._sessions[item.session], item.tree
        try:
            choices = _choices(session, logits, tree)
            accepted, bonus = walk(tree, choices)
            margins = tuple(choices.margin(node + 1) for node in (-1, *accepted))
        except Exception as error:  # the other sessions of the pass have their verdicts
            return as_request_error(error)
        return VerifiedItem(session=item.session, round=item.round, accepted=accepted, bonus=bonus, margins=margins)

    def _commit(self, item: VerifyItem, verdict: VerifiedItem) -> VerifiedItem | RequestError:
        try:
            self._append(self._sessions[item.session], item.tree, verdict)
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


def tree_paths(tree: TokenTree, root: int) -> Paths:
    """What the rows of a tree see whose root is written to slot `root` and node i behind it: all slots before, the root, their ancestors, themselves."""
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
    """The choices of the rows that are asked for, one by one: processing a row costs far more than looking at it, and few lie on the path."""

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
            path = [self._tree.tokens[node] for node in self._tree.path(row - 1)]
            logits = self._logits[row : row + 1]
            if session.looking_back is not None:
                logits = session.looking_back.process(logits, [path])
            noise = session.noise.row(len(session.log) + len(path)).unsqueeze(0) if session.noise is not None else None
            ids, margins = choose(process_logits(logits, session.sampling), noise)
            self._chosen[row] = int(ids[0]), float(margins[0])
            _check_number(self._chosen[row][1])
        return self._chosen[row]


def _choices(session: _Session, logits: Tensor, tree: TokenTree) -> _Greedy | _Processed:
    """The target's choices after the rows of `logits` [M, V]: the end of the session's log, then each node of `tree`."""
    return _Greedy(logits) if session.noise is None and session.looking_back is None else _Processed(session, logits, tree)


def _check_number(margin: float) -> None:
    if margin != margin:
        raise RequestError("internal", "the target computed logits that are not numbers; its weights or its device are damaged")
