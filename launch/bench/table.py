"""Shows a result of `bench`: tables on stdout, notes on stderr. Computes nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.launch.bench.methods import NONE
from dovetail.launch.console.terminal import counted, note, print_table
from dovetail.protocol.errors import printable

COLUMNS = {
    "method": "as --method names it; none is the target alone",
    "prompts": "name of the file",
    "T": "temperature",
    "tokens/s": "of the tokens after the first of each reply",
    "speed-up": "over none, with its 95 % interval; failed: its draft did",
    "tau": "tokens committed per round",
    "differ": "replies whose tokens are not those of none",
    "predicted": "tokens/s as the cost model expected them before each round",
    "pass": "time of a pass of the target, over that of a pass of none",
    "rows": "in a pass of the target: nodes verified, and their root",
    "draft": "share of the time spent waiting for drafting",
    "verify": "share of the time in which the target verifies",
    "hit": "share of the drafted rounds whose root was in the tree already",
    "plain": "share of the rounds that are verified without a tree",
    "MB": "the most memory that the processes held, 10^6 bytes",
}
"""Heading of the table -> its meaning; the most important first."""
KEYS = 3  # the headings that identify a row
SWEPT = {
    "T_V ms": "with --sweep: a pass of the target",
    "T_V/T_T": "with --sweep: the same as pass",
    "draft ms": "with --sweep: drafting that a round waits for",
}
"""Further headings of the table of a sweep."""


OTHER = "other arithmetic"  # the name of a difference to an engine that computes with its own types


def show(result: Mapping[str, Any]) -> None:
    differing = [
        (told["method"], told["prompts"], told["temperature"]) for told in result["differences"]
    ]
    rows = [
        _line(told, passes, differing)
        for told, passes in zip(result["rows"], result["passes"], strict=True)
    ]
    print_table(tuple(COLUMNS), rows, keys=KEYS, whole=True)
    show_notes(result)


def show_notes(result: Mapping[str, Any]) -> None:
    """Write what a reader of the table has to know: cut prompts, peers, medians, differences."""
    for told in result["rows"]:
        if told["draft_failures"]:
            where, first = (
                f"{told['method']} {told['prompts']} T {told['temperature']:g}",
                told["draft_failure"],
            )
            replies = counted(told["draft_failures"], "reply", "replies")
            note(
                f"FAILED: the draft of {where} in {replies}, first in round {first['round']}: "
                f"{printable(first['error'])}"
            )
    _note_prompts(result["prompts"])
    _note_peers(result)
    for told in result["medians"]:
        if told["method"] != NONE:
            note(
                f"{told['method']} T {told['temperature']:g}: speed-up {told['speedup']:.2f} "
                f"on the median of {told['sets']} sets"
            )
    for told in result["differences"]:
        kind = "near-tie" if told["near_tie"] else "DIFFERS" if told["exact"] else OTHER
        note(
            f"{kind}: {told['method']} {told['prompts']} T {told['temperature']:g} "
            f"{told['id']} at token {told['position']}, margin {told['margin']:.2g}"
        )


def _line(
    told: Mapping[str, Any], passes: Mapping[str, Any], differing: Sequence[tuple[Any, ...]]
) -> tuple[object, ...]:
    where = (told["method"], told["prompts"], told["temperature"])
    rows = told["verified_tokens"] / told["calls"] if told["calls"] else None
    costs = (
        number(passes["ratio"], 2),
        number(rows, 1),
        f"{told['draft_share']:.0%}",
        f"{told['verify_share']:.0%}",
    )
    rates = (
        f"{told['tokens_per_s']:.1f}",
        interval(told),
        number(told["tau"], 2),
        differing.count(where),
        number(told["predicted_tokens_per_s"], 1),
    )
    return (
        *where,
        *rates,
        *costs,
        share(told["hit_rate"]),
        share(told["plain_share"]),
        round(told["peak_rss_mb"]),
    )


def interval(told: Mapping[str, Any]) -> str:
    """A speed-up with its interval; a single prompt has none, since every draw of the bootstrap is
    that prompt."""
    if told["draft_failures"]:
        return "failed"
    if told["speedup"] is None:
        return "-"
    low, high = told["speedup_low"], told["speedup_high"]
    return f"{told['speedup']:.2f}" + (f" ({low:.2f}-{high:.2f})" if low != high else "")


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _note_prompts(prompts: Sequence[Mapping[str, Any]]) -> None:
    for told in prompts:
        if told["shortened"] or told["looped"]:
            cut = (
                f"{told['shortened']} of {told['count']} prompts were cut to fit, "
                f"{told['looped']} replies where they began to loop"
            )
            note(f"{told['prompts']} T {told['temperature']:g}: {cut}")


def _note_peers(result: Mapping[str, Any]) -> None:
    for told in result["peers"]:
        if told["best"]:
            threads = counted(told["threads"], "thread")
            note(
                f"{told['method']} {told['prompts']} T {told['temperature']:g}: "
                f"{threads}{_slower(result['peers'], told)}"
            )
    for told in result["against"]:
        if told["ratio"] is not None:
            place = f"{told['prompts']} T {told['temperature']:g}"
            note(
                f"{place}: {told['method']} is {told['ratio']:.2f} "
                f"({told['low']:.2f}-{told['high']:.2f}) times as fast as {told['peer']}"
            )


def _slower(told: Sequence[Mapping[str, Any]], best: Mapping[str, Any]) -> str:
    same = ("method", "prompts", "temperature")
    others = (
        peer for peer in told if not peer["best"] and all(peer[name] == best[name] for name in same)
    )
    return "".join(
        f" (with {peer['threads']}: {peer['tokens_per_s']:.1f} tokens/s)" for peer in others
    )
