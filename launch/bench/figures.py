"""Figures of a benchmark, and its tables. tokens_per_s is the rate after the first token. speedup
is the summed time per token of `none` over that of the method on the same prompts, with the
interval of a paired bootstrap over prompts; it is missing where a draft failed. pass is T_V over
T_T of `none`; hit_rate is over drafted rounds, plain_share over all; predicted_tokens_per_s is the
cost model's."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.launch.bench.contenders import Contender
from dovetail.launch.bench.methods import NONE
from dovetail.launch.bench.turns import Cell
from dovetail.launch.console.terminal import counted, first_failure, note, print_table
from dovetail.protocol.errors import printable
from dovetail.protocol.messages import Result

COLUMNS = {
    "method": "as --method names it; none is the target alone",
    "prompts": "name of the file",
    "T": "temperature",
    "tokens/s": "of the tokens after the first of each reply",
    "speed-up": "over none, with its 95 % interval; failed: its draft failed",
    "tau": "tokens committed per round",
    "differ": "replies whose tokens are not those of none",
    "predicted": "tokens/s that the cost model expected before each round",
    "pass": "time of a target pass, over that of a pass of none",
    "rows": "rows per target pass: verified nodes and their root",
    "draft": "share of the time spent waiting for drafting",
    "verify": "share of the time spent in target passes",
    "hit": "share of drafted rounds whose root was already in the tree",
    "plain": "share of rounds verified without a tree",
    "MB": "peak memory of the processes, 10^6 bytes",
}
"""Heading of the table -> its meaning; the most important first."""
KEYS = 3  # the headings that identify a row
KEYS_OF = ("method", "prompts", "temperature")
SWEPT = {
    "T_V ms": "with --sweep: a pass of the target",
    "T_V/T_T": "with --sweep: the same as pass",
    "draft ms": "with --sweep: drafting that a round waits for",
}
"""Further headings of the table of a sweep."""


OTHER = "other arithmetic"  # the name of a difference to an engine that computes with its own types


def show(result: Mapping[str, Any]) -> None:
    differing = [tuple(told[name] for name in KEYS_OF) for told in result["differences"]]
    both = zip(result["rows"], result["passes"], strict=True)
    rows = [_line(told, passes, differing) for told, passes in both]
    print_table(tuple(COLUMNS), rows, keys=KEYS, whole=True)
    show_notes(result)


def show_notes(result: Mapping[str, Any]) -> None:
    """Write notes for the reader of the table: cut prompts, peers, medians, differences."""
    for told in result["rows"]:
        if told["draft_failures"]:
            where, first = f"{told['method']} {_at(told)}", told["draft_failure"]
            replies = counted(told["draft_failures"], "reply", "replies")
            why = f"first in round {first['round']}: {printable(first['error'])}"
            note(f"FAILED: the draft of {where} in {replies}, {why}")
    _note_prompts(result["prompts"])
    _note_peers(result)
    for told in result["medians"]:
        if told["method"] != NONE:
            what = f"{told['method']} T {told['temperature']:g}: speed-up {told['speedup']:.2f}"
            note(f"{what} on the median of {told['sets']} sets")
    for told in result["differences"]:
        kind = "near-tie" if told["near_tie"] else "DIFFERS" if told["exact"] else OTHER
        where = f"{told['method']} {_at(told)} {told['id']} at token {told['position']}"
        note(f"{kind}: {where}, margin {told['margin']:.2g}")


def _line(
    told: Mapping[str, Any], passes: Mapping[str, Any], differing: Sequence[tuple[Any, ...]]
) -> tuple[object, ...]:
    where = tuple(told[name] for name in KEYS_OF)
    rows = told["verified_tokens"] / told["calls"] if told["calls"] else None
    shares = (f"{told['draft_share']:.0%}", f"{told['verify_share']:.0%}")
    costs = (number(passes["ratio"], 2), number(rows, 1), *shares)
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
    """A speed-up with its interval; a single prompt has none, since every bootstrap sample would be
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
            cut = f"{told['shortened']} of {told['count']} prompts were cut to fit"
            note(f"{_at(told)}: {cut}, {told['looped']} replies where they began to loop")


def _note_peers(result: Mapping[str, Any]) -> None:
    for told in result["peers"]:
        if told["best"]:
            same = [peer for peer in result["peers"] if all(peer[n] == told[n] for n in KEYS_OF)]
            others = [(peer["threads"], peer["tokens_per_s"]) for peer in same if not peer["best"]]
            slower = "".join(f" (with {n}: {rate:.1f} tokens/s)" for n, rate in others)
            threads = counted(told["threads"], "thread")
            note(f"{told['method']} {_at(told)}: {threads}{slower}")
    for told in result["against"]:
        if told["ratio"] is not None:
            gain = f"{told['ratio']:.2f} ({told['low']:.2f}-{told['high']:.2f}) times as fast as"
            note(f"{_at(told)}: {told['method']} is {gain} {told['peer']}")


def _at(told: Mapping[str, Any]) -> str:
    return f"{told['prompts']} T {told['temperature']:g}"


CSV_COLUMNS = {
    "method": "as --method names it",
    "prompts": "name of the file of prompts",
    "temperature": "of sampling",
    "replies": "measured, repeats included",
    "tokens_per_s": "of the tokens after the first of each reply",
    "end_to_end_tokens_per_s": "of all tokens, including the time for prompts",
    "predicted_tokens_per_s": "as predicted by the cost model",
    "speedup": "over none on the same prompts",
    "speedup_low": "lower end of its 95 % interval",
    "speedup_high": "upper end",
    "tau": "tokens committed per round, over all replies",
    "tau_macro": "mean over replies",
    "calls": "target passes after those of the prompts",
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
    "policy": "of the tree; none: no tree of dovetail",
    "gamma": "most nodes verified per round",
    "depth": "most levels of the tree",
    "width": "most children per node and nodes per level",
    "ahead": "whether it drafts while the target verifies",
    "peak_rss_mb": "total of its processes, 10^6 bytes",
    "draft_failures": "replies whose draft failed; then no speed-up",
    "differ": "replies whose tokens are not those of none",
}
"""Heading -> what it means."""
ELSEWHERE = {"pass_ms": "verify_ms", "pass_ratio": "ratio", "draft_ms": "draft_ms"}
"""Columns of the passes of a result, and their names there."""


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
        differ = sum(all(one[key] == row[key] for key in KEYS_OF) for one in result["differences"])
        told = {**told, "replies": replies, "differ": differ}
        writer.writerow({name: _cell(told[name]) for name in CSV_COLUMNS})
    return out.getvalue()


def _cell(value: object) -> object:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else value


RESAMPLES = 2000
INTERVAL = (0.025, 0.975)


def baseline(cells: Sequence[Cell], of: Cell) -> Cell:
    """Return the row of the target alone on the same prompts at the same temperature."""
    return next(cell for cell in cells if cell.method.name == NONE and cell.beside(of))


def speedup(
    cell: Cell, baseline: Cell, seed: int
) -> tuple[float | None, float | None, float | None]:
    """(ratio, low, high) of time per token; empty if nothing was decoded after the first token, or
    if the draft failed."""
    if any(run.finished.result.draft_failure is not None for run in cell.runs):
        return None, None, None
    (seconds, tokens), (base_seconds, base_tokens) = cell.decoding(), baseline.decoding()
    if not tokens.sum() or not base_tokens.sum():
        return None, None, None
    draws = np.random.default_rng(seed).integers(0, len(seconds), (RESAMPLES, len(seconds)))
    sums = [values[draws].sum(axis=1) for values in (seconds, tokens, base_seconds, base_tokens)]
    usable = (sums[1] > 0) & (sums[3] > 0)
    ratios = (sums[2] / np.maximum(sums[3], 1) / (sums[0] / np.maximum(sums[1], 1)))[usable]
    low, high = np.quantile(ratios, INTERVAL)
    ratio = (base_seconds.sum() / base_tokens.sum()) / (seconds.sum() / tokens.sum())
    return float(ratio), float(low), float(high)


def best_of_peers(cells: Sequence[Cell]) -> list[Cell]:
    """The cells; of each peer on a set at a temperature only the one with the fastest number of
    threads."""
    best: dict[tuple[Any, ...], Cell] = {}
    for cell in sorted(cells, key=lambda cell: -cell.tokens_per_s):
        best.setdefault((cell.method.name, id(cell.prompts), cell.temperature), cell)
    return [cell for cell in cells if any(cell is one for one in best.values())]


def peers_told(measured: Sequence[Cell], best: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the settings with which each peer was measured, and which of these is its row."""
    return [
        {
            **_place(cell),
            "threads": cell.method.threads,
            "tokens_per_s": cell.tokens_per_s,
            "best": any(cell is other for other in best),
        }
        for cell in measured
        if not cell.method.ours
    ]


def against_peers(cells: Sequence[Cell], seed: int) -> list[dict[str, Any]]:
    """Return the speed-up of each of our methods over each peer, with its interval, on the same
    prompts in turns."""
    told = []
    for peer in (cell for cell in cells if not cell.method.ours):
        for cell in cells:
            if cell.method.ours and cell.beside(peer):
                ratio, low, high = speedup(cell, peer, seed)
                names = {**_place(cell), "peer": peer.method.name}
                told.append({**names, "ratio": ratio, "low": low, "high": high})
    return told


def row(cell: Cell, baseline: Cell, contender: Contender, seed: int) -> dict[str, Any]:
    results = [run.finished.result for run in cell.runs]
    seconds = sum(run.decode_s for run in cell.runs)
    tokens = sum(run.decoded_tokens for run in cell.runs)
    rounds = sum(result.rounds for result in results)
    taus = [result.tau for result in results if result.tau is not None]
    ratio, low, high = speedup(cell, baseline, seed)
    failures, failure = first_failure(results)
    return {
        **_place(cell),
        "tokens_per_s": tokens / seconds if seconds else 0.0,
        "speedup": ratio,
        "speedup_low": low,
        "speedup_high": high,
        "tau": tokens / rounds if rounds else None,
        "tau_macro": sum(taus) / len(taus) if taus else None,
        "calls": rounds,
        "verified_tokens": sum(result.verified_rows for result in results),
        "peak_rss_mb": contender.peak_rss_mb(),
        "peak_vram_mb": None,
        "draft_share": sum(r.draft_exposed_s for r in results) / seconds if seconds else 0.0,
        "verify_share": sum(r.verify_s for r in results) / seconds if seconds else 0.0,
        "weights": cell.method.weights,
        "draft_failures": failures,
        "draft_failure": failure.model_dump() if failure is not None else None,
        **_shape(cell),
        **_speculation(cell, results),
    }


def _place(cell: Cell) -> dict[str, Any]:
    return {
        "method": cell.method.name,
        "prompts": cell.prompts.name,
        "temperature": cell.temperature,
    }


def _shape(cell: Cell) -> dict[str, Any]:
    tree = cell.method.configuration.settings.tree
    if cell.method.drafts and cell.method.ours:
        return {name: getattr(tree, name) for name in ("policy", "gamma", "depth", "width")}
    return {"policy": NONE, "gamma": 0, "depth": 0, "width": 0}


def _speculation(cell: Cell, results: Sequence[Result]) -> dict[str, Any]:
    names = ("rounds", "plain_rounds", "grown_nodes", "ahead_nodes", "wasted_nodes")
    sums = {name: sum(getattr(result, name) for result in results) for name in names}
    rounds, plain = sums.pop("rounds"), sums.pop("plain_rounds")
    drafts = cell.method.drafts and cell.method.ours
    return {
        "ahead": cell.method.configuration.settings.draft.ahead if drafts else None,
        "hit_rate": _hit_rate(results),
        **sums,
        "plain_share": plain / rounds if rounds else None,
        "predicted_tokens_per_s": _predicted(cell),
    }


def _hit_rate(results: Sequence[Result]) -> float | None:
    known = [
        (result.hit_rate, result.rounds - result.plain_rounds)
        for result in results
        if result.hit_rate is not None
    ]
    drafted = sum(rounds for _, rounds in known)
    return sum(rate * rounds for rate, rounds in known) / drafted if drafted else None


def _predicted(cell: Cell) -> float | None:
    """Tokens over their predicted time, of the replies with a prediction."""
    known = [(run.decoded_tokens, run.finished.result.predicted_tokens_per_s) for run in cell.runs]
    expected_s = sum(tokens / rate for tokens, rate in known if rate)
    return sum(tokens for tokens, rate in known if rate) / expected_s if expected_s else None


def pass_told(cell: Cell, baseline: Cell) -> dict[str, Any]:
    """Milliseconds of a target pass, its ratio to a pass of the target alone, and milliseconds of
    drafting for which a round waits."""
    milliseconds, alone = (_a_round_ms(c, lambda result: result.verify_s) for c in (cell, baseline))
    ratio = milliseconds / alone if milliseconds is not None and alone else None
    return {
        **_place(cell),
        "verify_ms": milliseconds,
        "ratio": ratio,
        "draft_ms": _a_round_ms(cell, lambda result: result.draft_exposed_s),
    }


def _a_round_ms(cell: Cell, seconds: Callable[[Result], float]) -> float | None:
    results = [run.finished.result for run in cell.runs]
    rounds = sum(result.rounds for result in results)
    return 1e3 * sum(map(seconds, results)) / rounds if rounds else None


def medians(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The speed-up of each method on its median set of prompts, if there are several."""
    told = []
    for method, temperature in dict.fromkeys((row["method"], row["temperature"]) for row in rows):
        own = [r for r in rows if (r["method"], r["temperature"]) == (method, temperature)]
        found = [row["speedup"] for row in own if row["speedup"] is not None]
        if len(found) > 1:
            names = {"method": method, "temperature": temperature, "sets": len(found)}
            told.append({**names, "speedup": float(np.median(found))})
    return told


def end_to_end(cell: Cell) -> dict[str, Any]:
    """Return the rate of all tokens over all time, including prompts."""
    results = [run.finished.result for run in cell.runs]
    return {
        **_place(cell),
        "tokens_per_s": sum(result.completion_tokens for result in results)
        / sum(result.wall_s for result in results),
    }


def tasks_told(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """For every set and temperature, how many prompts there were, how many were cut to fit, and how
    many replies were cut where they began to loop."""
    told = []
    for cell in cells:
        if cell.method.name == NONE:
            tasks = {run.task.prompt.id: run.task for run in cell.runs}.values()
            cut = [one.max_tokens < one.reference.result.completion_tokens for one in tasks]
            shortened = sum(task.shortened for task in tasks)
            counts = {"count": len(tasks), "shortened": shortened, "looped": sum(cut)}
            told.append({"prompts": cell.prompts.name, "temperature": cell.temperature, **counts})
    return told


def differences_told(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Every reply whose tokens differ from those of `none`; `exact`: they must be equal, unlike
    those of an engine with other number types."""
    return [
        {
            **_place(cell),
            "id": id,
            "position": difference.position,
            "margin": difference.margin,
            "near_tie": difference.near_tie,
            "exact": cell.method.exact,
        }
        for cell in cells
        for id, difference in cell.differences.items()
    ]
