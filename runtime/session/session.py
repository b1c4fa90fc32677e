"""One request's life as a state machine: an event in, actions out.

The token log (`prompt + tokens`) is the only truth; everything that a worker holds can be rebuilt
from it. A round asks the draft worker for a tree and the target worker for its verdict, and commits
the accepted tokens and the bonus one by one. An end token, a stop string or the length limit may
cut an accepted path, so the output does not depend on how many tokens a round commits. Then the
session requests its next round, which begins with a plan for drafting. Features for a draft are
passed on as they arrive: the prompt's by Feed, those of verdicts with the next Draft. They are
opaque here.

A session outlives its workers. Without its draft it continues with the target alone. It gets
another draft between two rounds: that draft prefills the log and, if it reads its target, features,
which the target recomputes. Without its target it waits for another one, which prefills the log;
the token that this target chooses after the log is the verdict of the lost round, with no node
accepted. It is the token that would have followed anyway.

An event is a call of a method that returns actions, without callbacks, so a session's actions
depend only on its events and their arguments. It has no sockets, no clock (time is an argument, in
nanoseconds) and no workers: an `Ask` names a role, and the scheduler decides when it is sent."""

from collections.abc import Sequence

from dovetail.protocol.arrays import Array
from dovetail.protocol.errors import ProtocolError, StaleError, TreeError
from dovetail.protocol.messages import (
    MAX_CANDIDATES,
    Close,
    Drafted,
    Feed,
    FinishReason,
    Open,
    Opened,
    Prefilled,
    Refed,
    Refeed,
    Scored,
    TokenLogprobs,
    VerifiedItem,
    Verify,
    VerifyItem,
)
from dovetail.protocol.tree import TokenTree
from dovetail.runtime.control.rounds import Plan
from dovetail.runtime.session.actions import Action, Ask, Emit, Finish, NextRound, Note, Score
from dovetail.runtime.session.draft_sync import DraftSync, Joining, UnreadableFeatures
from dovetail.runtime.session.request import Base, Request, check_logprobs, for_draft
from dovetail.runtime.session.state import NO_TREE, SessionState, State
from dovetail.runtime.telemetry.metrics import RoundFacts, RoundTimes


def read_proposal(event: Drafted, request: Request) -> TokenTree:
    """Return the tree of a proposal. Raises `TreeError` if it is not a tree, or too large, and
    `ProtocolError` if its other fields do not fit."""
    tree = event.tree
    nodes = len(tree)
    if nodes > request.most_nodes:
        raise TreeError(
            f"a proposal of {nodes} nodes, but at most {request.most_nodes} were requested"
        )
    if len(event.scores) != nodes:
        raise ProtocolError(f"a proposal of {nodes} nodes with {len(event.scores)} scores")
    if (highest := max(event.scores, default=0.0)) > 0.0:  # its exponential is a probability
        raise ProtocolError(
            f"a proposal with the score {highest:g}: the logarithm of a probability is at most 0"
        )
    tree.check(request.vocabulary_size)
    if request.rejects and nodes:
        _check_probabilities(event)
    return tree


def _check_probabilities(event: Drafted) -> None:
    """Raise `ProtocolError` unless each node has the probabilities of its children."""
    candidates, probabilities = event.candidates, event.probabilities
    if (
        candidates is None
        or probabilities is None
        or (candidates.dtype, probabilities.dtype) != ("int32", "float32")
    ):
        raise ProtocolError("a proposal without the probabilities from which it was drawn")
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


class Session(SessionState):
    """Drives one request through its rounds; every event is a method that returns the resulting
    actions."""

    def begin(self) -> list[Action]:
        """Open the session on its workers; end it if its reply was complete already."""
        if self.over is not None:
            return self._finish(self.over)
        asks: list[Action] = [self._open_target()]
        return [*asks, self._open_draft(self.length, self.round)] if self.speculating else asks

    def base_refused(self, role: str) -> list[Action]:
        """Make a worker prefill everything, since it lacks the rows of its base. Features are
        requested for the same positions as before, since a draft that reads its target keeps those
        of its base."""
        if role == "target":
            self.target_base = None
            return [self._open_target()]
        assert self.draft_sync is not None
        self.draft_sync.base = None
        return [self._open_draft(self.draft_sync.tokens, self.draft_sync.round)]

    def _open(self, tokens: int, round: int) -> Open:
        return self.request.open_command(
            self.request.log(self.tokens, tokens),
            epoch=self.epoch,
            session=self.number,
            round=round,
            reads=self.draft_sync.reads if self.draft_sync is not None else None,
        )

    def _open_target(self) -> Ask:
        """Make the target prefill the log. It returns the features that the draft lacks, including
        those of the root, which a verdict would otherwise bring."""
        self._features.forget_root()
        features_from = None
        if self.draft_sync is not None and self.draft_sync.reads is not None:
            self._features.next = features_from = self.shown_from
        command = self.request.for_target(
            self._open(self.length, self.round),
            self.target_base,
            features_from=features_from,
            begun=bool(self.tokens),
        )
        return Ask("target", command)

    def _open_draft(self, tokens: int, round: int) -> Ask:
        """Make the draft prefill this many tokens of the log; `round`: the one completed by the
        next token."""
        base = self.draft_sync.base if self.draft_sync is not None else None
        return Ask("draft", for_draft(self._open(tokens, round), base, self.fingerprint))

    def prefilled(self, event: Prefilled) -> list[Action]:
        """Send the draft the target's features of the draft's part of the log."""
        waits = self.state is State.OPENING or self._features.recomputing
        if event.round != self.round or not waits:
            raise StaleError(
                f"session {self.number} was not waiting for features in round {event.round}"
            )
        if self.draft_sync is None:
            return []
        fed = self._features.take(event, self.draft_sync, self.length)
        if fed is None:
            return []
        start, features = fed
        command = Feed(
            epoch=self.epoch,
            session=self.number,
            round=self.draft_sync.round,
            start=start,
            features=features,
        )
        return [Ask("draft", command)]

    def refed(self, event: Refed) -> list[Action]:
        """Note that the target has computed all features of the draft's opening log."""
        if not self._features.recomputing or event.round != self.round:
            raise StaleError(
                f"session {self.number} was not waiting for features in round {event.round}"
            )
        self._features.recomputing = False
        if self.draft_sync is not None and not self.draft_sync.complete:
            raise ProtocolError(
                f"features of {self.draft_sync.fed} tokens, but {self.draft_sync.tokens} were "
                "requested"
            )
        return []

    def scored(self, event: Scored) -> list[Action]:
        """Handle the target's log-probabilities of a part of the prompt; of a second target's, only
        those that the first had not sent are passed on."""
        if self.state is not State.OPENING or event.round != self.round:
            raise StaleError(
                f"session {self.number} was not waiting for scores of position {event.start}"
            )
        expected = self.request.scored and not self.tokens
        told = self._scores.take(event, self.request, expected=expected)
        return [] if told is None else [Score(*told)]

    def opened(self, event: Opened, now_ns: int, times: RoundTimes | None = None) -> list[Action]:
        """Handle the first token of a target that has prefilled the prompt, or the token of another
        target that has prefilled the log, which is the verdict of a round."""
        if self.state is not State.OPENING or event.bonus is None or event.round != self.round:
            raise StaleError(
                f"session {self.number} was not waiting for the first token of its target"
            )
        logprobs = () if event.logprobs is None else (event.logprobs,)
        check_logprobs(logprobs, 1, self.request)
        if self.request.scored and not self.tokens:
            self._scores.check_whole(self.request)
        self._take_over()
        self._placement, self._read_by = event.placement, event.read_by
        self._reused_from = event.restored or ("" if self.target_base is None else "session")
        margins = (event.margin or 0.0,)
        if self._prompt_read:
            features = self._features.of_root
            return self._decided((), (event.bonus,), margins, logprobs, features, times)
        self.accounts.first_token_ns = now_ns
        kept = self.target_base.tokens if self.target_base else 0
        self._reused = min(kept, len(self.request.prompt))
        self.accounts.read(len(self.request.prompt), self._reused)
        self._prompt_read = True
        if not self.request.max_tokens:
            return self._finish("length")
        if self.draft_sync is not None:
            self.draft_sync.bonus = event.bonus
        actions = self._commit([event.bonus], margins, logprobs, drafted=0)
        self.accounts.tally.completion_tokens += len(self.tokens) - self.restored
        return actions

    def _take_over(self) -> None:
        """Note that the target serves the session from now on."""
        if self._moved:
            self.moves, self._moved = self.moves + 1, False
            self.accounts.tally.moves += 1
        if self._served[-1:] != [self.fingerprint]:
            self._served.append(self.fingerprint)

    # -- a round -----------------------------------------------------------------------------------

    @property
    def may_draft(self) -> bool:
        """Whether the session's draft is ready to draft the next round."""
        left = self.request.max_tokens - len(self.tokens)
        return self.draft_sync is not None and self.request.tree.gamma > 0 and left > 1

    def wants_proposal(self, round: int) -> bool:
        """Return whether the session waits for a proposal of this round."""
        return self.state is State.DRAFTING and round == self.round

    @property
    def holding(self) -> bool:
        """True if the target keeps features that the draft must read before it can draft."""
        return self.draft_sync is not None and self.draft_sync.held > 0

    @property
    def scores(self) -> Sequence[float]:
        """The scores of the nodes in the target's command."""
        return self.proposal.scores[: len(self.tree.tokens)] if self.proposal is not None else ()

    def _readable(self, item: VerifiedItem, features: Array | None) -> bool:
        """Return whether the features of a verdict, or their absence, fit the draft."""
        if self.draft_sync is None or self.draft_sync.reads is None:
            return True  # rows kept for another draft are not needed
        if self._hold and features is None:
            return True
        rows = self.draft_sync.held + 1 + len(item.accepted)
        return item.held == self.draft_sync.held and self.draft_sync.fits(features, rows)

    def drafted(self, event: Drafted) -> list[Action]:
        """Handle the draft worker's proposal: request verification of its tree."""
        if self.state is not State.DRAFTING or event.round != self.round:
            raise StaleError(
                f"session {self.number} was not waiting for a proposal of round {event.round}"
            )
        tree = read_proposal(event, self.request)
        self.accounts.proposal(event)
        self.proposal = event
        if self.draft_sync is not None:
            self.draft_sync.rows = self.length - 1
        return self._verify(tree, event if self.request.rejects and tree else None)

    def sent(self, nodes: int) -> list[Action]:
        """Note how many nodes of the proposal were sent for verification."""
        if nodes < len(self.tree.tokens):
            self.tree = self.tree.prefix(nodes)
        return []

    def verified(
        self, item: VerifiedItem, features: Array | None = None, times: RoundTimes | None = None
    ) -> list[Action]:
        """Handle the target's verdict: commit the accepted path and the bonus. Raises
        `UnreadableFeatures`, changing nothing, if its features do not fit. `times`: of the round,
        for its record."""
        if self.state is not State.VERIFYING or item.round != self.round:
            raise StaleError(
                f"session {self.number} was not waiting for a verdict of round {item.round}"
            )
        if not self._readable(item, features):
            raise UnreadableFeatures(
                f"features {features and features.shape} with {item.held} held rows and a path of "
                f"{len(item.accepted)}"
            )
        tree, tokens = self.tree, list[int]()
        if tree.is_path(item.accepted):
            tokens = [*(tree.tokens[node] for node in item.accepted), item.bonus]
        in_vocabulary = item.bonus < self.request.vocabulary_size
        if not tokens or len(item.margins) != len(tokens) or not in_vocabulary:
            raise ProtocolError(f"the verdict of round {item.round} fits no path of the sent tree")
        if item.logprobs or self.request.logprobs is not None:
            check_logprobs(item.logprobs, len(tokens), self.request)
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
        """End a round in which these nodes were accepted; `tokens`: theirs and the bonus."""
        before, drafted = len(self.tokens), len(self.tree.tokens)
        about = self.round, self.length, self.proposal, drafted, accepted, tokens[-1]
        if self.draft_sync is not None:
            self.draft_sync.committed(accepted, tokens[-1], features, ordered=self._ordered)
        actions = self._commit(tokens, margins, logprobs, drafted=len(accepted))
        committed = len(self.tokens) - before
        self.accounts.verdict(drafted, min(len(accepted), committed), committed)
        cut = committed if committed < len(tokens) else None
        self.ended = RoundFacts(*about, times or RoundTimes(), cut)
        if self.request.record:
            actions.insert(1, Note(self.ended.record()))
        return actions

    def next_round(
        self, plan: Plan | None, joining: Joining | None = None, hold: bool = False
    ) -> list[Action]:
        """Begin the next round, drafted by `plan`, or undrafted if that is None. `joining`: a draft
        that joins the session now and is used from the next round on; `hold`: the target keeps the
        features of this undrafted round, since no drafting is expected soon."""
        if self.state not in (State.READY, State.BETWEEN):
            raise RuntimeError(f"session {self.number} is {self.state.value}, not between rounds")
        if joining is not None:
            return [*self._join(joining), *self._verify(NO_TREE)]
        draft_sync = self.draft_sync if self.may_draft else None
        self._ordered = draft_sync is not None and plan is not None
        if draft_sync is None or plan is None:
            return self._verify(NO_TREE, hold=hold)
        self.state = State.DRAFTING
        order = draft_sync.order(
            self.request,
            plan,
            epoch=self.epoch,
            session=self.number,
            round=self.round,
            prefix=self.length,
        )
        return [Ask("draft", order)]

    def draft_lost(self) -> list[Action]:
        """Continue with the target alone, from the round in which the draft worker was lost."""
        self.draft_sync, self._features.recomputing = None, False
        return self._verify(NO_TREE) if self.state is State.DRAFTING else []

    def draft_late(self) -> list[Action]:
        """Verify without this round's proposal, which is stale when it arrives."""
        return self._verify(NO_TREE) if self.state is State.DRAFTING else []

    def target_lost(self) -> list[Action]:
        """Wait for another target; a result of the draft's command is ignored."""
        self.state, self.tree, self._features.recomputing = State.WAITING, NO_TREE, False
        self._features.forget_root()
        return []

    def recovered(self, fingerprint: str, base: Base | None = None) -> list[Action]:
        """Make another target prefill the log. `base`: the session that it reuses."""
        self.state, self._moved = State.OPENING, True
        self._scores.restart()
        self.fingerprint, self.target_base = fingerprint, base
        return [self._open_target()]

    def tree_refused(self) -> list[Action]:
        """Repeat the round without the proposal, which the target has rejected, and continue
        without a draft."""
        self.draft_sync = None
        return self._verify(NO_TREE)

    def cancel(self) -> list[Action]:
        """End now, with the tokens committed so far."""
        return [] if self.state is State.DONE else self._finish("cancelled")

    def abandon(self) -> list[Ask]:
        """Close the session on both workers: the client has cancelled."""
        return self._close(keep=False)

    def _close(self, *, keep: bool) -> list[Ask]:
        self.state = State.DONE
        command = Close(epoch=self.epoch, session=self.number, keep=keep)
        return [Ask("target", command), Ask("draft", command)]

    # -- within a round ----------------------------------------------------------------------------

    def _commit(
        self,
        tokens: Sequence[int],
        margins: Sequence[float],
        logprobs: Sequence[TokenLogprobs],
        *,
        drafted: int,
    ) -> list[Action]:
        """Extend the token log, up to the reply's end; stream, and request the next round."""
        begin = len(self.tokens)
        count, shown, reason = self.reply.read(tokens, self.request.max_tokens - begin)
        self.tokens += tokens[:count]
        self.length += count
        self.margins += margins[:count]
        self.logprobs += logprobs[:count]
        if reason:
            return self._finish(reason, begin, drafted, shown())
        self.state = State.BETWEEN if self.state is State.VERIFYING else State.READY
        self.round, self.proposal = self.round + 1, None
        return [
            Emit(tuple(self.tokens[begin:]), drafted, shown, tuple(self.logprobs[begin:])),
            NextRound(self.may_draft, self.holding),
        ]

    def _join(self, joining: Joining) -> list[Action]:
        """Make a draft prefill the log up to the root, which will be its first bonus. This round is
        not drafted."""
        reads, base = joining.reads, joining.base
        self._ordered = False
        self.draft_sync = DraftSync(
            self.length - 1, self.round - 1, reads, base, bonus=self.tokens[-1]
        )
        actions: list[Action] = [self._open_draft(self.draft_sync.tokens, self.draft_sync.round)]
        if reads is not None:
            self._features.recomputing, self._features.next = True, self.draft_sync.fed
            command = Refeed(
                epoch=self.epoch,
                session=self.number,
                round=self.round,
                start=self.draft_sync.fed,
                prefix=self.length,
                features=reads,
            )
            actions.append(Ask("target", command))
        return actions

    def _verify(
        self, tree: TokenTree, drawn: Drafted | None = None, *, hold: bool = False
    ) -> list[Action]:
        """Make the target verify a tree. `drawn`: the proposal, if the target needs the
        distributions of its nodes; `hold`: the target holds the features that the draft reads."""
        self.state, self.tree, self._hold = State.VERIFYING, tree, hold and self._reads_target
        return [Ask("target", self._verification(tree, drawn, hold=self._hold))]

    def verify_early(self) -> list[Ask]:
        """Request the verification of the next round, which has no draft, like the current one."""
        return [Ask("target", self._verification(NO_TREE, hold=self._reads_target, later=1))]

    @property
    def _reads_target(self) -> bool:
        return self.draft_sync is not None and self.draft_sync.reads is not None

    def _verification(
        self, tree: TokenTree, drawn: Drafted | None = None, *, hold: bool, later: int = 0
    ) -> Verify:
        """Return the command that verifies a tree, `later` undrafted rounds after the current
        one."""
        item = VerifyItem.unchecked(
            session=self.number,
            round=self.round + later,
            prefix=self.length + later,
            tokens=tree.tokens,
            parents=tree.parents,
            hold=hold,
        )
        return Verify.unchecked(
            epoch=self.epoch,
            type="verify",
            items=(item,),
            candidates=None if drawn is None else drawn.candidates,
            probabilities=None if drawn is None else drawn.probabilities,
            reads=(),
        )

    def _finish(
        self, reason: FinishReason, begin: int | None = None, drafted: int = 0, shown: str = ""
    ) -> list[Action]:
        """End, and send any text held back, unless a stop string was found."""
        begin = len(self.tokens) if begin is None else begin
        by_stop_string = reason == "stop" and self.tokens[-1] not in self.request.end
        if not by_stop_string:
            shown += self.reply.left()
        new = tuple(self.tokens[begin:])
        emitted = (
            [Emit(new, min(drafted, len(new)), shown.__str__, tuple(self.logprobs[begin:]))]
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
