"""`dovetail train`: draft heads, a small model on text, or a draft distilled from a target. The
training is in `workers/training`, which is imported when it begins."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dovetail.launch.console.help import HelpCommand
from dovetail.launch.console.options import COUNT, EXISTING_FILE, Number, json_option, option, rare
from dovetail.launch.files.outputs import OUT_FOLDER
from dovetail.launch.training.heads import head_commands
from dovetail.launch.training.run import show_progress, tell
from dovetail.protocol.errors import UserError

if TYPE_CHECKING:
    from dovetail.workers.training import run, small

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
RATE_OF_A_NEW_MODEL = 3e-3  # random weights allow a higher peak rate than trained ones
ANSWER_TOKENS = 224


@click.group(name="train")
def command() -> None:
    """Train draft heads and small models."""


for head_command in head_commands():
    command.add_command(head_command)


@command.command(name="small", cls=HelpCommand, short_help="Train or distil a small model.")
@click.option(
    "--text",
    "texts",
    multiple=True,
    type=EXISTING_FILE,
    help="Chats as JSON lines, or a token file, to learn from; may be given more than once.",
)
@click.option("--target", type=FOLDER, help="Distil a draft for this model.")
@click.option(
    "--prompts",
    type=EXISTING_FILE,
    help="Chats (JSON lines) that the target answers itself first; the draft learns from its "
    "answers.",
)
@click.option(
    "--init", type=FOLDER, help="Begin with the weights of this model instead of random ones."
)
@click.option(
    "--tokenizer",
    type=FOLDER,
    help="The folder of the tokenizer of a new model that has neither --init nor --target.",
)
@click.option(
    "--out",
    type=OUT_FOLDER,
    required=True,
    help="The folder to write; an unfinished run next to it is resumed.",
)
@option("--minutes", type=Number(min=0, min_open=True), default=10.0, help="How long to train.")
@rare(
    "--compile/--no-compile",
    "compiled",
    default=False,
    help="Compile the step: slower to begin, then faster. On a CPU it needs a C++ compiler.",
    show_default=False,
)
@option(
    "--seed",
    type=int,
    default=0,
    help="Seed of the weights, of the order of the text and of the target's replies.",
)
@rare("--hidden", type=click.IntRange(min=8), default=128, help="Width of a new model.")
@rare("--layers", type=COUNT, default=2, help="Layers of a new model.")
@rare("--heads", type=COUNT, default=4, help="Attention heads of a new model.")
@rare("--kv-heads", type=COUNT, default=2, help="Key and value heads of a new model.")
@rare("--mlp", type=click.IntRange(min=8), default=352, help="Width of the MLP of a new model.")
@rare("--max-parameters", type=COUNT, help="Refuse a new model with more parameters than this.")
@json_option()
def small_command(
    *,
    out: Path,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    mlp: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a small model on chats or token files, or distil a draft from a target.

    \b
    dovetail train small --text tokens.bin --init MODEL --out NEW
    dovetail train small --target MODEL --prompts prompts.jsonl --out DRAFT
    """
    shape = {"hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads, "mlp": mlp}
    result = train_small(out=out, shape=shape, **options)
    line = (
        f"{out}: {result.parameters:,} parameters, {result.tokens:,} tokens in "
        f"{result.minutes:.1f} minutes, loss {result.loss:.3f}"
    )
    tell({"out": str(out), **asdict(result)}, line, as_json=as_json)


def train_small(
    *,
    out: Path,
    texts: Sequence[Path] = (),
    target: Path | None = None,
    prompts: Path | None = None,
    init: Path | None = None,
    tokenizer: Path | None = None,
    minutes: float = 10.0,
    seed: int = 0,
    shape: dict[str, int] | None = None,
    max_parameters: int | None = None,
    compiled: bool = False,
) -> "run.Outcome":
    """Train on `texts`, or distil from `target` on its answers to `prompts` (or on `texts`), and
    write the folder `out`."""
    _check_sources(texts, target, prompts, init, tokenizer)
    if out.resolve() in {
        folder.resolve() for folder in (target, init, tokenizer) if folder is not None
    }:
        raise UserError(f"--out {out} is what the training begins with: give another folder")
    from dovetail.workers.training import distil, small
    from dovetail.workers.training.data.corpus import open_reader
    from dovetail.workers.training.regenerate import Writing, regenerate_files

    with small.quiet_loading():
        wanted = small.Shape(**(shape or {}))
        source = init or target or tokenizer
        if source is not None and init is None:
            _check_shape(wanted, len(small.load_tokenizer(source)), max_parameters)
        rate = small.Settings.rate if init is not None else RATE_OF_A_NEW_MODEL
        settings = small.Settings(minutes=minutes, seed=seed, compiled=compiled, rate=rate)
        place = small.workplace(out)
        with place.hold(), show_progress() as show:
            if target is None:
                return small.train_folder(
                    texts,
                    place,
                    settings,
                    init=init,
                    shape=wanted,
                    tokenizer=tokenizer,
                    progress=show,
                )
            files = list(texts)
            if prompts is not None:
                written = out.with_name(out.name + ".answers.jsonl")
                renderer = open_reader(str(target)).renderer
                regenerate_files(
                    [prompts],
                    str(target),
                    renderer,
                    written,
                    Writing(new_tokens=ANSWER_TOKENS, seed=seed),
                    progress=show,
                )
                files.append(written)
            return distil.distil_folder(
                target, files, place, wanted, settings, init=init, progress=show
            )


def _check_sources(
    texts: Sequence[Path],
    target: Path | None,
    prompts: Path | None,
    init: Path | None,
    tokenizer: Path | None,
) -> None:
    if prompts is not None and target is None:
        raise UserError("--prompts needs --target, which answers them")
    if target is None and not texts:
        raise UserError("nothing to learn from: give --text FILE, or --target with --prompts FILE")
    if target is not None and prompts is None and not texts:
        raise UserError("--target needs --prompts FILE, or --text FILE with its own answers")
    if target is None and init is None and tokenizer is None:
        raise UserError("a new model needs --tokenizer DIR, or --init DIR")


def _check_shape(shape: "small.Shape", vocabulary: int, limit: int | None) -> None:
    if shape.hidden % shape.heads or shape.heads % shape.kv_heads:
        raise UserError("--hidden must be a multiple of --heads, and --heads one of --kv-heads")
    if shape.hidden // shape.heads % 2:
        raise UserError(f"--hidden {shape.hidden} / --heads {shape.heads} must be even")
    if limit is not None and shape.parameters(vocabulary) > limit:
        raise UserError(
            f"this shape has {shape.parameters(vocabulary):,} parameters, more than "
            "--max-parameters"
        )
