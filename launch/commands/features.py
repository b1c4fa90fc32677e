"""`dovetail features`: hidden states of a target, for training draft heads. `workers/training/`
does the work, and is imported late."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dovetail.launch.console.help import (
    COUNT,
    EXISTING_FILE,
    HelpCommand,
    Number,
    json_option,
    option,
    rare,
)
from dovetail.launch.console.terminal import counted, note, spinner
from dovetail.launch.files.outputs import OUT_FOLDER
from dovetail.launch.processes.preflight import check_model
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.launch.training.run import (
    note_answers,
    note_examples,
    note_template,
    show_progress,
    weights_of,
)
from dovetail.protocol.errors import UserError

if TYPE_CHECKING:
    from dovetail.workers.training.data.states import HalfType
    from dovetail.workers.training.data.store import Index


@click.command(cls=HelpCommand)
@click.option(
    "--target",
    default=str(DEMO_FOLDER / "target"),
    show_default="the embedded one",
    help="The target: a folder or a hub id.",
)
@click.option(
    "--data",
    "files",
    type=EXISTING_FILE,
    multiple=True,
    required=True,
    help="Chats as JSON lines, or a token file (.bin, with its .mask); can be repeated.",
)
@click.option(
    "--out",
    type=OUT_FOLDER,
    required=True,
    help="The output folder; an interrupted run continues.",
)
@rare(
    "--taps",
    default="auto",
    help="Layers whose input is stored with the last state: auto (EAGLE-3's), none, or a list such "
    "as 2,4,5. The number of layers stands for the last one's output.",
)
@rare(
    "--context",
    type=click.IntRange(min=2),
    help="Maximum length of a sequence in tokens.  [default: the target's context]",
)
@rare(
    "--long",
    type=click.Choice(("cut", "drop")),
    default="cut",
    help="What to do with longer sequences.",
)
@rare(
    "--dtype",
    type=click.Choice(("float16", "bfloat16")),
    help="Type of the stored states.  [default: bfloat16 if the checkpoint is, else float16]",
)
@option(
    "--weights",
    show_default="file for GGUF files on a CPU, else fp32",
    help="Weights of the target: the same as for serving; use half on a GPU.",
)
@option("--device", default="cpu", help="Where the target computes: cpu or cuda:N.")
@click.option(
    "--regenerate",
    is_flag=True,
    help="First let the target write the answers, which are saved in OUT.answers.jsonl.",
)
@rare(
    "--temperature",
    "temperatures",
    type=Number(0, 100),
    multiple=True,
    default=(0.0, 1.0),
    help="Temperatures of these answers.",
)
@rare("--new-tokens", type=COUNT, default=1024, help="Maximum length of an answer in tokens.")
@rare(
    "--sessions",
    type=click.IntRange(1, 512),
    default=64,
    help="Number of answers written at a time.",
)
@rare(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    help="Seed of the answers at temperatures above 0.",
)
@json_option()
def command(
    target: str,
    files: tuple[Path, ...],
    out: Path,
    taps: str,
    context: int | None,
    long: str,
    dtype: "HalfType | None",
    weights: str | None,
    device: str,
    regenerate: bool,
    temperatures: tuple[float, ...],
    new_tokens: int,
    sessions: int,
    seed: int,
    as_json: bool,
) -> None:
    """Store the training data of a target's draft heads: its hidden states for every token of a set
    of chats, in 16 bits.

    \b
    dovetail features --target MODEL --data sharegpt.jsonl --out FEATURES
    dovetail features --target MODEL --data sharegpt.jsonl --regenerate --out FEATURES
    """
    check_model("target", target)
    from dovetail.workers.training.data import corpus, states, store
    from dovetail.workers.training.regenerate import Writing, regenerate_files
    from dovetail.workers.training.workplace import held

    if any(math.isnan(temperature) for temperature in temperatures):  # which no range excludes
        raise UserError("--temperature nan is not a temperature: write one such as 1")
    name, weights = states.ready_device(device), weights or weights_of(target, device)
    reader = corpus.open_reader(target)
    note_template(reader.renderer, target, files)
    with held(out):
        if regenerate:
            answers = out.with_name(out.name + ".answers.jsonl")
            writing = Writing(temperatures, new_tokens, sessions, seed)
            where: dict[str, Any] = {"weights": weights, "device": name}
            with show_progress() as show:
                written = regenerate_files(
                    files, target, reader.renderer, answers, writing, **where, progress=show
                )
            note_answers(answers, written)
            files = (answers,)
        with spinner() as say:
            say("reading the data")
            examples = corpus.read_examples(
                files, reader, context=context, drop_long=long == "drop"
            )
            say("loading the target")
            source = states.open_states(
                target, taps=taps, context=context, dtype=dtype, weights=weights, device=name
            )
        note_examples(examples)
        index = store.begin(out, store.plan(examples, source.origin), examples)
        taps = ", ".join(map(str, index.origin.taps))
        stored = "the last hidden state" + (f" and the inputs of layers {taps}" if taps else "")
        note(
            f"{out}: {stored}, {index.bytes / 1e9:.3g} GB of {index.origin.dtype} in "
            f"{counted(len(index.shards), 'shard')}, {index.written} already written"
        )
        with show_progress() as show:
            index = store.write(out, index, examples, source, show)
        if as_json:
            click.echo(json.dumps(_told(out, index)))


def _told(out: Path, index: "Index") -> dict[str, Any]:
    counts = {
        "sequences": index.count,
        "tokens": index.tokens,
        "learned": index.learned,
        "shards": len(index.shards),
        "bytes": index.bytes,
    }
    return {"out": str(out), **counts, "dtype": index.origin.dtype, "taps": index.origin.taps}
