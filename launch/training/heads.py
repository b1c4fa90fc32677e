"""`dovetail train eagle|eagle3|dovetail|jakiro`: train a draft head; its folder has a card and
pictures. What needs torch is imported when training begins."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dovetail.launch.console.help import HelpCommand
from dovetail.launch.console.options import COUNT, EXISTING_FILE, Number, json_option, option, rare
from dovetail.launch.files.outputs import OUT_FOLDER
from dovetail.launch.training.run import Wish, tell, train_head
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
    option("--seed", type=int, default=0, help="Seed of the weights and of the order of the data."),
    option(
        "--preset",
        type=click.Choice(["auto", "paper", "tiny"]),
        default="auto",
        help="Losses, rate and batches as in the paper, or for minutes.",
    ),
    rare("--rate", type=Number(min=0, min_open=True), help="The peak learning rate."),
    rare("--batch", type=COUNT, help="Rows a step."),
    rare("--length", type=click.IntRange(min=8), help="Tokens a row; whole sequences share a row."),
    rare(
        "--ttt-steps",
        type=click.IntRange(1, 16),
        help="Steps of the training-time test: how often a row goes on from its own output.",
    ),
    rare(
        "--ce-weight",
        type=Number(min=0),
        help="Weight of the soft cross entropy (EAGLE 0.1, EAGLE-3 1).",
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
    rare("--warm-up", type=COUNT, help="Steps over which the rate rises."),
    rare(
        "--number",
        type=click.Choice(["fp32", "bf16"]),
        help="What matrix products are computed in.  [default: bf16 on a GPU, what is faster "
        "on a CPU]",
    ),
    rare(
        "--intermediate",
        type=click.IntRange(min=8),
        help="Width of the MLP, of each expert with Jakiro.  [default: the target's; Jakiro: "
        "its hidden width]",
    ),
    rare(
        "--begin",
        type=click.Choice(["target", "random"]),
        default="target",
        help="With the target's last layers where they fit, or random.",
    ),
    rare("--threads", type=COUNT, help="CPU threads.  [default: torch's]"),
)


def head_commands() -> list[click.Command]:
    return [_command(kind, TRAINED[kind]) for kind in HEAD_KINDS]


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
    for add in reversed((*COMMON, *map(_own, entry.options), json_option())):
        decorated = add(decorated)
    return click.command(
        cls=HelpCommand,
        name=kind,
        help=HELP.format(what=entry.what, kind=kind),
        short_help=f"Train {entry.what.split(':')[0]}.",
    )(decorated)
