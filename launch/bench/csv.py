"""The file that `bench --csv` writes: one line per method, set of prompts and temperature, for
spreadsheets and plotting programs. Computes nothing.

Comma-separated with a line of headings (RFC 4180), in UTF-8, with decimal points and an empty field
for unknown values. Units are in the names."""

import csv
import io
from collections.abc import Mapping
from typing import Any

COLUMNS = {
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
    writer = csv.DictWriter(out, COLUMNS)
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
        writer.writerow({name: _cell(told[name]) for name in COLUMNS})
    return out.getvalue()


def _cell(value: object) -> object:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else value
