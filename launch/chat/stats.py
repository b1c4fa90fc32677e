"""The figures of a reply or a conversation, as `/stats` prints them."""

from dovetail.launch.console.terminal import note, print_table
from dovetail.protocol.messages import Result

SHOWN_REPLIES = 10


def print_stats(results: list[Result | None]) -> None:
    """The figures of the last replies, one per row: their tokens, and where the time went. Two
    tables, since a terminal may have 80 columns."""
    shown = [
        (number, result) for number, result in enumerate(results, start=1) if result is not None
    ][-SHOWN_REPLIES:]
    if not shown:
        note("there is no reply yet")
        return
    figures = (
        "reply",
        "tokens",
        "tokens/s",
        "tau",
        "accepted %",
        "hit %",
        "first ms",
        "prompt",
        "reused",
    )
    print_table(figures, [(number, *_figures(result)) for number, result in shown])
    times = ("reply", "seconds", "prefill %", "draft %", "verify %", "transport %", "queue %")
    print_table(times, [(number, *_times(result)) for number, result in shown])


def _figures(result: Result) -> tuple[object, ...]:
    tau = None if result.tau is None else round(result.tau, 2)
    rates = (
        _rounded(result.tokens_per_s),
        tau,
        _percent(result.acceptance_rate),
        _percent(result.hit_rate),
        round(1e3 * result.time_to_first_token_s),
    )
    return (result.completion_tokens, *rates, result.prompt_tokens, result.reused_tokens)


def _times(result: Result) -> tuple[object, ...]:
    accounts = (
        result.prefill_s,
        result.draft_exposed_s,
        result.verify_s,
        result.transport_s,
        result.queue_s,
    )
    shares = (_percent(seconds / result.wall_s) if result.wall_s else None for seconds in accounts)
    return (_rounded(result.wall_s), *shares)


def _percent(share: float | None) -> int | None:
    return None if share is None else round(100 * share)


def _rounded(value: float) -> float:
    return round(value) if value >= 100 else round(value, 1 if value >= 10 else 2)
