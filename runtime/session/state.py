"""The state of a session. Its events are in `session.py`. Pure."""

from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import Literal

from dovetail.protocol.messages import (
    MAX_MOVES,
    Drafted,
    FinishReason,
    Followed,
    Result,
    TokenLogprobs,
)
from dovetail.protocol.tree import TokenTree
from dovetail.runtime.session.draft_sync import DraftSync, FeatureRows
from dovetail.runtime.session.request import Base, Kept, PromptScores, Request, pack
from dovetail.runtime.telemetry.metrics import Accounts, RoundFacts
from dovetail.runtime.text.tokenizer import Detokenizer, ReplyText

NO_TREE = TokenTree()
MAX_HELD_BYTES = 32 << 20
"""The most bytes of features kept for an idle draft; beyond this the draft is closed. They must fit
into one message."""


class State(Enum):
    """The event that a session waits for."""

    WAITING = "waiting"  # it waits for a target
    OPENING = "opening"  # the target prefills the prompt, or another one the log
    DRAFTING = "drafting"
    VERIFYING = "verifying"
    READY = "ready"  # a target has just prefilled the log, and the next round has not begun
    BETWEEN = "between"  # a round is over, and the next one has not begun
    DONE = "done"

    __hash__ = object.__hash__  # that of Enum is computed in Python, some ten times in every round


@dataclass
class SessionState:
    """The token log of one request, its workers, and its current round. Only its session changes
    it."""

    number: int
    epoch: int
    request: Request
    detokenizer: InitVar[Detokenizer]
    accounts: Accounts
    fingerprint: str = ""  # the fingerprint of its target
    draft_sync: DraftSync | None = None  # its draft's part of the log; None without a draft
    target_base: Base | None = None
    """The ended session that the target reuses; if the draft reads its target, with as many tokens
    as the draft's base."""
    state: State = State.OPENING
    round: int = 0
    tokens: list[int] = field(default_factory=list)
    """Committed tokens, including those committed for the same request by an earlier
    coordinator."""
    margins: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the tokens, if requested."""
    moves: int = 0  # how often it has moved to another target
    proposal: Drafted | None = None  # the proposal of this round; None if none was requested
    ended: RoundFacts | None = None  # the last round, until it is taken
    tree: TokenTree = NO_TREE  # the tree that is being verified, or was
    _ordered: bool = False  # True if the draft got a command in this round
    _hold: bool = False  # True if the target is to hold the features of this round
    _prompt_read: bool = False  # True if a target has prefilled the prompt
    _reused: int = 0  # tokens of the prompt that the target reused from an earlier session
    _reused_from: Literal["", "session", "memory", "disk"] = ""
    _placement: str = ""  # the devices of its target's layers, in words
    _read_by: str = ""  # the device that prefilled the log; empty: those that compute the model
    _moved: bool = False  # True if another target prefills the log
    _served: list[str] = field(default_factory=list)
    """Fingerprints of the targets that have served it, without consecutive repeats."""

    restored: int = field(init=False)  # tokens that an earlier coordinator had committed
    over: FinishReason | None = field(init=False, default=None)
    """Why the reply ended with these tokens; None if it did not."""
    length: int = field(init=False)
    """Tokens of the log; stored, since every round needs it several times."""

    def __post_init__(self, detokenizer: Detokenizer) -> None:
        self.restored = len(self.tokens)
        self.length = len(self.request.prompt) + self.restored
        self.reply = ReplyText(
            detokenizer, self.request.end, self.request.stop, self.request.sampling.min_tokens
        )
        if self.tokens:
            _, _, self.over = self.reply.read(self.tokens, self.request.max_tokens)
        self._features, self._scores = FeatureRows(self.number), PromptScores(self.number)

    @property
    def text(self) -> str:
        """The text that was sent to the client."""
        return self.reply.shown

    @property
    def speculating(self) -> bool:
        """Whether it has a draft."""
        return self.draft_sync is not None

    @property
    def new_tokens(self) -> int:
        """The number of tokens that the target has to prefill, without those of its base."""
        kept = self.target_base.tokens if self.target_base is not None else 0
        return len(self.request.prompt) + self.restored - kept

    @property
    def to_brief(self) -> int:
        """The number of tokens that the draft has to prefill, without those of its base."""
        if self.draft_sync is None:
            return 0
        return self.draft_sync.tokens - (
            self.draft_sync.base.tokens if self.draft_sync.base is not None else 0
        )

    @property
    def briefed(self) -> bool:
        """Whether the draft has everything that it must read."""
        return self.draft_sync is not None and self.draft_sync.complete

    @property
    def unheard(self) -> bool:
        """True if nothing was sent to the client yet."""
        return not self.tokens and self._scores.told == 1

    @property
    def room(self) -> int:
        """The number of tokens that may still come."""
        return self.request.max_tokens - len(self.tokens)

    @property
    def held_bytes(self) -> int:
        """The size of the features that wait for the draft."""
        return self.draft_sync.held_bytes if self.draft_sync is not None else 0

    @property
    def complete(self) -> bool:
        """Whether the target has returned all features that the draft reads in an opening."""
        unread = self.draft_sync is None or self.draft_sync.reads is None
        return unread or self._features.next == self.length

    @property
    def shown_from(self) -> int:
        """The position up to which another target may reuse rows: it must return the features after
        it."""
        if self.draft_sync is None or self.draft_sync.reads is None:
            return self.length
        if self.draft_sync.complete and self.tokens:
            return self.length - 1 - self.draft_sync.held
        return self.draft_sync.fed

    @property
    def doubtful(self) -> bool:
        """Whether a proposal is being verified, which the target may reject."""
        return self.state is State.VERIFYING and len(self.tree) > 0

    @property
    def scores_told(self) -> int:
        """The number of scores of the prompt that were sent to the client."""
        return self._scores.told - 1

    def told_scores(self, tokens: int) -> None:
        """Note that the scores of this many tokens of the prompt were sent to the client."""
        self._scores.told = 1 + tokens

    # -- results -----------------------------------------------------------------------------------

    def kept(self, role: str, *, idle: bool) -> Kept:
        """Return the rows that a worker has of this ended session. `idle`: it owes no answer. The
        root has no row in the target. A draft has the tokens up to the last order that it answered;
        without one, the prompt."""
        rows = len(self.request.prompt) + max(0, len(self.tokens) - 1)
        if role == "draft":
            draft_sync = self.draft_sync
            rows = (
                0
                if draft_sync is None
                else draft_sync.rows or (draft_sync.tokens - 1 if idle else 0)
            )
        return Kept(
            self.number,
            self.packed(),
            rows,
            self.length + 1 + self.request.most_levels,
            self.request.scope,
        )

    def packed(self, tokens: int | None = None) -> bytes:
        """Return this many tokens of the log, or all, as bytes for the prefix cache."""
        kept = self.tokens if tokens is None else self.tokens[: tokens - len(self.request.prompt)]
        return self.request.packed + pack(kept)

    def base(self, role: str) -> Base | None:
        """Return the ended session that a worker reuses."""
        if role == "target":
            return self.target_base
        return self.draft_sync.base if self.draft_sync is not None else None

    def _followed(self, reason: FinishReason) -> Followed | None:
        """Return how the reply followed its grammar, if it had one."""
        if (own := self.request.constraint) is None:
            return None
        ended = reason == "stop" and self.tokens[-1:] != [] and self.tokens[-1] in self.request.end
        return Followed(kind=own.kind, engine=own.engine, relaxed=own.relaxed, complete=ended)

    def result(self, now_ns: int, reason: FinishReason) -> Result:
        """Return the reply and its figures."""
        return Result(
            text=self.text,
            token_ids=tuple(self.tokens),
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(self.tokens),
            finish_reason=reason,
            seed=self.request.seed,
            fingerprint=self._served[-1] if self._served else self.fingerprint,
            fingerprints=tuple(self._served[-MAX_MOVES:]) if len(self._served) > 1 else (),
            moves=self.moves,
            reused_tokens=self._reused,
            reused_from=self._reused_from if self._reused else "",
            placement=self._placement,
            prefill=self._read_by or "local",
            constraint=self._followed(reason),
            **self.accounts.figures(now_ns, len(self.tokens) - self.restored),
        )
