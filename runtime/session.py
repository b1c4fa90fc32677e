"""One request's life as a state machine: an event in, actions out.

The token log (`prompt + tokens`) is the only truth; a worker holds nothing that cannot be rebuilt from it. A round asks the draft worker for a tree,
the target worker for its verdict, commits the accepted tokens and the bonus one by one - an end token, a stop string or the length limit cuts inside an
accepted path, so the output does not depend on how many tokens a round brought - and begins the next round. What a draft reads of its target is handed
on as it comes, the prompt's features by Feed and those of verdicts with the next Draft; nothing looks into it. Rounds may go by in which nothing is
drafted: what they commit is kept for the next Draft.

Knows no sockets, no clock (time is an argument, in nanoseconds), no workers: an `Ask` says for which role it is, the scheduler decides when it leaves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from dovetail.protocol.arrays import Array, stack
from dovetail.protocol.errors import ProtocolError, StaleError, TreeError
from dovetail.protocol.messages import (
    MAX_CANDIDATES,
    Close,
    Draft,
    Drafted,
    Feed,
    FinishReason,
    Open,
    Opened,
    Prefilled,
    Reads,
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
from dovetail.runtime.kept import Base, Kept, pack
from dovetail.runtime.metrics import Accounts, RoundTimes
from dovetail.runtime.pilot import Plan
from dovetail.runtime.text import Detokenizer, StopStrings

NO_TREE = TokenTree()
OFFERED = ("tokens", "parents", "scores", "entropy", "hit", "grown", "ahead", "wasted", "passes")
"""What a record has of a proposal."""
MAX_HELD_BYTES = 32 << 20
"""Features that are kept for a draft that is not asked for anything; beyond that it is given up. They have to fit into one message."""


@dataclass(frozen=True)
class Ask:
    """Something for the draft or the target worker of this session to do."""

    role: str
    command: Open | Feed | Draft | Verify | Close


@dataclass(frozen=True)
class Emit:
    """Newly committed tokens, the first `drafted` of which were drafted, and the text they complete."""

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
class Finish:
    """The request is done."""

    reason: FinishReason


@dataclass(frozen=True)
class Note:
    """What happened in a round, for a client that asked for it."""

    record: RoundRecord


Action = Ask | Emit | Score | Note | Finish


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
    packed: bytes = field(init=False, repr=False)
    """The prompt as ended sessions are compared with; made with the request, where a millisecond does not matter."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "packed", pack(self.prompt))

    @property
    def capacity(self) -> int:
        """The longest that prompt and reply together may become; there is a place for the first token even where none is wanted."""
        return len(self.prompt) + max(1, self.max_tokens)

    @property
    def may_reuse(self) -> bool:
        """Whether it may go on from an ended session: not where what is drawn hangs on the draft, nor where each token of the prompt is scored."""
        return not (self.scored or self.sampling.rejects)


class State(Enum):
    OPENING = "opening"
    DRAFTING = "drafting"
    VERIFYING = "verifying"
    DONE = "done"


@dataclass
class Session:
    """Drives one request through its rounds; every method returns the actions that follow."""

    number: int
    epoch: int
    request: Request
    detokenizer: Detokenizer
    speculating: bool
    accounts: Accounts
    reads: Reads | None = None
    """What the draft reads of its target."""
    target_base: Base | None = None
    """What the target goes on from; `draft_base`: the draft. The same number of tokens where the draft reads its target."""
    draft_base: Base | None = None
    plan: Callable[[], Plan | None] = Plan
    """How to draft for the next round; None: not at all."""
    state: State = State.OPENING
    round: int = 0
    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the tokens, where they were asked for."""
    text: str = ""
    _tree: TokenTree = NO_TREE
    """What is being verified."""
    proposal: Drafted | None = None
    """What was offered in this round; None where nothing was asked for."""
    _accepted: tuple[int, ...] = ()
    """The last verdict on a proposal, and the token behind it; then what was committed in rounds without one."""
    _bonus: int = 0
    _more: list[int] = field(default_factory=list)
    _prompt_read: bool = False
    """Whether the target has read the prompt."""
    _scored: int = 1
    """Position of the next token of the prompt that the target says what it thinks of."""
    _fed: int = 0
    _draft_rows: int = 0
    """What the draft had of the log when it made its last proposal."""
    _features: list[Array] = field(default_factory=list)
    """Of the verdicts since the last Draft; the next one takes them."""

    def __post_init__(self) -> None:
        self._stops = StopStrings(self.request.stop)
        self._fed = self.draft_base.tokens if self.draft_base is not None and self.reads is not None else 0

    @property
    def length(self) -> int:
        """Length of the token log."""
        return len(self.request.prompt) + len(self.tokens)

    def begin(self) -> list[Action]:
        """Open the session on its workers."""
        command = self._open()
        target = self._opening("target", command)
        return [target, self._opening("draft", command)] if self.speculating else [target]

    def base_refused(self, role: str) -> list[Action]:
        """A worker does not have what its session should have gone on from: have it read the whole prompt.

        A draft that reads its target then reads features of the whole prompt as well. If it is the draft that refuses, they are not sent any more.
        """
        together = self.reads is not None and self.speculating
        if role == "draft":
            self.draft_base = None
            return [self._opening("draft", self._open())]
        self.target_base = None
        target = self._opening("target", self._open())
        if not together:
            return [target]
        self.draft_base, self._fed = None, 0
        return [target, Ask("draft", Close(epoch=self.epoch, session=self.number)), self._opening("draft", self._open())]

    def _open(self) -> Open:
        return Open(
            epoch=self.epoch,
            session=self.number,
            key=self.request.key,
            prompt=self.request.prompt,
            capacity=self.request.capacity,
            vocabulary_size=self.request.vocabulary_size,
            end=self.request.end,
            sampling=_sampling(self.request.sampling),
            tree=self.request.tree,
            features=self.reads if self.speculating else None,
        )

    def _opening(self, role: str, command: Open) -> Ask:
        """The command as one of the workers gets it."""
        target = role == "target"
        base = self.base(role)
        own: dict[str, object] = {"base": base.session, "kept": base.tokens} if base is not None else {}
        if target:
            own |= {"logprobs": self.request.logprobs, "scored": self.request.scored}
        return Ask(role, command.model_copy(update=own) if own else command)

    def prefilled(self, event: Prefilled) -> list[Action]:
        """The target has read a part of the prompt: its features go on to the draft."""
        if self.state is not State.OPENING or event.start < self._fed:
            raise StaleError(f"session {self.number} did not wait for features of position {event.start}")
        if not self.speculating:
            return []
        rows = (*event.features.shape, 0)[0]
        if event.start != self._fed or not self._fits(event.features, rows) or self._fed + rows > len(self.request.prompt):
            raise ProtocolError(f"features {event.features.dtype} {event.features.shape} from position {event.start} on are not those that the draft reads")
        self._fed += rows
        return [Ask("draft", Feed(epoch=self.epoch, session=self.number, start=event.start, features=event.features))]

    def scored(self, event: Scored) -> list[Action]:
        """The target says what it thinks of a part of the prompt."""
        if self.state is not State.OPENING or event.start < self._scored:
            raise StaleError(f"session {self.number} did not wait for what its target thinks of position {event.start}")
        stop = event.start + len(event.logprobs)
        if not self.request.scored or event.start != self._scored or not event.start < stop <= len(self.request.prompt) or not self._says(event.logprobs):
            raise ProtocolError(f"log-probabilities of positions {event.start} to {stop - 1} are not those that were asked for")
        self._scored = stop
        return [Score(event.start, event.logprobs)]

    def opened(self, event: Opened, now_ns: int) -> list[Action]:
        """The target has read the prompt and chosen the first token."""
        if self.state is not State.OPENING or event.bonus is None:
            raise StaleError(f"session {self.number} did not wait for the first token of its target")
        logprobs = () if event.logprobs is None else (event.logprobs,)
        self._check_logprobs(logprobs, 1)
        if self.request.scored and self._scored != len(self.request.prompt):
            raise ProtocolError(f"log-probabilities of {self._scored - 1} tokens of a prompt of {len(self.request.prompt)}")
        self.accounts.first_token_ns = now_ns
        self.accounts.read(len(self.request.prompt), self.target_base.tokens if self.target_base else 0)
        self._prompt_read = True
        if not self.request.max_tokens:
            return self._finish("length")
        self._bonus = event.bonus
        return self._commit([event.bonus], [event.margin or 0.0], logprobs, drafted=0)

    def _says(self, logprobs: Sequence[TokenLogprobs]) -> bool:
        """Whether each of these has as many alternatives as were asked for, all of them tokens."""
        size = self.request.vocabulary_size
        most = min(self.request.logprobs or 0, size)
        return all(len(said.top) == most and all(token < size for token, _ in said.top) for said in logprobs)

    def _check_logprobs(self, logprobs: Sequence[TokenLogprobs], tokens: int) -> None:
        """Passes those of so many tokens, or none where none were asked for."""
        expected = 0 if self.request.logprobs is None else tokens
        if len(logprobs) != expected or not self._says(logprobs):
            raise ProtocolError(f"{len(logprobs)} log-probabilities of {tokens} tokens, {self.request.logprobs} alternatives of each were asked for")

    def drafted(self, event: Drafted) -> list[Action]:
        """The draft worker proposes a tree: have it verified."""
        if self.state is not State.DRAFTING or event.round != self.round:
            raise StaleError(f"session {self.number} did not wait for a proposal of round {event.round}")
        tree = event.tree
        if len(tree) > self.request.tree.most_nodes:
            raise TreeError(f"a proposal of {len(tree)} nodes where at most {self.request.tree.most_nodes} were asked for")
        if len(event.scores) != len(tree):
            raise ProtocolError(f"a proposal of {len(tree)} nodes with {len(event.scores)} scores")
        if (highest := max(event.scores, default=0.0)) > 0.0:  # what a node promises is its exponential
            raise ProtocolError(f"a proposal with the score {highest:g}: the logarithm of a probability is 0 at most")
        tree.check(self.request.vocabulary_size)
        drawn = event if self.request.sampling.rejects and tree else None
        if drawn is not None:
            _check_drawn(drawn)
        self.accounts.proposal(event)
        self.proposal, self._draft_rows = event, self.length - 1
        return self._verify(tree, drawn)

    def sent(self, nodes: int) -> None:
        """Of the proposal the first so many nodes have gone to the target: the verdict is about these."""
        if nodes < len(self._tree):
            self._tree = self._tree.prefix(nodes)

    def readable(self, features: Array | None, accepted: int) -> bool:
        """Whether features that came with a verdict, or that none came, are what the draft needs to go on."""
        return not self.speculating or self._fits(features, 1 + accepted)

    def verified(self, item: VerifiedItem, features: Array | None = None, times: RoundTimes | None = None) -> list[Action]:
        """The target's verdict: commit the accepted path and the bonus. `features`: `readable` ones; `times`: of the round, for its record."""
        if self.state is not State.VERIFYING or item.round != self.round:
            raise StaleError(f"session {self.number} did not wait for a verdict of round {item.round}")
        tokens = [*(self._tree.tokens[node] for node in item.accepted), item.bonus] if self._tree.is_path(item.accepted) else []
        if not tokens or len(item.margins) != len(tokens) or item.bonus >= self.request.vocabulary_size:
            raise ProtocolError(f"the verdict of round {item.round} fits no path of the tree that was sent")
        self._check_logprobs(item.logprobs, len(tokens))
        record = self._record(item, times or RoundTimes()) if self.request.record else None
        self._remember(item, features)
        before, drafted = len(self.tokens), len(self._tree)
        actions = self._commit(tokens, item.margins, item.logprobs, drafted=len(item.accepted))
        self.accounts.verdict(drafted, min(len(item.accepted), len(self.tokens) - before))
        return actions if record is None else [actions[0], Note(record), *actions[1:]]

    def _remember(self, item: VerifiedItem, features: Array | None) -> None:
        """Keep for the draft what was committed."""
        if not self.speculating:
            return
        if features is not None:
            self._features.append(features)
        if self.proposal is None:
            self._more.append(item.bonus)
        else:
            self._accepted, self._bonus = item.accepted, item.bonus

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
        return sum(len(features.data) for features in self._features)

    def _record(self, item: VerifiedItem, times: RoundTimes) -> RoundRecord:
        offered = {name: getattr(self.proposal, name) for name in OFFERED} if self.proposal is not None else dict.fromkeys(OFFERED[:3], ())
        return RoundRecord(
            round=self.round,
            prefix=self.length,
            verified=len(self._tree),
            accepted=item.accepted,
            bonus=item.bonus,
            draft_ns=times.draft_ns,
            verify_ns=times.verify_ns,
            transport_ns=times.transport_ns,
            queue_ns=times.queue_ns,
            coordinator_ns=times.coordinator_ns,
            **offered,
        )

    def draft_lost(self) -> list[Action]:
        """Go on with the target alone; the round in which the draft worker was lost is verified without a tree."""
        self._give_up()
        return self._verify(NO_TREE) if self.state is State.DRAFTING else []

    @property
    def doubtful(self) -> bool:
        """Whether a proposal is being verified, in which the target may find something that cannot be."""
        return self.state is State.VERIFYING and len(self._tree) > 0

    def tree_refused(self) -> list[Action]:
        """The target can make nothing of the proposal: the same round without it, and from now on the target alone."""
        self._give_up()
        return self._verify(NO_TREE)

    def _give_up(self) -> None:
        self.speculating, self._features, self._more = False, [], []

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

        The root has no row in the target. A draft has what the last order brought that it answered; without one it has read the prompt.
        """
        prompt, tree = len(self.request.prompt), self.request.tree
        rows = prompt + max(0, len(self.tokens) - 1)
        if role == "draft":
            rows = self._draft_rows or (prompt - 1 if idle else 0)
        return Kept(self.number, self.request.packed + pack(self.tokens), rows, self.length + 1 + tree.most_levels)

    def base(self, role: str) -> Base | None:
        """What a worker goes on from."""
        return self.target_base if role == "target" else self.draft_base

    def result(self, now_ns: int, fingerprint: str, reason: FinishReason) -> Result:
        return Result(
            text=self.text,
            token_ids=tuple(self.tokens),
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(self.tokens),
            finish_reason=reason,
            seed=self.request.seed,
            fingerprint=fingerprint,
            reused_tokens=self.target_base.tokens if self._prompt_read and self.target_base is not None else 0,
            **self.accounts.figures(now_ns, len(self.tokens)),
        )

    def _fits(self, features: Array | None, rows: int) -> bool:
        if self.reads is None:
            return features is None
        return features is not None and (features.dtype, features.shape) == (self.reads.dtype, (rows, self.reads.row))

    # -- within a round ------------------------------------------------------------------------------------------------------------------------

    def _commit(self, tokens: Sequence[int], margins: Sequence[float], logprobs: Sequence[TokenLogprobs], *, drafted: int) -> list[Action]:
        """Append to the token log until something ends the reply, then stream and go on."""
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
        self.text += shown
        return [Emit(tuple(self.tokens[begin:]), drafted, shown, tuple(self.logprobs[begin:])), *self._next_round()]

    def _read(self, token: int) -> tuple[str, FinishReason | None]:
        """The text that a token completes, and whether the reply ends with it."""
        if token in self.request.end:
            return "", "stop"
        text, stopped = self._stops.push(self.detokenizer.push(token))
        if stopped:
            return text, "stop"
        return text, "length" if len(self.tokens) >= self.request.max_tokens else None

    def _next_round(self) -> list[Action]:
        self.round += 1
        room = self.request.max_tokens - len(self.tokens)
        self.proposal = None
        plan = self.plan() if self.speculating and self.request.tree.gamma and room > 1 else None
        if plan is None:
            return self._verify(NO_TREE)
        self.state = State.DRAFTING
        return [Ask("draft", self._order(plan, room))]

    def _order(self, plan: Plan, room: int) -> Draft:
        """The Draft of this round, with everything that was committed since the last one."""
        tree, rejects = self.request.tree, self.request.sampling.rejects
        order = Draft(
            epoch=self.epoch,
            session=self.number,
            round=self.round,
            prefix=self.length,
            accepted=self._accepted,
            bonus=self._bonus,
            more=tuple(self._more),
            max_nodes=tree.most_nodes,
            max_depth=min(tree.most_levels, room - 1, plan.most_depth or tree.most_levels),
            max_width=tree.width,
            deadline_ms=plan.deadline_ms,
            rate=plan.rate,
            floor=plan.floor,
            ahead=plan.ahead and not rejects,
            features=stack(self._features) if self._features else None,
        )
        self._more, self._features = [], []
        return order

    def _verify(self, tree: TokenTree, drawn: Drafted | None = None) -> list[Action]:
        """`drawn`: the proposal, where the target needs to know what its nodes were drawn from."""
        self.state, self._tree = State.VERIFYING, tree
        item = VerifyItem(session=self.number, round=self.round, prefix=self.length, tokens=tree.tokens, parents=tree.parents)
        if drawn is None:
            return [Ask("target", Verify(epoch=self.epoch, items=(item,)))]
        return [Ask("target", Verify(epoch=self.epoch, items=(item,), candidates=drawn.candidates, probabilities=drawn.probabilities))]

    def _finish(self, reason: FinishReason, begin: int | None = None, drafted: int = 0, shown: str = "") -> list[Action]:
        """Show what was held back - not where a stop string was found - and end."""
        begin = len(self.tokens) if begin is None else begin
        by_stop_string = reason == "stop" and self.tokens[-1] not in self.request.end
        if not by_stop_string:
            last, _ = self._stops.push(self.detokenizer.flush())
            shown += last + self._stops.flush()
        self.text += shown
        new = tuple(self.tokens[begin:])
        emitted = [Emit(new, min(drafted, len(new)), shown, tuple(self.logprobs[begin:]))] if new or shown else []
        return [*emitted, Finish(reason), *self._close(keep=self._prompt_read)]


def _check_drawn(event: Drafted) -> None:
    """Passes a proposal that says for each node from what its children were drawn."""
    candidates, probabilities = event.candidates, event.probabilities
    if candidates is None or probabilities is None or (candidates.dtype, probabilities.dtype) != ("int32", "float32"):
        raise ProtocolError("a proposal without the probabilities that it was drawn from")
    rows, count = candidates.shape if len(candidates.shape) == 2 else (0, 0)
    if candidates.shape != probabilities.shape or rows != 1 + len(event.tokens) or not 1 <= count <= MAX_CANDIDATES:
        raise ProtocolError(f"a proposal of {len(event.tokens)} nodes with candidates {candidates.shape} and probabilities {probabilities.shape}")


def _sampling(sampling: Sampling) -> Sampling:
    """Just the processors: a request's settings may be of a richer class."""
    return Sampling(**{name: getattr(sampling, name) for name in Sampling.model_fields})
