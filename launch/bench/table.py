"""Shows a result of `bench`: tables on stdout, notes on stderr. Computes nothing."""

import csv
import io
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
    hits = (share(told["hit_rate"]), share(told["plain_share"]))
    return (*where, *rates, *costs, *hits, round(told["peak_rss_mb"]))


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


CSV_COLUMNS = {
    "method": "as --method names it",
    "prompts": "name of the file of prompts",
    "temperature": "of sampling",
    "replies": "measured, repeats included",
    "tokens_per_s": "of the tokens after the first of each reply",
    "end_to_end_tokens_per_s": "of all tokens, prompts included in the time",
    "predicted_tokens_per_s": "as the cost model expected it",
    "speedup": "over none on the same prompts",
    "speedup_low": "lower end of its 95 % interval",
    "speedup_high": "upper end",
    "tau": "tokens committed per round, over all replies",
    "tau_macro": "mean of the replies' own",
    "calls": "passes of the target after those of the prompts",
    "verified_tokens": "rows of all these passes",
    "pass_ms": "of the target, mean",
    "pass_ratio": "over that of none",
    "draft_ms": "drafting that a round waits for, mean",
    "draft_share": "of the time, 0 to 1",
    "verify_share": "of the time, 0 to 1",
    "hit_rate": "drafted rounds whose root was in the tree, 0 to 1",
    "plain_share": "rounds verified without a tree, 0 to 1",
    "grown_nodes": "drafted while a round waited",
    "ahead_nodes": "drafted while the target verified",
    "wasted_nodes": "dropped without having been offered",
    "weights": "of the target",
    "policy": "of the tree; none: no tree of ours",
    "gamma": "nodes verified a round at most",
    "depth": "levels of the tree at most",
    "width": "children a node and nodes a level at most",
    "ahead": "whether it drafts while the target verifies",
    "peak_rss_mb": "10^6 bytes of its processes together",
    "draft_failures": "replies whose draft failed: no speed-up",
    "differ": "replies whose tokens are not those of none",
}
"""Heading -> what it means."""
ELSEWHERE = {"pass_ms": "verify_ms", "pass_ratio": "ratio", "draft_ms": "draft_ms"}
"""Columns that the passes of a result have, and how they are called there."""


def csv_text(result: Mapping[str, Any]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS)
    writer.writeheader()
    for row, passes, whole, replies in zip(
        result["rows"], result["passes"], result["end_to_end"], result["replies"], strict=True
    ):
        told = {
            **row,
            **{name: passes[there] for name, there in ELSEWHERE.items()},
            "end_to_end_tokens_per_s": whole["tokens_per_s"],
        }
        differ = sum(
            all(difference[key] == row[key] for key in ("method", "prompts", "temperature"))
            for difference in result["differences"]
        )
        told = {**told, "replies": replies, "differ": differ}
        writer.writerow({name: _cell(told[name]) for name in CSV_COLUMNS})
    return out.getvalue()


def _cell(value: object) -> object:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else value
