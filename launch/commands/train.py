"""`dovetail train`: draft heads (the folder of a head has a card and pictures), a small model on
text, or a draft distilled from a target. `workers/training` does the training, and is imported
late."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dovetail.launch.console.help import (
    COUNT,
    EXISTING_FILE,
    Commands,
    HelpCommand,
    Number,
    json_option,
    option,
    rare,
)
from dovetail.launch.files.outputs import OUT_FOLDER
from dovetail.launch.training.run import (
    TrainingOptions,
    note_answers,
    note_left_out,
    note_template,
    show_progress,
    tell,
    train_head,
)
from dovetail.protocol.errors import UserError
from dovetail.workers.training.recipes import TRAINED, Option, TrainedKind

if TYPE_CHECKING:
    from dovetail.workers.training import run, small


FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
HELP = """Train {what}.

\b
dovetail features --data FILE --out FEATURES
dovetail train {kind} --features FEATURES --out HEAD

Without --features the target computes its states when a row is used, which needs no disk but, on
one core, takes longer than the training itself. The target is not changed. The same command resumes
an interrupted run. Defaults that are not shown come from the preset."""


COMMON: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--data",
        multiple=True,
        type=EXISTING_FILE,
        help="Chats as JSON lines (ShareGPT, OpenAI), or a token file; can be repeated.",
    ),
    click.option(
        "--features",
        multiple=True,
        type=FOLDER,
        help="Target states written by `dovetail features`, instead of --data; can be repeated.",
    ),
    click.option(
        "--target",
        help="The head's target: a folder or a hub id.  [default: that of the features, or the "
        "embedded one]",
    ),
    click.option(
        "--regenerate",
        is_flag=True,
        help="First let the target write the answers to --data, which are saved in "
        "OUT.answers.jsonl.",
    ),
    click.option(
        "--out",
        type=OUT_FOLDER,
        required=True,
        help="The folder to write; an unfinished run next to it is resumed.",
    ),
    click.option(
        "--minutes", type=Number(min=0, min_open=True), help="How long to train.  [default: 10]"
    ),
    click.option("--steps", type=COUNT, help="Number of steps to train, instead of a time."),
    option("--seed", type=int, default=0, help="Seed of the weights and of the order of the data."),
    option(
        "--preset",
        type=click.Choice(["auto", "paper", "tiny"]),
        default="auto",
        help="Losses, rate and batches as in the paper, or for training of minutes.",
    ),
    rare("--rate", type=Number(min=0, min_open=True), help="The peak learning rate."),
    rare("--batch", type=COUNT, help="Rows a step."),
    rare(
        "--length", type=click.IntRange(min=8), help="Tokens per row; whole sequences share a row."
    ),
    rare(
        "--ce-weight",
        type=Number(min=0),
        help="Weight of the soft cross entropy (EAGLE 0.1, EAGLE-3 1).",
    ),
    rare("--warm-up", type=COUNT, help="Steps over which the rate rises."),
    rare(
        "--number",
        type=click.Choice(["fp32", "bf16"]),
        help="Type of matrix products.  [default: bf16 on a GPU, the faster one on a CPU]",
    ),
    rare(
        "--intermediate",
        type=click.IntRange(min=8),
        help="Width of the MLP, of each expert with Jakiro.  [default: the target's; Jakiro: "
        "its hidden width]",
    ),
    option(
        "--draft-vocabulary",
        type=click.IntRange(min=2),
        show_default="all, or 16,384 of more than 32,768",
        help="How many of the most frequent tokens of the data the head can propose.",
    ),
    rare(
        "--begin",
        default="target",
        help="Initial weights: target (its last layers if they fit), random, or the folder of a "
        "trained head to continue from.",
    ),
    rare(
        "--store",
        type=click.Choice(["fp16", "int8"]),
        default="fp16",
        help="Type in which the head's matrices are saved; int8 halves the folder, and the "
        "head drafts in 8 bits.",
    ),
    rare("--threads", type=COUNT, help="CPU threads.  [default: torch's]"),
)
IN_STEPS: tuple[Callable[[Any], Any], ...] = (
    rare(
        "--ttt-steps",
        type=click.IntRange(1, 16),
        help="Steps of the training-time test: how often a row continues from its own output.",
    ),
    rare(
        "--feature-weight",
        type=Number(min=0),
        help="Weight of the SmoothL1 loss of the features (EAGLE 1, EAGLE-3 0).",
    ),
    rare(
        "--noise",
        type=Number(min=0),
        help="Width of the uniform noise on the features, for rows of 512 tokens (EAGLE 0.2).",
    ),
)
"""Options of kinds that draft level by level."""


def head_commands() -> list[click.Command]:
    return [_command(kind, entry) for kind, entry in TRAINED.items()]


def _own(own: Option) -> Callable[[Any], Any]:
    add, shown = rare if own.rare else option, own.default is not None
    if own.type == "flag":
        name = f"{own.name}/--no-{own.name.removeprefix('--')}"
        return add(name, default=own.default, help=own.help)
    kind = click.IntRange if own.type == "count" else Number
    limits = kind(own.least, own.most)
    return add(own.name, type=limits, default=own.default, show_default=shown, help=own.help)


def _command(kind: str, entry: TrainedKind) -> click.Command:
    def run(*, as_json: bool, **options: Any) -> None:
        own = {option.field: options.pop(option.field) for option in entry.options}
        wish = TrainingOptions(
            kind=kind, own=own, processes=int(os.environ.get("WORLD_SIZE", "1")), **options
        )
        trained = train_head(wish)
        if trained is not None:
            last, outcome = trained.checks[-1], trained.outcome
            simulated = {"tau": last.length, "accepted_at": last.at, "contrast": last.contrast}
            counts = f"{outcome.parameters:,} parameters, {outcome.tokens:,} tokens"
            line = f"{options['out']}: tau {last.length:.2f} in simulation, {counts}"
            told = {"out": str(options["out"]), "kind": kind, **asdict(outcome), **simulated}
            tell(told, line, as_json=as_json)

    decorated: Callable[..., Any] = run
    steps = IN_STEPS if entry.in_steps else ()
    for add in reversed((*COMMON, *steps, *map(_own, entry.options), json_option())):
        decorated = add(decorated)
    return click.command(
        cls=HelpCommand,
        name=kind,
        help=HELP.format(what=entry.what, kind=kind),
        short_help=f"Train {entry.what.split(':')[0]}.",
    )(decorated)


RATE_OF_A_NEW_MODEL = 3e-3  # random weights allow a higher peak rate than trained ones
ANSWER_TOKENS = 224


@click.group(name="train", cls=Commands)
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
    help="Chats as JSON lines, or a token file, to learn from; can be repeated.",
)
@click.option("--target", type=FOLDER, help="Distil a draft for this model.")
@click.option(
    "--prompts",
    type=EXISTING_FILE,
    help="Chats (JSON lines) that the target first answers; the draft learns from its answers.",
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
    help="Compile the step: a slower start, then faster. On a CPU it needs a C++ compiler.",
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
        raise UserError(f"--out {out} is an input of the training: give another folder")
    from dovetail.workers.training import small
    from dovetail.workers.training.data.corpus import open_reader, read_rows, renderer_of
    from dovetail.workers.training.regenerate import Writing, regenerate_files

    with small.quiet_loading():
        wanted = small.Shape(**(shape or {}))
        source = target or init or tokenizer
        assert source is not None
        loaded = small.load_tokenizer(source)
        if init is None:
            _check_shape(wanted, len(loaded), max_parameters)
        rate = small.Settings.rate if init is not None else RATE_OF_A_NEW_MODEL
        settings = small.Settings(minutes=minutes, seed=seed, compiled=compiled, rate=rate)
        place = small.workplace(out)
        with place.hold(), show_progress() as show:
            files, left_out, renderer = list(texts), Counter[str](), renderer_of(loaded)
            note_template(renderer, source, [*files, *([prompts] if prompts else ())])
            if target is not None and prompts is not None:
                written = out.with_name(out.name + ".answers.jsonl")
                asker = open_reader(str(target)).renderer
                writing = Writing(new_tokens=ANSWER_TOKENS, seed=seed)
                outcome = regenerate_files(
                    [prompts], str(target), asker, written, writing, progress=show
                )
                note_answers(written, outcome)
                files.append(written)
            rows = read_rows(files, renderer, left_out)
            note_left_out(left_out)
            return small.train_folder(
                rows,
                place,
                settings,
                init=init,
                shape=wanted,
                tokenizer=tokenizer,
                target=target,
                progress=show,
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
    if limit is not None and (count := shape.parameters(vocabulary)) > limit:
        raise UserError(f"this shape has {count:,} parameters, more than --max-parameters")
