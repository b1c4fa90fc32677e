"""The command `passes`: T_V(M) and prefill on a GGUF file beside llama-bench on the same one."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from benchmarks.child import Side
from benchmarks.context import written_file
from benchmarks.large import write_expert_blocks
from benchmarks.measure import estimate, ratio
from benchmarks.models import model_folder
from benchmarks.options import BEHIND, Command, Numbers, option, options, pin, report
from benchmarks.verification import Turn
from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.protocol.errors import UserError

OWN = ("Q8_0", "Q4_0")
"""Types that are written here; llama-quantize makes others of an F16 file."""
MIXTURE, MIX, LAYERS = "mixture", "Q4_K_M", 3
"""The shape with experts, the mix of types that it is written in, and its layers."""
REPETITIONS = 3
"""Times that a side makes a pass when it is its turn; the median counts."""


@click.command(cls=Command)
@click.option(
    "--llama-bench",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    help="llama-bench, with llama-quantize beside it, as `build-llama` builds them.",
)
@click.option("--type", "kind", default="Q4_0", show_default=True, help="Such as Q8_0 or Q4_K_M.")
@click.option("--rows", type=Numbers(), default="1,2,4,8,16", help="Rows behind 512 cached tokens.")
@click.option("--prefill", type=Numbers(), default="512", help='Lengths of prompts; "" for none.')
@option(
    "--shape",
    type=click.Choice(("7b", "1b", "small", MIXTURE)),
    default="7b",
    help="Sizes of a layer; small takes seconds; mixture: those of Qwen3-30B-A3B, as Q4_K_M.",
)
@options("layers", "pairs", "threads", "models", "json")
def passes(
    llama_bench: Path,
    kind: str,
    rows: tuple[int, ...],
    prefill: tuple[int, ...],
    pairs: int,
    threads: int,
    as_json: bool,
    **model: Any,
) -> None:
    """Our passes over M rows of a tree, and over prompts, beside llama-bench's over as many tokens
    that follow each other, each with its weights as the same GGUF file of a random model has them.

    llama-bench is asked with and without flash attention, repacks weights where it can, and gives
    the logits of the last row, ours those of all rows of a tree. The faster of its two counts.
    """
    if not rows and not prefill:
        raise UserError("--rows and --prefill are both empty: name a number for one of them")
    pin(threads)
    with _file(kind, llama_bench, **model) as file:
        arguments = ("--weights", "file", "--backend", "kernels", "--cache", "half")
        more = ("--context", str(BEHIND), "--threads", str(threads))
        ours, theirs = [], []
        with Side("ours", (str(file), *arguments, *more), threads=threads) as side:
            turns = [
                *(Turn(side, "verify", count, "wall") for count in rows),
                *(Turn(side, "prefill", count, "wall") for count in prefill),
            ]
            with progress_bar(pairs, "rounds") as step:
                for _ in range(pairs):
                    turns[0]()  # what has slept wakes up, as llama-bench does before it counts
                    ours.append([_median(turn) for turn in turns])
                    theirs.append(_llama(llama_bench, file, rows, prefill, threads))
                    step("")
    told = [
        {
            "pass": turn.do,
            "rows": turn.rows,
            "ours_ms": 1e3 * estimate([taken[place] for taken in ours]).median,
            "theirs_ms": 1e3 * estimate([taken[place] for taken in theirs]).median,
            "ratio": ratio(
                [taken[place] for taken in ours], [taken[place] for taken in theirs]
            ).as_json(),
        }
        for place, turn in enumerate(turns)
    ]
    result = {"model": file.name, "threads": threads, "passes": told}
    report(result, as_json, lambda: _show(result))


@contextmanager
def _file(kind: str, llama_bench: Path, **model: Any) -> Iterator[Path]:
    if model["shape"] == MIXTURE:
        if kind != MIX:
            raise UserError(f"--type {kind}: --shape {MIXTURE} has its weights as {MIX}")
        layers = model["layers"] or LAYERS
        with model_folder(model["models"]) as folder:
            yield write_expert_blocks(folder / f"{MIXTURE}-{layers}-layers-{MIX}.gguf", layers)
        return
    with written_file(kind if kind in OWN else "F16", **model) as file:
        if kind in OWN:
            yield file
            return
        other = file.with_name(file.name.replace("-F16.", f"-{kind}."))
        command = [str(llama_bench.with_name("llama-quantize")), str(file), str(other), kind]
        if (
            not other.exists()
            and subprocess.run(command, capture_output=True, check=False).returncode
        ):
            raise UserError(f"--type {kind}: llama-quantize makes no such file")
        yield other


def _median(turn: Turn) -> float:
    return estimate([turn() for _ in range(REPETITIONS)]).median


def _llama(
    program: Path, file: Path, rows: Sequence[int], prefill: Sequence[int], threads: int
) -> list[float]:
    """Return the seconds of each pass, those of `rows` first."""
    found = []
    for counts, depth in ((rows, BEHIND), (prefill, 0)):
        by_rows: dict[int, list[float]] = {count: [] for count in counts}
        if not counts:
            continue
        command = [str(program), "-m", str(file), "-n", "0", "-d", str(depth), "-fa", "0,1"]
        command += ["-r", str(REPETITIONS), "-t", str(threads), "-o", "json"]
        command += ["-p", ",".join(map(str, counts))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"llama-bench failed: {done.stderr.strip().splitlines()[-1]}")
        for test in json.loads(done.stdout):
            by_rows[test["n_prompt"]].append(estimate(test["samples_ns"]).median / 1e9)
        found += [min(by_rows[count]) for count in counts]
    return found


def _show(result: dict[str, Any]) -> None:
    click.echo(f"{result['model']}, {result['threads']} thread(s); milliseconds, ours over theirs")
    cells = [
        (
            f"{row['pass']} {row['rows']}",
            row["ours_ms"],
            row["theirs_ms"],
            f"{row['ratio']['median']:.2f} ({row['ratio']['low']:.2f}-{row['ratio']['high']:.2f})",
        )
        for row in result["passes"]
    ]
    print_table(("pass", "ours", "llama-bench", "ratio"), cells)
