"""The command `passes`: T_V(M) and prefill on a GGUF file beside llama-bench on the same one."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import click

from benchmarks.building import BEST, program
from benchmarks.child import Side
from benchmarks.context import written_file
from benchmarks.large import write_expert_blocks
from benchmarks.measure import estimate, ratio
from benchmarks.models import model_folder
from benchmarks.options import BEHIND, ISAS, Command, Numbers, option, options, pin, report
from benchmarks.verification import Turn
from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.protocol.errors import UserError

CPUS = {
    "PLAIN": "x64",
    "SSE41": "sse42",
    "AVX": "ivybridge",
    "AVX2": "haswell",
    "AVX512": "skylakex",
    "VNNI": "icelake",
    "NEON": "armv8.0_1",
}
"""Instruction set -> the CPU with no more whose kernels of llama.cpp are compared with ours."""
OWN = ("Q8_0", "Q4_0", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
"""Types that are written here; llama-quantize makes others of an F16 file."""
MIXTURE, MIX, LAYERS = "mixture", "Q4_K_M", 3
"""The shape with experts, the mix of types that it is written in, and its layers."""
REPETITIONS = 3
"""Times that a side makes a pass when it is its turn; the median counts."""


@click.command(cls=Command)
@click.option(
    "--llama",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="The folder that `build-llama` built into.",
)
@click.option(
    "--isa",
    "isas",
    multiple=True,
    type=click.Choice([name for name in ISAS if name in CPUS]),
    help="Instruction set, of ours and of llama-bench; can be repeated.  [default: the best here]",
)
@click.option(
    "--type",
    "kinds",
    multiple=True,
    default=("Q4_0",),
    show_default=True,
    help="Such as Q8_0 or Q4_K_M; can be repeated.",
)
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
    llama: Path,
    isas: tuple[str, ...],
    kinds: tuple[str, ...],
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
    All files and instruction sets take their turns in every round.
    """
    if not rows and not prefill:
        raise UserError("--rows and --prefill are both empty: name a number for one of them")
    pin(threads)
    cpus = {isa: CPUS[isa] for isa in isas} or {"": BEST}
    benches = {isa: program(llama, "llama-bench", cpu) for isa, cpu in cpus.items()}
    more = ("--context", str(BEHIND), "--threads", str(threads))
    arguments = ("--weights", "file", "--backend", "kernels", "--cache", "half", *more)
    passes = [*(("verify", count) for count in rows), *(("prefill", count) for count in prefill)]
    with ExitStack() as opened:
        files = [opened.enter_context(_file(kind, llama, **model)) for kind in kinds]
        sides = [
            opened.enter_context(Side("ours", (str(file), *arguments), threads=threads))
            for file in files
        ]
        taken: dict[tuple[str, str], list[tuple[list[float], list[float]]]] = {
            (file.name, isa): [] for isa in benches for file in files
        }
        with progress_bar(pairs * len(taken), "turns") as step:
            for _, (isa, bench), (file, side) in product(
                range(pairs), benches.items(), zip(files, sides, strict=True)
            ):
                if isa:
                    side.ask("use", isa=isa)
                turns = [Turn(side, do, count, "wall") for do, count in passes]
                turns[0]()  # what has slept wakes up, as llama-bench does before it counts
                ours = [_median(turn) for turn in turns]
                theirs = _llama(bench, file, rows, prefill, threads)
                taken[file.name, isa].append((ours, theirs))
                step("")
    told = [
        {"model": file, "isa": isa or "best", "passes": _passes(passes, rounds)}
        for (file, isa), rounds in taken.items()
    ]
    result = {"threads": threads, "pairs": pairs, "measured": told}
    report(result, as_json, lambda: _show(result))


def _passes(
    passes: Sequence[tuple[str, int]], rounds: Sequence[tuple[list[float], list[float]]]
) -> list[dict[str, Any]]:
    """Return the figures of each pass, of the seconds that both sides took in each round."""
    sides = [[*zip(*side, strict=True)] for side in zip(*rounds, strict=True)]
    return [
        {
            "pass": do,
            "rows": count,
            "ours_ms": 1e3 * estimate(ours).median,
            "theirs_ms": 1e3 * estimate(theirs).median,
            "ratio": ratio(ours, theirs).as_json(),
        }
        for (do, count), ours, theirs in zip(passes, *sides, strict=True)
    ]


@contextmanager
def _file(kind: str, llama: Path, **model: Any) -> Iterator[Path]:
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
        command = [str(program(llama, "llama-quantize")), str(file), str(other), kind]
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
        command += ["--no-warmup", "-r", str(REPETITIONS), "-t", str(threads), "-o", "json"]
        command += ["-p", ",".join(map(str, counts))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"llama-bench failed: {done.stderr.strip().splitlines()[-1]}")
        for test in json.loads(done.stdout):
            by_rows[test["n_prompt"]].append(estimate(test["samples_ns"]).median / 1e9)
        found += [min(by_rows[count]) for count in counts]
    return found


def _show(result: dict[str, Any]) -> None:
    click.echo(
        f"ours over llama-bench's ({result['pairs']} turns), and milliseconds of both; "
        f"{result['threads']} thread(s)"
    )
    cells = [
        (
            one["isa"],
            one["model"],
            *(
                f"{row['ratio']['median']:.2f} ({row['ours_ms']:.1f} / {row['theirs_ms']:.1f})"
                for row in one["passes"]
            ),
        )
        for one in result["measured"]
    ]
    headings = [f"{row['pass']} {row['rows']}" for row in result["measured"][0]["passes"]]
    print_table(("set", "file", *headings), cells)
