"""Lines about a reply for people: its cost, and where it was decoded without speculation."""

from collections.abc import Sequence

from dovetail.launch.console.terminal import counted, note
from dovetail.protocol.messages import Reported, Result

TOLD_SHARE = 0.05
"""Above this share of the time, the summary includes prefill, and waiting for workers."""
NOTHING_PAID = "no node was expected to pay, or the draft had not read the prompt yet"
NOTHING_OFFERED = "the draft offered nothing"
"""Why a round has no tree although nothing was decided: a policy that does not weigh costs always
asks the draft, and waits for it."""


def tell_full_context(result: Result, most: int) -> None:
    """Note that a reply of at most `most` tokens ended earlier because the context was full."""
    if result.finish_reason == "length" and result.completion_tokens < most:
        note(
            "the reply ended because the target's context is full, before --max-tokens "
            f"{most}: prompt and reply share it"
        )


def summary(result: Result, models: str) -> str:
    """Return a line with the figures of a request."""
    parts = [
        f"{counted(result.completion_tokens, 'token')} in {result.wall_s:.2f} s, the first after "
        f"{result.time_to_first_token_s:.2f} s",
        f"{result.tokens_per_s:.1f} tokens/s{_predicted(result)}",
    ]
    if result.tau is not None:
        parts.append(f"tau {result.tau:.2f}")
    if result.acceptance_rate is not None:
        parts.append(f"acceptance {result.acceptance_rate:.2f}")
    if result.hit_rate is not None and result.ahead_nodes:
        parts.append(f"hit {100 * result.hit_rate:.0f} %")
    parts.append(counted(result.rounds, "round"))
    if result.draft_failure is not None:
        parts.append(f"draft failed in round {result.draft_failure.round}")
    if result.prefill != "local":
        parts.append(f"prompt read by {result.prefill}")
    if result.moves:
        parts.append(f"{counted(result.moves, 'move')} to another target")
    prefill = result.prefill_s if result.prefill_s > TOLD_SHARE * result.wall_s else 0.0
    waiting = result.queue_s if result.queue_s > TOLD_SHARE * result.wall_s else 0.0
    worked = (
        ("draft", result.draft_exposed_s),
        ("verify", result.verify_s),
        ("transport", result.transport_s),
    )
    shares = (("prefill", prefill), *worked, ("waiting", waiting))
    parts.append(
        " ".join(
            f"{name} {100 * seconds / result.wall_s:.0f} %" for name, seconds in shares if seconds
        )
    )
    return " · ".join((*parts, f"seed {result.seed}", models))


def other_targets(result: Result) -> str:
    """Return a note on a reply that moved to targets with other fingerprints."""
    return (
        "this reply comes from targets that compute differently; none of them alone would give it: "
        f"{', then '.join(result.fingerprints)}"
    )


def _predicted(result: Result) -> str:
    return (
        ""
        if result.predicted_tokens_per_s is None
        else f" ({result.predicted_tokens_per_s:.1f} predicted)"
    )


def missing_draft(before: Reported, after: Reported) -> str:
    """Return why there is no draft worker; empty if there is one."""
    had, has = (
        any(
            "draft" in worker.roles and not (worker.standby or worker.leaving)
            for worker in state.workers
        )
        for state in (before, after)
    )
    return "" if has else "its draft worker was lost" if had else "there is no draft worker"


def without_speculation(
    result: Result, decisions: Sequence[str], *, insists: bool, last: int, missing: str = ""
) -> str:
    """Return how many rounds the target decoded alone, and why: for measurement, for lack of room
    after the token that every round adds, or by the coordinator's last decision. `insists`: whether
    the request did; `last`: tokens of the last round; `missing`: why there is no draft, in
    words."""
    plain, every = result.plain_rounds, result.plain_rounds == result.rounds
    about = [
        line for line in decisions if line.startswith("session ")
    ]  # others are about a pair of workers
    full = result.finish_reason == "length" and last == 1 and (not every or plain == 1)
    reasons = [
        f"{result.control_rounds} to measure the target's pass over a single row"
        if result.control_rounds
        else "",
        "the last, which had room for a single token" if full else "",
        missing or (about[-1] if about else ""),
    ]
    left = plain - result.control_rounds - full
    if left > 0 and not about and not missing:
        reasons.append(f"{left} in which {NOTHING_OFFERED if insists else NOTHING_PAID}")
    which = "every round" if every else f"{plain} of {counted(result.rounds, 'round')}"
    told = "; ".join(filter(None, reasons))
    return f"without speculation in {which}{f': {told}' if told else ''}"
