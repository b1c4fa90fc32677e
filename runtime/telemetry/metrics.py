"""Accounts of each request - every nanosecond of it is charged to one of them, and their sum is its
wall time - and totals over all requests. Times are arguments, in nanoseconds on the coordinator's
monotonic clock."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from dovetail.protocol.messages import Drafted, FinishReason, KeyWaits, Result, RoundRecord, Totals
from dovetail.protocol.spans import Span

OFFERED = ("tokens", "parents", "scores", "entropy", "hit", "grown", "ahead", "wasted", "passes")
"""Fields of a proposal that are recorded."""

Account = Literal["prefill", "draft_exposed", "verify", "transport", "queue", "coordinator"]


def extent_ns(spans: Sequence[Span]) -> int:
    """Return the time from the first start to the last end: how long the command took."""
    if len(spans) == 1:
        return spans[0][2]
    if not spans:
        return 0
    return max(start + duration for _, start, duration in spans) - min(
        start for _, start, _ in spans
    )


@dataclass
class RoundTimes:
    """Nanoseconds of a round, from verdict to verdict, and the experts of its pass."""

    draft_ns: int = 0  # drafting for which the round waited
    draft_hop_ns: int = 0  # from command to proposal, without drafting; `target_hop_ns` likewise
    draft_queue_ns: int = 0  # until the draft worker was free, or had prefilled the prompt
    verify_ns: int = 0
    target_hop_ns: int = 0
    target_queue_ns: int = 0
    coordinator_ns: int = 0
    experts: int = 0  # experts that the target's pass used, from its verdict
    early: int = 0  # 1 if its pass was requested during the previous one, else 0

    @property
    def own_ns(self) -> int:
        """The time without the wait for the target."""
        return (
            self.draft_ns
            + self.draft_hop_ns
            + self.draft_queue_ns
            + self.verify_ns
            + self.target_hop_ns
            + self.coordinator_ns
        )

    @property
    def missed_ns(self) -> int:
        """Return the part of a wait due to drafting: without a draft, a session joins the next
        pass. A wait longer than a pass is for a prompt."""
        return min(self.target_queue_ns, self.verify_ns)

    @property
    def transport_ns(self) -> int:
        return self.draft_hop_ns + self.target_hop_ns

    @property
    def queue_ns(self) -> int:
        return self.draft_queue_ns + self.target_queue_ns


class RoundFacts(NamedTuple):
    """An ended round, before its record is requested."""

    round: int
    prefix: int
    proposal: Drafted | None
    verified: int
    accepted: tuple[int, ...]
    bonus: int
    times: RoundTimes
    committed: int | None = None  # the committed tokens, as counted by `RoundRecord.committed`

    def record(self) -> RoundRecord:
        offered = (
            {name: getattr(self.proposal, name) for name in OFFERED}
            if self.proposal is not None
            else dict.fromkeys(OFFERED[:3], ())
        )
        times = self.times
        return RoundRecord(
            round=self.round,
            prefix=self.prefix,
            verified=self.verified,
            accepted=self.accepted,
            bonus=self.bonus,
            committed=self.committed,
            draft_ns=times.draft_ns,
            verify_ns=times.verify_ns,
            experts=times.experts,
            transport_ns=times.transport_ns,
            queue_ns=times.queue_ns,
            coordinator_ns=times.coordinator_ns,
            **offered,
        )

    def light(self) -> "RoundFacts":
        """Return the facts without a proposal's probabilities, which can be large."""
        if self.proposal is None or self.proposal.candidates is None:
            return self
        dropped = {"candidates": None, "probabilities": None}
        return self._replace(proposal=self.proposal.model_copy(update=dropped))


@dataclass
class Tally:
    """Totals over all requests, including running ones."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    completion_tokens: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at_depth: list[int] = field(default_factory=list)
    ended: Counter[FinishReason] = field(default_factory=Counter)
    rounds: int = 0
    """Rounds of requests that have ended with a reply; `round_tokens`: tokens committed in them."""
    round_tokens: int = 0
    refused: int = 0  # requests refused before anything was decoded
    moves: int = 0
    rebalanced: int = 0  # moves to a target that is faster for a session than its own
    let_go: int = 0  # disconnected clients that did not read

    def end(self, reason: FinishReason, result: Result) -> None:
        """Note that a request has ended with its reply."""
        self.ended[reason] += 1
        self.rounds += result.rounds
        self.round_tokens += round(result.tau * result.rounds) if result.tau else 0

    @property
    def tau(self) -> float | None:
        """Tokens per round of ended requests; None before any."""
        return self.round_tokens / self.rounds if self.rounds else None

    def totals(
        self,
        *,
        draft_failures: int,
        opening: int,
        waiting: int,
        kept: int,
        occupied: float,
        queue: Sequence[KeyWaits],
        queued: int,
    ) -> Totals:
        """Return the totals with these gauges."""
        return Totals(
            queue=tuple(queue),
            queued=queued,
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused_tokens,
            completion_tokens=self.completion_tokens,
            drafts=self.drafts,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            accepted_per_depth=tuple(self.accepted_at_depth),
            reasons=tuple(sorted(self.ended.items())),
            refused_requests=self.refused,
            opening=opening,
            waiting=waiting,
            moves=self.moves,
            rebalanced=self.rebalanced,
            let_go=self.let_go,
            kept=kept,
            occupied=occupied,
            draft_failures=draft_failures,
        )


@dataclass
class Dropped:
    """Messages that had no effect."""

    stale: int = 0  # late messages
    refused: int = 0  # messages that broke the protocol, or came from an unregistered peer


def count_depths(accepted: int, *counts: list[int]) -> None:
    """Count a round that accepted nodes down to this depth, in each of these lists of counts."""
    for at_depth in counts:
        at_depth.extend([0] * (accepted - len(at_depth)))
        for depth in range(accepted):
            at_depth[depth] += 1


@dataclass
class Accounts:
    """The times and counts of one request."""

    began_ns: int
    tally: Tally = field(default_factory=Tally)  # totals over all requests, including this one
    ns: dict[Account, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("prefill", "draft_exposed", "verify", "transport", "queue", "coordinator"), 0
        )
    )
    first_token_ns: int | None = None
    rounds: int = 0
    drafted_rounds: int = 0
    hits: int = 0
    accepted: int = 0
    drafted: int = 0
    grown: int = 0
    ahead: int = 0
    wasted: int = 0
    plain: int = 0  # rounds that were verified without a tree
    bytes: int = 0
    accepted_at_depth: list[int] = field(default_factory=list)

    def add(self, account: Account, duration_ns: int) -> None:
        self.ns[account] += duration_ns

    def reply(self, account: Account, waited_ns: int, spans: Sequence[Span], size: int) -> int:
        """Split a wait for an answer of `size` bytes into work and transport; return the work."""
        worked = min(extent_ns(spans), waited_ns)
        self.ns[account] += worked
        self.ns["transport"] += waited_ns - worked
        self.bytes += size
        return worked

    def proposal(self, drafted: Drafted) -> None:
        self.grown += drafted.grown
        self.ahead += drafted.ahead
        self.wasted += drafted.wasted
        self.hits += drafted.hit
        self.drafted_rounds += 1

    def read(self, prompt_tokens: int, reused_tokens: int) -> None:
        """Note that the target has prefilled the prompt, some of it reused from an earlier
        session."""
        self.tally.prompt_tokens += prompt_tokens
        self.tally.reused_tokens += reused_tokens

    def verdict(self, drafted: int, accepted: int, committed: int) -> None:
        """Count one target pass: committed tokens, `accepted` of them drafted nodes."""
        tally = self.tally
        tally.completion_tokens += committed
        self.rounds += 1
        self.plain += drafted == 0
        self.drafted += drafted
        self.accepted += accepted
        tally.drafts += drafted > 0
        tally.drafted_tokens += drafted
        tally.accepted_tokens += accepted
        count_depths(accepted, self.accepted_at_depth, tally.accepted_at_depth)

    def figures(self, now_ns: int, completion_tokens: int) -> dict[str, Any]:
        """Return the measured fields of `messages.Result`, in seconds and shares."""
        wall = now_ns - self.began_ns
        decode = now_ns - (self.first_token_ns or now_ns)
        after_first = completion_tokens - 1
        return {
            "rounds": self.rounds,
            "tau": after_first / self.rounds if self.rounds else None,
            "accepted_tokens": self.accepted,
            "drafted_tokens": self.drafted,
            "grown_nodes": self.grown,
            "acceptance_rate": self.accepted / self.drafted if self.drafted else None,
            "accepted_per_position": tuple(n / self.rounds for n in self.accepted_at_depth),
            "hit_rate": self.hits / self.drafted_rounds if self.drafted_rounds else None,
            "wall_s": wall / 1e9,
            "time_to_first_token_s": ((self.first_token_ns or now_ns) - self.began_ns) / 1e9,
            "tokens_per_s": after_first / decode * 1e9 if decode > 0 and after_first > 0 else 0.0,
            **{f"{account}_s": ns / 1e9 for account, ns in self.ns.items()},
            "unaccounted_s": (wall - sum(self.ns.values())) / 1e9,
            "bytes_per_round": self.bytes / self.rounds if self.rounds else 0.0,
            "ahead_nodes": self.ahead,
            "wasted_nodes": self.wasted,
            "verified_rows": self.rounds + self.drafted,
            "plain_rounds": self.plain,
        }
