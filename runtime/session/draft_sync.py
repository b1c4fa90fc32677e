"""Draft sync: which part of the token log a session's draft has, and what must be sent. A draft is
opened with the beginning of the log, gets the features of that part if it reads its target, and
gets with each command the tokens committed since the last one. Tokens of rounds without a draft are
kept for the next command. Pure; features are opaque."""

from dataclasses import dataclass, field

from dovetail.protocol.arrays import ITEM_BYTES, Array, stack
from dovetail.protocol.messages import Draft, Reads
from dovetail.runtime.control.rounds import Plan
from dovetail.runtime.session.kept import Base
from dovetail.runtime.session.request import Request


@dataclass(frozen=True)
class Joining:
    """A draft that joins a running session: the features that it reads, and its base."""

    reads: Reads | None = None
    base: Base | None = None


@dataclass
class DraftSync:
    """The sync of one draft, from its Open on."""

    tokens: int  # tokens of the log that it was opened with
    round: int = 0  # the round of its Open
    reads: Reads | None = None  # the features that it reads of its target
    base: Base | None = None
    """The ended session that it reuses; if it reads its target, the features of these tokens are
    not sent again."""
    bonus: int = 0
    """The token after the `accepted` nodes of its last proposal, or after its opening log."""
    accepted: tuple[int, ...] = ()
    more: list[int] = field(default_factory=list)
    """Tokens committed after that in rounds without an order."""
    features: list[Array] = field(default_factory=list)
    """Features of the verdicts since the last order."""
    held_bytes: int = 0  # size of `features` and of those that the target holds
    held: int = 0  # rows of features that the target has kept from its last verdicts
    rows: int = 0  # tokens of the log at its last proposal; 0: there was none
    fed: int = field(init=False)  # positions whose features it was sent or has from its base

    def __post_init__(self) -> None:
        self.fed = self.base.tokens if self.base is not None and self.reads is not None else 0

    @property
    def complete(self) -> bool:
        """Whether it has the features of everything that it was opened with."""
        return self.reads is None or self.fed == self.tokens

    @property
    def row_bytes(self) -> int:
        """The size of the features of one position; 0 if it reads none."""
        return 0 if self.reads is None else self.reads.row * ITEM_BYTES[self.reads.dtype]

    def keep_held(self, rows: int) -> None:
        """Note that the target keeps this many more rows."""
        self.held += rows
        self.held_bytes += rows * self.row_bytes

    def fits(self, features: Array | None, rows: int) -> bool:
        """Return whether these are this many rows of the features that it reads; always True if it
        reads none."""
        if self.reads is None:
            return True
        return features is not None and (features.dtype, features.shape) == (
            self.reads.dtype,
            (rows, self.reads.row),
        )

    def committed(
        self, accepted: tuple[int, ...], bonus: int, features: Array | None, *, ordered: bool
    ) -> None:
        """Note the tokens of a round. `ordered`: the draft got a command, whether or not its
        proposal came in time; `features`: those of the root and the accepted nodes; None if the
        target has kept them."""
        if self.reads is not None and features is None:
            self.keep_held(1 + len(accepted))
        elif self.reads is not None and features is not None:
            self.features.append(features)
            self.held_bytes += len(features.data) - self.held * self.row_bytes
            self.held = 0
        if ordered:
            self.accepted, self.bonus = accepted, bonus
        else:
            self.more.append(bonus)

    def order(
        self, request: Request, plan: Plan, *, epoch: int, session: int, round: int, prefix: int
    ) -> Draft:
        """Return the Draft of a round, with everything committed since the last one. `prefix`:
        tokens of the log."""
        more, features = tuple(self.more), stack(self.features) if self.features else None
        self.more, self.features, self.held_bytes = [], [], 0
        room = len(request.prompt) + request.max_tokens - prefix
        most_levels = request.most_levels
        return Draft(
            epoch=epoch,
            session=session,
            round=round,
            prefix=prefix,
            accepted=self.accepted,
            bonus=self.bonus,
            more=more,
            max_nodes=request.most_nodes,
            max_depth=min(most_levels, room - 1, plan.most_depth or most_levels),
            max_width=request.tree.width,
            deadline_ms=plan.deadline_ms,
            rate=plan.rate,
            floor=plan.floor,
            ahead=plan.ahead and not request.rejects,
            features=features,
        )
