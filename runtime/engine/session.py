"""One request's life as a state machine: an event in, actions out.

The token log (`prompt + tokens`) is the only truth; a worker holds nothing that cannot be rebuilt
from it. A round asks the draft worker for a tree, the target worker for its verdict, and commits
the accepted tokens and the bonus one by one. An end token, a stop string or the length limit cuts
inside an accepted path, so the output does not depend on how many tokens a round brought. Then the
session asks for its next round, which begins when it is told how to draft. What a draft reads of
its target is handed on as it comes, the prompt's features by Feed and those of verdicts with the
next Draft; nothing looks into it.

A session outlives its workers. Without its draft it goes on with the target alone, and it takes
another draft between two rounds: that one reads the log, and its features if it reads the target,
which computes them anew. Without its target it waits; another one reads the log, and the token that
it chooses behind it is the verdict of the round that was lost: none of its proposal is accepted.
The token is the one that would have come anyway.

An event is a call of a method that returns actions; nothing is called back, so the events of a
session and their arguments are all that its actions depend on.

Knows no sockets, no clock (time is an argument, in nanoseconds), no workers: an `Ask` says for
which role it is, the scheduler decides when it leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from dovetail.protocol.arrays import Array
from dovetail.protocol.errors import ProtocolError, StaleError, TreeError
from dovetail.protocol.messages import (
    MAX_CANDIDATES,
    MAX_MOVES,
    Close,
    Draft,
    Drafted,
    Feed,
    FinishReason,
    Open,
    Opened,
    Prefilled,
    Refed,
    Refeed,
    Result,
    RoundRecord,
    Scored,
    TokenLogprobs,
    VerifiedItem,
    Verify,
    VerifyItem,
)
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.tree import TokenTree
from dovetail.runtime.control.rounds import Plan
from dovetail.runtime.engine.draft_sync import Briefing, Joining
from dovetail.runtime.fleet.prefix_cache import Base, Kept, pack
from dovetail.runtime.telemetry.metrics import Accounts, RoundFacts, RoundTimes
from dovetail.runtime.text.tokenizer import StopStrings, Writer

NO_TREE = TokenTree()
MAX_HELD_BYTES = 32 << 20
"""Features that are kept for a draft that is not asked for anything; beyond that it is given up.
They have to fit into one message."""


@dataclass(frozen=True)
class Ask:
    """Something for the draft or the target worker of this session to do."""

    role: str
    command: Open | Feed | Refeed | Draft | Verify | Close


@dataclass(frozen=True)
class Emit:
    """Newly committed tokens, the first `drafted` of which were drafted, and the text they
    complete."""

    tokens: tuple[int, ...]
    drafted: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Score:
    """What the target thinks of tokens of the prompt, the first of which stands at `start`."""

    start: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class NextRound:
    """A round is over and the request is not: the session waits for `next_round`. The last of its
    actions."""


@dataclass(frozen=True)
class Finish:
    """The request is done."""

    reason: FinishReason


@dataclass(frozen=True)
class Note:
    """What happened in a round, for a client that asked for it."""

    record: RoundRecord


Action = Ask | Emit | Score | Note | NextRound | Finish


@dataclass(frozen=True)
class Request:
    """What a client asked for, in tokens."""

    prompt: tuple[int, ...]
    key: bytes
    seed: int
    sampling: Sampling
    max_tokens: int
    tree: TreeSettings
    end: tuple[int, ...]
    vocabulary_size: int
    stop: tuple[str, ...] = ()
    record: bool = False
    logprobs: int | None = None
    scored: bool = False
    owner: str = ""
    packed: bytes = field(init=False, repr=False)
    """The prompt as ended sessions are compared with; made with the request, where a millisecond
    does not matter."""
    most_nodes: int = field(init=False, repr=False)
    """Nodes of a tree at most; kept, since every round asks for them."""
    most_levels: int = field(init=False, repr=False)
    """Levels of a tree at most."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "packed", pack(self.prompt))
        object.__setattr__(self, "most_nodes", self.tree.most_nodes)
        object.__setattr__(self, "most_levels", self.tree.most_levels)

    @property
    def capacity(self) -> int:
        """The longest that prompt and reply together may become; there is a place for the first
        token even where none is wanted."""
        return len(self.prompt) + max(1, self.max_tokens)

    @property
    def may_reuse(self) -> bool:
        """Whether it may go on from an ended session: not where what is drawn hangs on the draft,
        nor where each token of the prompt is scored."""
        return not (self.scored or self.sampling.rejects)


class State(Enum):
    WAITING = "waiting"
    """For a target."""
    OPENING = "opening"
    """The target reads the prompt, or another one the log."""
    DRAFTING = "drafting"
    VERIFYING = "verifying"
    READY = "ready"
    """A target has just read the log, and the next round has not begun."""
    BETWEEN = "between"
    """A round is over, and the next one has not begun."""
    DONE = "done"


@dataclass
class Session:
    """Drives one request through its rounds; every method returns the actions that follow."""

    number: int
    epoch: int
    request: Request
    detokenizer: Writer
    accounts: Accounts
    fingerprint: str = ""
    """Of its target."""
    brief: Briefing | None = None
    """What its draft has of the log; None: there is no draft."""
    target_base: Base | None = None
    """What the target goes on from; the same number of tokens as the draft where that reads its
    target."""
    state: State = State.OPENING
    round: int = 0
    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the tokens, where they were asked for."""
    moves: int = 0
    """Times that it went on on another target."""
    proposal: Drafted | None = None
    """What was offered in this round; None where nothing was asked for."""
    ended: RoundFacts | None = None
    """The round that has ended last, until somebody takes it."""
    _tree: TokenTree = NO_TREE
    """What is being verified."""
    _ordered: bool = False
    """Whether the draft was asked in this round."""
    _prompt_read: bool = False
    """Whether a target has read the prompt."""
    _reused: int = 0
    """Tokens of it that it had read in an earlier session."""
    _placement: str = ""
    """Of its target's layers, in words."""
    _read_by: str = ""
    """The device that read the log for it; empty: those that compute the model."""
    _scored: int = 1
    """Position of the next token of the prompt that the target says what it thinks of."""
    _told: int = 1
    """Position of the first one of which the client has not been told."""
    _next_row: int = 0
    """Position of the next row that the target shows of what it reads; what lies behind the draft's
    part of the log belongs to the verdict."""
    _root_rows: list[Array] = field(default_factory=list)
    """What it has shown of that."""
    _refeeding: bool = False
    """Whether the target computes features anew."""
    _moved: bool = False
    """Whether another target reads the log."""
    _shown: list[str] = field(default_factory=list)
    """The text that the client has been told, in pieces."""
    _served: list[str] = field(default_factory=list)
    """Fingerprints of the targets that have served it, each that differs from the one before it."""

    def __post_init__(self) -> None:
        self._stops = StopStrings(self.request.stop)

    @property
    def text(self) -> str:
        """That the client has been told."""
        return "".join(self._shown)

    @property
    def speculating(self) -> bool:
        """Whether it has a draft."""
        return self.brief is not None

    @property
    def length(self) -> int:
        """Length of the token log."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def new_tokens(self) -> int:
        """Tokens of the prompt that the target has to read, since it does not have them from an
        ended session."""
        return len(self.request.prompt) - (
            self.target_base.tokens if self.target_base is not None else 0
        )

    @property
    def to_brief(self) -> int:
        """Tokens that the draft has to read before it can be asked, since it does not have them
        from an ended session."""
        if self.brief is None:
            return 0
        return self.brief.tokens - (self.brief.base.tokens if self.brief.base is not None else 0)

    @property
    def briefed(self) -> bool:
        """Return whether the draft has been given all that it has to read."""
        return self.brief is not None and self.brief.complete

    @property
    def unheard(self) -> bool:
        """Whether the client has been told nothing yet."""
        return not self.tokens and self._told == 1

    def begin(self) -> list[Action]:
        """Open the session on its workers."""
        command = self._open(self.length, self.round)
        return [
            self._for_target(command),
            *([self._for_draft(command)] if self.speculating else []),
        ]

    def base_refused(self, role: str) -> list[Action]:
        """A worker does not have what its session should have gone on from: have it read
        everything. What a draft that reads its target has of its base it keeps, so that features of
        the same positions are asked for as before."""
        if role == "target":
            self.target_base = None
            return [self._open_target()]
        assert self.brief is not None
        self.brief.base = None
        return [self._for_draft(self._open(self.brief.tokens, self.brief.round))]

    def _open(self, tokens: int, round: int) -> Open:
        """For a worker that reads so many tokens of the log; `round`: the one that the token behind
        them ends."""
        prompt = self.request.prompt
        return Open(
            epoch=self.epoch,
            session=self.number,
            round=round,
            key=self.request.key,
            prompt=prompt
            if tokens == len(prompt)
            else (*prompt, *self.tokens[: tokens - len(prompt)]),
            capacity=self.request.capacity,
            vocabulary_size=self.request.vocabulary_size,
            end=self.request.end,
            sampling=_sampling(self.request.sampling),
            tree=self.request.tree,
            features=self.brief.reads if self.brief is not None else None,
            replied=tokens - len(prompt),
        )

    def _open_target(self) -> Ask:
        return self._for_target(self._open(self.length, self.round))

    def _for_target(self, command: Open) -> Ask:
        """The command as the target gets it. It shows no features of what the draft has; behind
        that, those of the root, which come with a verdict else."""
        base, brief = self.target_base, self.brief
        self._root_rows = []
        kept = base.tokens if base is not None else 0
        own: dict[str, object] = {"base": base.session, "kept": kept} if base is not None else {}
        if brief is not None and brief.reads is not None:
            self._next_row = self.shown_from
            own |= {"features_from": self._next_row} if self._next_row != kept else {}
        return Ask(
            "target",
            command.model_copy(
                update={
                    **own,
                    "logprobs": self.request.logprobs,
                    "scored": self.request.scored and not self.tokens,
                }
            ),
        )

    def _for_draft(self, command: Open) -> Ask:
        """The command as the draft gets it."""
        base = self.brief.base if self.brief is not None else None
        return Ask(
            "draft",
            command.model_copy(update={"base": base.session, "kept": base.tokens})
            if base is not None
            else command,
        )

    def prefilled(self, event: Prefilled) -> list[Action]:
        """The target has read a part of the log: features of what the draft has of it go on to the
        draft."""
        if event.round != self.round or not (self.state is State.OPENING or self._refeeding):
            raise StaleError(
                f"session {self.number} did not wait for features in round {event.round}"
            )
        if self.brief is None:
            return []
        if event.start < self._next_row:
            raise StaleError(
                f"session {self.number} did not wait for features of position {event.start}"
            )
        rows, until = (
            (*event.features.shape, 0)[0],
            self.brief.tokens if self._refeeding else self.length,
        )
        read = (
            self.brief.reads is not None
            and event.start == self._next_row
            and self._next_row + rows <= until
        )
        if not read or not self.brief.fits(event.features, rows):
            raise ProtocolError(
                f"features {event.features.dtype} {event.features.shape} from position "
                f"{event.start} on are not those that the draft reads"
            )
        return self._show(self.brief, event.features, rows)

    def _show(self, brief: Briefing, features: Array, rows: int) -> list[Action]:
        """Rows from the next one on: those of what the draft was opened with are fed to it, those
        behind are the verdict's."""
        start, self._next_row = self._next_row, self._next_row + rows
        to_feed = min(rows, max(0, brief.tokens - start))
        if to_feed < rows:
            self._root_rows.append(features.rows(to_feed, rows))
        if not to_feed:
            return []
        brief.fed += to_feed
        part = features if to_feed == rows else features.rows(0, to_feed)
        return [
            Ask(
                "draft",
                Feed(
                    epoch=self.epoch,
                    session=self.number,
                    round=brief.round,
                    start=start,
                    features=part,
                ),
            )
        ]

    def refed(self, event: Refed) -> list[Action]:
        """The target has computed the features of what the draft was opened with."""
        if not self._refeeding or event.round != self.round:
            raise StaleError(
                f"session {self.number} did not wait for features in round {event.round}"
            )
        self._refeeding = False
        if self.brief is not None and not self.brief.complete:
            raise ProtocolError(
                f"features of {self.brief.fed} tokens where {self.brief.tokens} were asked for"
            )
        return []

    def scored(self, event: Scored) -> list[Action]:
        """The target says what it thinks of a part of the prompt; of another target only what the
        first had not said is passed on."""
        if (
            self.state is not State.OPENING
            or event.round != self.round
            or event.start < self._scored
        ):
            raise StaleError(
                f"session {self.number} did not wait for what its target thinks of position "
                f"{event.start}"
            )
        stop = event.start + len(event.logprobs)
        asked = self.request.scored and not self.tokens
        if (
            not asked
            or event.start != self._scored
            or not event.start < stop <= len(self.request.prompt)
            or not self._says(event.logprobs)
        ):
            raise ProtocolError(
                f"log-probabilities of positions {event.start} to {stop - 1} are not those "
                "that were asked for"
            )
        self._scored = stop
        if stop <= self._told:
            return []
        start, self._told = max(event.start, self._told), stop
        return [Score(start, event.logprobs[start - event.start :])]

    @property
    def complete(self) -> bool:
        """Whether the target has shown all that the draft reads of an opening."""
        return self.brief is None or self.brief.reads is None or self._next_row == self.length

    def opened(self, event: Opened, now_ns: int, times: RoundTimes | None = None) -> list[Action]:
        """The target has read the prompt and chosen the first token; or another target the log, and
        its token is the verdict of a round."""
        if self.state is not State.OPENING or event.bonus is None or event.round != self.round:
            raise StaleError(
                f"session {self.number} did not wait for the first token of its target"
            )
        logprobs = () if event.logprobs is None else (event.logprobs,)
        self._check_logprobs(logprobs, 1)
        if self.request.scored and not self.tokens and self._scored != len(self.request.prompt):
            raise ProtocolError(
                f"log-probabilities of {self._scored - 1} tokens of a prompt of "
                f"{len(self.request.prompt)}"
            )
        self._take_over()
        self._placement, self._read_by = event.placement, event.read_by
        margins = (event.margin or 0.0,)
        if self._prompt_read:
            return self._decided(
                (),
                (event.bonus,),
                margins,
                logprobs,
                self._root_rows[0] if self._root_rows else None,
                times,
            )
        self.accounts.first_token_ns = now_ns
        self._reused = self.target_base.tokens if self.target_base else 0
        self.accounts.read(len(self.request.prompt), self._reused)
        self._prompt_read = True
        if not self.request.max_tokens:
            return self._finish("length")
        if self.brief is not None:
            self.brief.bonus = event.bonus
        return self._commit([event.bonus], margins, logprobs, drafted=0)

    def _take_over(self) -> None:
        """The target serves the session from now on."""
        if self._moved:
            self.moves, self._moved = self.moves + 1, False
            self.accounts.moved()
        if self._served[-1:] != [self.fingerprint]:
            self._served.append(self.fingerprint)

    def _says(self, logprobs: Sequence[TokenLogprobs]) -> bool:
        """Whether each of these has as many alternatives as were asked for, all of them tokens."""
        size = self.request.vocabulary_size
        most = min(self.request.logprobs or 0, size)
        return all(
            len(said.top) == most and all(token < size for token, _ in said.top)
            for said in logprobs
        )

    def _check_logprobs(self, logprobs: Sequence[TokenLogprobs], tokens: int) -> None:
        """Passes those of so many tokens, or none where none were asked for."""
        expected = 0 if self.request.logprobs is None else tokens
        if len(logprobs) != expected or not self._says(logprobs):
            raise ProtocolError(
                f"{len(logprobs)} log-probabilities of {tokens} tokens, "
                f"{self.request.logprobs} alternatives of each were asked for"
            )

    def wants_proposal(self, round: int) -> bool:
        """Whether a proposal of this round is waited for."""
        return self.state is State.DRAFTING and round == self.round

    def drafted(self, event: Drafted) -> list[Action]:
        """The draft worker proposes a tree: have it verified."""
        if not self.wants_proposal(event.round):
            raise StaleError(
                f"session {self.number} did not wait for a proposal of round {event.round}"
            )
        tree = event.tree
        if len(tree) > self.request.most_nodes:
            raise TreeError(
                f"a proposal of {len(tree)} nodes where at most {self.request.most_nodes} "
                "were asked for"
            )
        if len(event.scores) != len(tree):
            raise ProtocolError(f"a proposal of {len(tree)} nodes with {len(event.scores)} scores")
        if (
            highest := max(event.scores, default=0.0)
        ) > 0.0:  # what a node promises is its exponential
            raise ProtocolError(
                f"a proposal with the score {highest:g}: the logarithm of a probability is 0 "
                "at most"
            )
        tree.check(self.request.vocabulary_size)
        drawn = event if self.request.sampling.rejects and tree else None
        if drawn is not None:
            _check_drawn(drawn)
        self.accounts.proposal(event)
        self.proposal = event
        if self.brief is not None:
            self.brief.rows = self.length - 1
        return self._verify(tree, drawn)

    def sent(self, nodes: int) -> list[Action]:
        """Of the proposal the first so many nodes have gone to the target: the verdict is about
        these."""
        if nodes < len(self._tree):
            self._tree = self._tree.prefix(nodes)
        return []

    def readable(self, features: Array | None, accepted: int) -> bool:
        """Whether features that came with a verdict, or that none came, are what the draft needs to
        go on."""
        return self.brief is None or self.brief.fits(features, 1 + accepted)

    def verified(
        self, item: VerifiedItem, features: Array | None = None, times: RoundTimes | None = None
    ) -> list[Action]:
        """The target's verdict: commit the accepted path and the bonus. `features`: `readable`
        ones; `times`: of the round, for its record."""
        if self.state is not State.VERIFYING or item.round != self.round:
            raise StaleError(
                f"session {self.number} did not wait for a verdict of round {item.round}"
            )
        tokens = (
            [*(self._tree.tokens[node] for node in item.accepted), item.bonus]
            if self._tree.is_path(item.accepted)
            else []
        )
        if (
            not tokens
            or len(item.margins) != len(tokens)
            or item.bonus >= self.request.vocabulary_size
        ):
            raise ProtocolError(
                f"the verdict of round {item.round} fits no path of the tree that was sent"
            )
        self._check_logprobs(item.logprobs, len(tokens))
        return self._decided(item.accepted, tokens, item.margins, item.logprobs, features, times)

    def _decided(
        self,
        accepted: tuple[int, ...],
        tokens: Sequence[int],
        margins: Sequence[float],
        logprobs: Sequence[TokenLogprobs],
        features: Array | None,
        times: RoundTimes | None,
    ) -> list[Action]:
        """A round is over: these nodes were accepted; `tokens` are theirs and the bonus."""
        ended = RoundFacts(
            self.round,
            self.length,
            self.proposal,
            len(self._tree),
            accepted,
            tokens[-1],
            times or RoundTimes(),
        )
        if self.brief is not None:
            self.brief.committed(accepted, tokens[-1], features, ordered=self._ordered)
        before, drafted = len(self.tokens), len(self._tree)
        actions = self._commit(tokens, margins, logprobs, drafted=len(accepted))
        committed = len(self.tokens) - before
        self.accounts.verdict(drafted, min(len(accepted), committed))
        self.ended = replace(ended, committed=committed) if committed < len(tokens) else ended
        return (
            [actions[0], Note(self.ended.record()), *actions[1:]]
            if self.request.record
            else actions
        )

    @property
    def may_draft(self) -> bool:
        """Return whether the session's draft can be asked for a tree for the next round."""
        return self.brief is not None and self.request.tree.gamma > 0 and self.room > 1

    def next_round(self, plan: Plan | None, joining: Joining | None = None) -> list[Action]:
        """Begin the next round, drafted as in `plan`; None: not at all. `joining`: a draft that the
        session gets now, and which this round does without."""
        if self.state not in (State.READY, State.BETWEEN):
            raise RuntimeError(f"session {self.number} is {self.state.value}, not between rounds")
        if joining is not None:
            return [*self._join(joining), *self._verify(NO_TREE)]
        brief = self.brief if self.may_draft else None
        self._ordered = brief is not None and plan is not None
        if brief is None or plan is None:
            return self._verify(NO_TREE)
        self.state = State.DRAFTING
        return [Ask("draft", self._order(brief, plan))]

    @property
    def verifying(self) -> int:
        """Nodes that the target is asked for, or was."""
        return len(self._tree)

    @property
    def scores(self) -> Sequence[float]:
        """Of these."""
        return self.proposal.scores[: len(self._tree)] if self.proposal is not None else ()

    @property
    def held_bytes(self) -> int:
        """Features that wait for the draft."""
        return self.brief.held_bytes if self.brief is not None else 0

    def draft_lost(self) -> list[Action]:
        """Go on with the target alone; the round in which the draft worker was lost is verified
        without a tree."""
        self.brief, self._refeeding = None, False
        return self._verify(NO_TREE) if self.state is State.DRAFTING else []

    def target_lost(self) -> list[Action]:
        """Wait for another target. What the draft was asked for in this round it may do; nobody
        waits for it, and none of it will be accepted."""
        self.state, self._tree, self._refeeding, self._root_rows = State.WAITING, NO_TREE, False, []
        return []

    def recovered(self, fingerprint: str, base: Base | None = None) -> list[Action]:
        """Another target is there: it reads the log. `base`: what it goes on from."""
        self.state, self._moved, self._scored = State.OPENING, True, 1
        self.fingerprint, self.target_base = fingerprint, base
        return [self._open_target()]

    @property
    def shown_from(self) -> int:
        """Up to here another target may go on from what it has: features of what lies behind are to
        be shown."""
        if self.brief is None or self.brief.reads is None:
            return self.length
        return self.length - 1 if self.brief.complete and self.tokens else self.brief.fed

    @property
    def doubtful(self) -> bool:
        """Whether a proposal is being verified, in which the target may find something that cannot
        be."""
        return self.state is State.VERIFYING and len(self._tree) > 0

    def tree_refused(self) -> list[Action]:
        """The target can make nothing of the proposal: the same round without it, and from now on
        the target alone."""
        self.brief = None
        return self._verify(NO_TREE)

    def cancel(self) -> list[Action]:
        """End now, with what has been committed."""
        return [] if self.state is State.DONE else self._finish("cancelled")

    def abandon(self) -> list[Ask]:
        """Nobody waits for the reply any more: both workers forget the session."""
        return self._close(keep=False)

    def _close(self, *, keep: bool) -> list[Ask]:
        self.state = State.DONE
        command = Close(epoch=self.epoch, session=self.number, keep=keep)
        return [Ask("target", command), Ask("draft", command)]

    def kept(self, role: str, *, idle: bool) -> Kept:
        """What a worker has of this session, now that it has ended. `idle`: it owes no answer.

        The root has no row in the target. A draft has what the last order brought that it answered;
        without one it has read the prompt.
        """
        rows = len(self.request.prompt) + max(0, len(self.tokens) - 1)
        if role == "draft":
            brief = self.brief
            rows = 0 if brief is None else brief.rows or (brief.tokens - 1 if idle else 0)
        return Kept(
            self.number,
            self.packed(),
            rows,
            self.length + 1 + self.request.most_levels,
            self.request.owner,
        )

    def packed(self, tokens: int | None = None) -> bytes:
        """So many tokens of the log, or all, as ended sessions are compared with."""
        kept = self.tokens if tokens is None else self.tokens[: tokens - len(self.request.prompt)]
        return self.request.packed + pack(kept)

    def base(self, role: str) -> Base | None:
        """What a worker goes on from."""
        if role == "target":
            return self.target_base
        return self.brief.base if self.brief is not None else None

    def result(self, now_ns: int, reason: FinishReason) -> Result:
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
            placement=self._placement,
            prefill=self._read_by or "local",
            **self.accounts.figures(now_ns, len(self.tokens)),
        )

    # -- within a round ----------------------------------------------------------------------------

    def _commit(
        self,
        tokens: Sequence[int],
        margins: Sequence[float],
        logprobs: Sequence[TokenLogprobs],
        *,
        drafted: int,
    ) -> list[Action]:
        """Append to the token log until something ends the reply, then stream and ask for the next
        round."""
        begin, shown, reason = len(self.tokens), "", None
        for token, margin in zip(tokens, margins, strict=True):
            self.tokens.append(token)
            self.margins.append(margin)
            text, reason = self._read(token)
            shown += text
            if reason:
                break
        self.logprobs += logprobs[: len(self.tokens) - begin]
        self.accounts.committed(len(self.tokens) - begin)
        if reason:
            return self._finish(reason, begin, drafted, shown)
        self._shown.append(shown)
        self.state = State.BETWEEN if self.state is State.VERIFYING else State.READY
        self.round, self.proposal = self.round + 1, None
        return [
            Emit(tuple(self.tokens[begin:]), drafted, shown, tuple(self.logprobs[begin:])),
            NextRound(),
        ]

    def _read(self, token: int) -> tuple[str, FinishReason | None]:
        """The text that a token completes, and whether the reply ends with it."""
        if token in self.request.end:
            return "", "stop"
        text, stopped = self.detokenizer.push(token), False
        if self.request.stop:
            text, stopped = self._stops.push(text)
        if self.request.stop and not stopped and self._stops.foresees(self.detokenizer.fresh):
            more, stopped = self._stops.peek(self.detokenizer.peek())
            text += more if stopped else ""
        if stopped:
            return text, "stop"
        return text, "length" if len(self.tokens) >= self.request.max_tokens else None

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self.request.max_tokens - len(self.tokens)

    def _join(self, joining: Joining) -> list[Action]:
        """A draft is there: it reads the log up to the root, which is the first bonus that it hears
        of. This round goes by without it."""
        reads, base = joining.reads, joining.base
        self._ordered = False
        self.brief = Briefing(self.length - 1, self.round - 1, reads, base, bonus=self.tokens[-1])
        actions: list[Action] = [self._for_draft(self._open(self.brief.tokens, self.brief.round))]
        if reads is not None:
            self._refeeding, self._next_row = True, self.brief.fed
            command = Refeed(
                epoch=self.epoch,
                session=self.number,
                round=self.round,
                start=self.brief.fed,
                prefix=self.length,
                features=reads,
            )
            actions.append(Ask("target", command))
        return actions

    def _order(self, brief: Briefing, plan: Plan) -> Draft:
        """The Draft of this round, with everything that was committed since the last one."""
        request, most_levels = self.request, self.request.most_levels
        accepted, bonus = brief.accepted, brief.bonus
        more, features = brief.take_more()
        return Draft(
            epoch=self.epoch,
            session=self.number,
            round=self.round,
            prefix=self.length,
            accepted=accepted,
            bonus=bonus,
            more=more,
            max_nodes=request.most_nodes,
            max_depth=min(most_levels, self.room - 1, plan.most_depth or most_levels),
            max_width=request.tree.width,
            deadline_ms=plan.deadline_ms,
            rate=plan.rate,
            floor=plan.floor,
            ahead=plan.ahead and not request.sampling.rejects,
            features=features,
        )

    def _verify(self, tree: TokenTree, drawn: Drafted | None = None) -> list[Action]:
        """`drawn`: the proposal, where the target needs to know what its nodes were drawn from."""
        self.state, self._tree = State.VERIFYING, tree
        item = VerifyItem(
            session=self.number,
            round=self.round,
            prefix=self.length,
            tokens=tree.tokens,
            parents=tree.parents,
        )
        if drawn is None:
            return [Ask("target", Verify(epoch=self.epoch, items=(item,)))]
        return [
            Ask(
                "target",
                Verify(
                    epoch=self.epoch,
                    items=(item,),
                    candidates=drawn.candidates,
                    probabilities=drawn.probabilities,
                ),
            )
        ]

    def _finish(
        self, reason: FinishReason, begin: int | None = None, drafted: int = 0, shown: str = ""
    ) -> list[Action]:
        """Show what was held back - not where a stop string was found - and end."""
        begin = len(self.tokens) if begin is None else begin
        by_stop_string = reason == "stop" and self.tokens[-1] not in self.request.end
        if not by_stop_string:
            last, _ = self._stops.push(self.detokenizer.flush())
            shown += last + self._stops.flush()
        self._shown.append(shown)
        new = tuple(self.tokens[begin:])
        emitted = (
            [Emit(new, min(drafted, len(new)), shown, tuple(self.logprobs[begin:]))]
            if new or shown
            else []
        )
        return [
            *emitted,
            Finish(reason),
            *self._close(
                keep=self._prompt_read and not self._moved and self.state is not State.WAITING
            ),
        ]


def _check_drawn(event: Drafted) -> None:
    """Passes a proposal that says for each node from what its children were drawn."""
    candidates, probabilities = event.candidates, event.probabilities
    if (
        candidates is None
        or probabilities is None
        or (candidates.dtype, probabilities.dtype) != ("int32", "float32")
    ):
        raise ProtocolError("a proposal without the probabilities that it was drawn from")
    rows, count = candidates.shape if len(candidates.shape) == 2 else (0, 0)
    if (
        candidates.shape != probabilities.shape
        or rows != 1 + len(event.tokens)
        or not 1 <= count <= MAX_CANDIDATES
    ):
        raise ProtocolError(
            f"a proposal of {len(event.tokens)} nodes with candidates {candidates.shape} and "
            f"probabilities {probabilities.shape}"
        )


def _sampling(sampling: Sampling) -> Sampling:
    """Just the processors: a request's settings may be of a richer class."""
    return Sampling(**{name: getattr(sampling, name) for name in Sampling.model_fields})
