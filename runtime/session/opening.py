"""The opening of a session: its workers prefill the token log. The target returns features for the
draft, and scores of the prompt for the client. Pure."""

from dovetail.protocol.errors import ProtocolError, StaleError
from dovetail.protocol.messages import Feed, Open, Prefilled, Refed, Scored
from dovetail.runtime.session.actions import Action, Ask, Score
from dovetail.runtime.session.request import for_draft
from dovetail.runtime.session.state import SessionState, State


class OpeningSession(SessionState):
    """Makes the workers of a session prefill its log."""

    def begin(self) -> list[Action]:
        """Open the session on its workers."""
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
        return Ask("draft", for_draft(self._open(tokens, round), base))

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
