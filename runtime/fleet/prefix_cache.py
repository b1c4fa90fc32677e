"""The prefix cache: rows of ended sessions that a worker keeps, and the choice of the ended or
running session that a prompt reuses. A `PrefixCache` is for one worker: it has the logs of the kept
sessions, and evicts the oldest when there is no room. Logs are compared as bytes, so that a prompt
of a hundred thousand tokens takes microseconds. Pure."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from dovetail.runtime.session.request import TOKEN_BYTES, Base, Kept

WHOLE = 16  # rows are shared in multiples of this number
LEAST = 128  # fewer rows are copied
ANEW = 2  # a common prefix above this multiple of the shared rows makes a new group


@dataclass
class SharedRows:
    """A worker's sessions, grouped by common prefix, whose rows they share."""

    _groups: dict[int, int] = field(default_factory=dict)  # the group of each session
    _rows: dict[int, int] = field(default_factory=dict)  # the rows that each session shares

    def begin(self, session: int, base: int, tokens: int) -> None:
        """Note that a session begins with the rows of the first `tokens` tokens of another."""
        rows = tokens // WHOLE * WHOLE
        if rows >= LEAST and rows > ANEW * self._rows.get(base, 0):
            self._groups[base], self._rows[base] = session, rows
        if base in self._groups:
            self._groups[session] = self._groups[base]
            self._rows[session] = min(rows, self._rows[base])

    def follow(self, session: int, base: int, tokens: int) -> None:
        """Note that a session has replaced another and reuses the rows of its first `tokens`
        tokens."""
        if (group := self._groups.pop(base, None)) is not None:
            self._groups[session] = group
            self._rows[session] = min(self._rows.pop(base), tokens // WHOLE * WHOLE)

    def end(self, session: int) -> None:
        """Note that the rows of a session are gone."""
        self._groups.pop(session, None)
        self._rows.pop(session, None)

    def __len__(self) -> int:
        return len(self._groups)

    def saved(self, sessions: Collection[int]) -> int:
        """Return how many rows these sessions save by sharing."""
        every, most = 0, dict[int, int]()
        for session in self._groups.keys() & sessions:
            rows, group = self._rows[session], self._groups[session]
            every, most[group] = every + rows, max(most.get(group, 0), rows)
        return every - sum(most.values())

    def saved_by(self, base: int, tokens: int, sessions: Collection[int]) -> int:
        """Return how many rows these sessions and another would save if the other began with the
        first `tokens` tokens of `base`; negative if `base` leaves its group for it."""
        after, other = SharedRows({**self._groups}, {**self._rows}), -1
        after.begin(other, base, tokens)
        return after.saved({*sessions, other}) - self.saved(sessions)


MAX_KEPT = 64  # most sessions in a cache, since every request checks all of them
WORTH = 16  # fewest tokens: reading fewer takes no longer than a tree, and templates are shorter


@dataclass
class PrefixCache:
    """The ended sessions that one worker keeps, oldest first."""

    limit: int  # tokens of all of them
    shares: bool = False  # True if several sessions can reuse the same one, which stays unchanged
    shared: SharedRows = field(default_factory=SharedRows)
    _kept: dict[int, Kept] = field(default_factory=dict)
    _pinned: dict[int, Kept] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._kept) + len(self._pinned)

    @property
    def tokens(self) -> int:
        return _tokens(self._kept) + _tokens(self._pinned)

    def add(self, kept: Kept) -> list[int] | None:
        """Add a session. Return the sessions evicted for it; None if it is not kept itself."""
        if kept.rows < WORTH or kept.tokens + _tokens(self._pinned) > self.limit:
            return None
        gone = []
        while self._kept and (self.tokens + kept.tokens > self.limit or len(self) >= MAX_KEPT):
            gone.append(self._drop_oldest())
        self._kept[kept.session] = kept
        return gone

    def hold(self, kept: Kept) -> None:
        """Keep a session of an earlier coordinator, regardless of the limit: the worker holds
        it."""
        self._kept[kept.session] = kept

    def give_up(self, tokens: int, base: Base | None = None) -> list[int]:
        """Drop the oldest sessions until at most `tokens` tokens are kept; return them. Pinned ones
        are not counted; rows shared with `base` count as its own, and `base` is dropped last."""
        spared = base.session if base is not None and base.session in self._kept else None
        if base is not None and spared is not None:
            tokens += base.tokens // WHOLE * WHOLE
        gone = []
        while self._kept and _tokens(self._kept) > tokens:
            gone.append(self._drop_oldest(spared))
        return gone

    def _drop_oldest(self, spared: int | None = None) -> int:
        oldest = next((session for session in self._kept if session != spared), spared)
        assert oldest is not None
        del self._kept[oldest]
        self.shared.end(oldest)
        return oldest

    def pin(self, base: Base) -> None:
        """Pin a session whose cache another takes, until `taken` or returned; not if shared."""
        if not base.shared and base.session is not None:
            self._pinned[base.session] = self._kept.pop(base.session)

    def taken(self, opened: int, base: Base) -> None:
        """Note an Open that continues another session, which ends unless shared."""
        if base.session is None:
            return
        if base.shared:
            self.shared.begin(opened, base.session, base.tokens)
        else:
            self._pinned.pop(base.session, None)
            self.shared.follow(opened, base.session, base.tokens)

    def refused(self, opened: int, base: Base, *, lost: bool) -> None:
        """Note a refused Open; `lost`: the worker does not have the other session."""
        self.shared.end(opened)
        if lost and base.session is not None:
            self._kept.pop(base.session, None)
            self.shared.end(base.session)

    def give_back(self, base: Base) -> None:
        """Return a base whose session ended before it began."""
        if not base.shared and (kept := self._pinned.pop(base.session or 0, None)) is not None:
            self._kept[kept.session] = kept

    def find(
        self, prompt: bytes, *, scope: str = "", known: int = 0, running: Iterable[Kept] = ()
    ) -> Base | None:
        """Return the scope's session with the longest common prefix; of equals, the youngest kept
        one. `known`: how many tokens after a row must be equal for the row to be valid; `running`:
        sessions that run there. The last token of the prompt is always computed, since its logits
        are needed. A running session, or one that would lose many rows, is shared. If the worker
        cannot share, a session that would lose more than is gained is not used: otherwise a prefix
        common to many prompts would take the caches of one conversation after another."""
        found, least = None, WORTH
        for kept in (*reversed(self._kept.values()), *(running if self.shares else ())):
            needed = TOKEN_BYTES * (least + known)
            if kept.scope != scope or kept.rows < least or kept.log[:needed] != prompt[:needed]:
                continue
            tokens = min(
                kept.rows, len(prompt) // TOKEN_BYTES - 1, common_tokens(prompt, kept.log) - known
            )
            lost = kept.rows - tokens
            shared = self.shares and (lost >= WORTH or kept.session not in self._kept)
            if tokens >= (least if shared else max(least, lost)):
                found, least = Base(kept.session, tokens, shared), tokens + 1
        return found


Replacing = Callable[[Base | None], Base | None]
Stored = tuple[Replacing, Replacing]
NOT_STORED: Stored = (lambda base: base, lambda base: base)


def bases(
    prompt: bytes,
    target: PrefixCache,
    draft: PrefixCache | None,
    *,
    scope: str = "",
    reads: bool,
    on_target: Iterable[Kept] = (),
    on_draft: Iterable[Kept] = (),
    stored: Stored = NOT_STORED,
) -> tuple[Base | None, Base | None]:
    """Return what a session's target and draft reuse; their caches pin sessions that are taken
    over. `on_target` and `on_draft`: sessions that run there; `stored`: for the target and the
    draft, replaces a base by stored rows if these are more. A draft that `reads` its target gets
    features only for newly computed rows, so both start from the same position; and since its rows
    also depend on the next token, that must match, too. The row before the last token is computed
    again, since some drafts make their first guess from it."""
    of_target = target.find(prompt, scope=scope, running=on_target)
    of_draft = (
        draft.find(prompt, scope=scope, known=int(reads), running=on_draft)
        if draft is not None
        else None
    )
    of_target, of_draft = stored[0](of_target), stored[1](of_draft)
    if reads and draft is not None:
        most = len(prompt) // TOKEN_BYTES - 2
        tokens = min(of_target.tokens, of_draft.tokens, most) if of_target and of_draft else 0
        of_target, of_draft = (
            replace(base, tokens=tokens) if base and tokens >= WORTH else None
            for base in (of_target, of_draft)
        )
    for cache, base in ((target, of_target), (draft, of_draft)):
        if cache is not None and base is not None:
            cache.pin(base)
    return of_target, of_draft


def _tokens(sessions: dict[int, Kept]) -> int:
    return sum(kept.tokens for kept in sessions.values())


def common_tokens(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix of two packed logs, in tokens."""
    alike, most = 0, min(len(one), len(other)) // TOKEN_BYTES
    while alike < most:
        middle = (alike + most + 1) // 2
        if (
            one[TOKEN_BYTES * alike : TOKEN_BYTES * middle]
            == other[TOKEN_BYTES * alike : TOKEN_BYTES * middle]
        ):
            alike = middle
        else:
            most = middle - 1
    return alike
