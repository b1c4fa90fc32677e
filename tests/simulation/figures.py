"""The figures of a simulated or measured method, over all its replies. Sums before quotients, as
`dovetail bench` has it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Result


@dataclass(frozen=True)
class Figures:
    """Figures of the tokens after the first one of each reply, and of the time that they took."""

    tokens: int
    decode_s: float
    rounds: int
    tokens_per_s: float
    tau: float
    draft_share: float  # share of that time spent waiting for the draft
    draft_s: float  # seconds a round spent waiting for the draft
    verify_s: float  # the target's pass, on average
    hit_rate: float | None
    rows: float  # rows of a pass of the target, its root counted
    grown: float  # nodes a round that were waited for
    ahead: float  # nodes a round that were grown meanwhile
    wasted: float
    plain_share: float  # share of the rounds without a draft
    predicted_tokens_per_s: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def figures(results: Sequence[Result]) -> Figures:
    """The sums of some replies; those of a single token count for nothing, and `UserError` says so
    where there are no others."""
    counted = [result for result in results if result.rounds]
    if not counted:
        raise UserError(
            "every reply has a single token, which comes with the prompt: take other prompts, "
            "or allow more tokens"
        )
    tokens, rounds = (
        sum(values)
        for values in zip(*((r.completion_tokens - 1, r.rounds) for r in counted), strict=True)
    )
    decode_s = sum(r.wall_s - r.time_to_first_token_s for r in counted)
    drafted = sum(r.rounds - r.plain_rounds for r in counted)
    hits = sum((r.hit_rate or 0.0) * (r.rounds - r.plain_rounds) for r in counted)
    expected = [
        (r.completion_tokens - 1, r.predicted_tokens_per_s)
        for r in counted
        if r.predicted_tokens_per_s
    ]
    return Figures(
        tokens=tokens,
        decode_s=decode_s,
        rounds=rounds,
        tokens_per_s=tokens / decode_s,
        tau=tokens / rounds,
        draft_share=sum(r.draft_exposed_s for r in counted) / decode_s,
        draft_s=sum(r.draft_exposed_s for r in counted) / rounds,
        verify_s=sum(r.verify_s for r in counted) / rounds,
        hit_rate=hits / drafted if drafted else None,
        rows=sum(r.verified_rows for r in counted) / rounds,
        grown=sum(r.grown_nodes for r in counted) / rounds,
        ahead=sum(r.ahead_nodes for r in counted) / rounds,
        wasted=sum(r.wasted_nodes for r in counted) / rounds,
        plain_share=sum(r.plain_rounds for r in counted) / rounds,
        predicted_tokens_per_s=sum(n for n, _ in expected) / sum(n / rate for n, rate in expected)
        if expected
        else None,
    )
