"""The commands `llama` and `transformers`: passes of ours and of another engine, alternating."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.child import Side
from benchmarks.figures import LIBRARY_GROWTH, eager_bound, llama_bound
from benchmarks.measure import Estimate, ratio
from benchmarks.options import (
    BEHIND,
    Command,
    Numbers,
    checkpoint_type,
    find_llama,
    holds,
    option,
    options,
    our_side,
    pin,
    report,
    verdict,
    written_model,
)
from benchmarks.verification import WARM_UP, Comparison, Pass, compare
from dovetail.launch.console.terminal import print_table, progress_bar
from peers.llama.kinds import type_of

MODEL_OPTIONS = (
    "weights",
    "backend",
    "checkpoint",
    "shape",
    "layers",
    "pairs",
    "threads",
    "clock",
    "models",
    "json",
)


@click.command(cls=Command)
@option(
    "--rows",
    type=Numbers(),
    default="1,2,4,8,16,32,64",
    help="Rows of the passes behind 512 cached tokens.",
)
@option("--prefill", type=Numbers(), default="512,2048", help='Lengths of prompts; "" for none.')
@option("--flash-attention/--no-flash-attention", default=False, help="llama.cpp's.")
@options("llama_python", *MODEL_OPTIONS)
def llama(
    rows: tuple[int, ...],
    prefill: tuple[int, ...],
    llama_python: Path | None,
    flash_attention: bool,
    **chosen: Any,
) -> None:
    """T_V(M) and prefill against llama.cpp with as many bytes a weight (F32, F16, BF16, Q8_0).

    Our rows form a tree, llama.cpp's follow each other; both give the logits of all of them. Of a
    prefill llama.cpp is asked for all rows too: for one row it leaves the last layer's MLP out,
    which saves a thirtieth of a model of 32 layers and most of one with a few. Its cache holds
    16-bit floats (its default), ours 32.
    """
    python = find_llama(llama_python)
    kind = type_of(
        chosen["weights"], {"dtype": {"bf16": "bfloat16"}.get(checkpoint_type(**chosen))}
    )
    capacity = max((BEHIND + max(rows, default=0), *prefill))

    def peer(folder: Path, threads: int) -> Side:
        file = folder.with_name(f"{folder.name}-{kind}.gguf")
        more = (
            "--capacity",
            str(capacity),
            "--context",
            str(BEHIND),
            "--threads",
            str(threads),
            *(("--flash-attention",) if flash_attention else ()),
        )
        return Side(
            "llama", (str(folder), kind, str(file), *more), python=str(python), threads=threads
        )

    passes = [
        *(Pass("verify", count) for count in rows),
        *(Pass("prefill", count) for count in prefill),
    ]
    _against(
        peer,
        f"llama.cpp {kind}",
        passes,
        lambda kind_of, do, count: llama_bound(kind, do, count),
        **chosen,
    )


@click.command(cls=Command)
@option(
    "--rows", type=Numbers(), default="1,16", help="Rows of the passes behind 512 cached tokens."
)
@option("--prefill", type=Numbers(), default="", help="Lengths of prompts.")
@options(*MODEL_OPTIONS)
def transformers(rows: tuple[int, ...], prefill: tuple[int, ...], **chosen: Any) -> None:
    """T_V(M) against transformers' own modules, attention (SDPA) and cache in fp32; and T_V(16) /
    T_V(1)."""

    def peer(folder: Path, threads: int) -> Side:
        return Side(
            "eager",
            (str(folder), "--context", str(BEHIND), "--threads", str(threads)),
            threads=threads,
        )

    passes = [
        *(Pass("verify", count) for count in rows),
        *(Pass("prefill", count) for count in prefill),
    ]
    _against(peer, "transformers eager fp32", passes, eager_bound, **chosen)


def _against(
    peer: Callable[[Path, int], Side],
    name: str,
    passes: Sequence[Pass],
    bound: Callable[[str, str, int], float | None],
    *,
    weights: str,
    backend: str,
    pairs: int,
    threads: int,
    clock: str,
    as_json: bool,
    **model: Any,
) -> None:
    cores = pin(threads)
    with (
        written_model(weights=weights, **model) as folder,
        our_side(folder, weights, backend, threads) as ours,
        peer(folder, threads) as theirs,
    ):
        with progress_bar(pairs + WARM_UP, "rounds") as step:
            comparisons = compare(ours, theirs, passes, pairs=pairs, clock=clock, step=step)
        told = {
            "ours": ours.hello,
            "peer": {"name": name, **theirs.hello},
            "model": folder.name,
            "cores": cores,
            "threads": threads,
            "clock": clock,
        }
    rows = [(c, bound(weights, c.kind.do, c.kind.rows)) for c in comparisons]
    result = {
        **told,
        "rows": [
            {**c.as_json(), "figure": most, "holds": holds(c.ratio, most)} for c, most in rows
        ],
        "growth": growth(comparisons),
    }
    report(result, as_json, lambda: show_comparison(result, rows))


def growth(comparisons: Sequence[Comparison]) -> dict[str, Any] | None:
    """T_V(16) / T_V(1) of both sides, round by round, where both were measured."""
    by_rows = {c.kind.rows: c for c in comparisons if c.kind.do == "verify"}
    if not {1, 16} <= by_rows.keys():
        return None
    one, sixteen = by_rows[1], by_rows[16]
    return {
        "ours": ratio(sixteen.ours, one.ours).as_json(),
        "peer": ratio(sixteen.theirs, one.theirs).as_json(),
    }


def show_comparison(
    result: Mapping[str, Any], rows: Sequence[tuple[Comparison, float | None]]
) -> None:
    """The table of a comparison, and below it how time grows from 1 row to 16."""
    cells = []
    for (comparison, most), row in zip(rows, result["rows"], strict=True):
        milliseconds = [1e3 * row[side]["median"] for side in ("ours_s", "theirs_s")]
        cells.append(
            (
                comparison.kind.do,
                comparison.kind.rows,
                *milliseconds,
                str(comparison.ratio),
                *verdict(comparison.ratio, most),
            )
        )
    engine = f"{result['ours']['engine']} {result['ours']['backend']} {result['ours']['kernels']}"
    click.echo(
        f"{engine} / {result['peer']['name']}, {result['model']}, {len(result['cores'])} "
        f"core(s), {result['clock']} time"
    )
    print_table(("pass", "rows", "ours ms", "peer ms", "ratio (95 %)", "figure", "holds"), cells)
    if result["growth"] is not None:
        ours, peer = (Estimate(**result["growth"][side]) for side in ("ours", "peer"))
        click.echo(
            f"T_V(16) / T_V(1): ours {ours}, peer {peer}; figure of the library back end: <= "
            f"{LIBRARY_GROWTH}"
        )
