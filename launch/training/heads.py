"""`dovetail train eagle|eagle3|dovetail|jakiro`: train a draft head for a target, and write its
folder with a card and pictures.

It knows options, not how training works. What needs torch is imported when a training begins.
"""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dovetail.launch.console.help import HelpCommand, Rare
from dovetail.launch.console.options import COUNT, EXISTING_FILE, Number, json_option
from dovetail.launch.files.outputs import OUT_FOLDER
from dovetail.launch.training.progress import tell
from dovetail.launch.training.run import Wish, train_head
from dovetail.protocol.settings import HEAD_KINDS
from dovetail.workers.training.recipes import TRAINED, Option, TrainedKind

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
HELP = """Train {what}.

\b
dovetail features --data FILE --out FEATURES
dovetail train {kind} --features FEATURES --out HEAD

Without --features the target computes its states whenever a row is drawn, which costs no disk and, on one core, more time than the training itself.
The target itself is left as it is. A run that was interrupted is resumed by the same command. Where no value is shown, the preset has it."""  # noqa: E501


COMMON: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--data",
        multiple=True,
        type=EXISTING_FILE,
        help="Chats as JSON lines (ShareGPT, OpenAI), or a token file; may be given more than "
        "once.",
    ),
    click.option(
        "--features",
        type=FOLDER,
        help="The target's states as `dovetail features` has written them, instead of --data.",
    ),
    click.option(
        "--target",
        help="The model that the head is for: a folder or a hub id.  [default: that of the "
        "features, or the embedded one]",
    ),
    click.option(
        "--regenerate",
        is_flag=True,
        help="Let the target write the answers to --data itself first; they are saved in "
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
    click.option("--steps", type=COUNT, help="How many steps to train instead."),
    click.option(
        "--seed",
        type=int,
        default=0,
        show_default=True,
        help="Seed of the weights and of the order of the data.",
    ),
    click.option(
        "--preset",
        type=click.Choice(["auto", "paper", "tiny"]),
        default="auto",
        show_default=True,
        help="Losses, rate and batches as in the paper, or for minutes.",
    ),
    click.option(
        "--rate", type=Number(min=0, min_open=True), cls=Rare, help="The peak learning rate."
    ),
    click.option("--batch", type=COUNT, cls=Rare, help="Rows a step."),
    click.option(
        "--length",
        type=click.IntRange(min=8),
        cls=Rare,
        help="Tokens a row; whole sequences share a row.",
    ),
    click.option(
        "--ttt-steps",
        type=click.IntRange(1, 16),
        cls=Rare,
        help="Steps of the training-time test: how often a row goes on from its own output.",
    ),
    click.option(
        "--ce-weight",
        type=Number(min=0),
        cls=Rare,
        help="Weight of the soft cross entropy (EAGLE 0.1, EAGLE-3 1).",
    ),
    click.option(
        "--feature-weight",
        type=Number(min=0),
        cls=Rare,
        help="Weight of the SmoothL1 loss of the features (EAGLE 1, EAGLE-3 0).",
    ),
    click.option(
        "--noise",
        type=Number(min=0),
        cls=Rare,
        help="Width of the uniform noise on the features, for rows of 512 tokens (EAGLE 0.2).",
    ),
    click.option("--warm-up", type=COUNT, cls=Rare, help="Steps over which the rate rises."),
    click.option(
        "--number",
        type=click.Choice(["fp32", "bf16"]),
        cls=Rare,
        help="What matrix products are computed in.  [default: bf16 on a GPU, what is faster "
        "on a CPU]",
    ),
    click.option(
        "--intermediate",
        type=click.IntRange(min=8),
        cls=Rare,
        help="Width of the MLP, of each expert with Jakiro.  [default: the target's; Jakiro: "
        "its hidden width]",
    ),
    click.option(
        "--begin",
        type=click.Choice(["target", "random"]),
        default="target",
        show_default=True,
        cls=Rare,
        help="With the target's last layers where they fit, or random.",
    ),
    click.option("--threads", type=COUNT, cls=Rare, help="CPU threads.  [default: torch's]"),
)


def head_commands() -> list[click.Command]:
    return [_command(kind, TRAINED[kind]) for kind in HEAD_KINDS]


def _own(option: Option) -> Callable[[Any], Any]:
    listed = Rare if option.rare else click.Option
    if option.type == "flag":
        name = f"{option.name}/--no-{option.name.removeprefix('--')}"
        return click.option(
            name, default=option.default, show_default=True, cls=listed, help=option.help
        )
    return click.option(
        option.name,
        type=click.IntRange(option.least, option.most)
        if option.type == "count"
        else Number(option.least, option.most),
        default=option.default,
        show_default=option.default is not None,
        cls=listed,
        help=option.help,
    )


def _command(kind: str, entry: TrainedKind) -> click.Command:
    def run(*, as_json: bool, **options: Any) -> None:
        own = {option.field: options.pop(option.field) for option in entry.options}
        wish = Wish(kind=kind, own=own, processes=int(os.environ.get("WORLD_SIZE", "1")), **options)
        trained = train_head(wish)
        if trained is not None:
            last, outcome = trained.checks[-1], trained.outcome
            simulated = {"tau": last.length, "accepted_at": last.at, "contrast": last.contrast}
            line = (
                f"{options['out']}: tau {last.length:.2f} in simulation, "
                f"{outcome.parameters:,} parameters, {outcome.tokens:,} tokens"
            )
            tell(
                {"out": str(options["out"]), "kind": kind, **asdict(outcome), **simulated},
                line,
                as_json=as_json,
            )

    decorated: Callable[..., Any] = run
    for option in reversed((*COMMON, *map(_own, entry.options), json_option())):
        decorated = option(decorated)
    return click.command(
        cls=HelpCommand,
        name=kind,
        help=HELP.format(what=entry.what, kind=kind),
        short_help=f"Train {entry.what.split(':')[0]}.",
    )(decorated)
