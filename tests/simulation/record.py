"""The command `record`: decode prompts once with a real pair, and keep what the
draft says at every position."""

import os
from pathlib import Path

import click

from dovetail.launch.console.help import COUNT, FILE, HelpCommand, Number, Rare, seed_option
from dovetail.launch.console.terminal import counted, note, progress_bar, spinner
from dovetail.launch.files.outputs import OUT_FOLDER
from dovetail.launch.files.prompts import read_prompts
from dovetail.launch.processes.nursery import thread_environment
from dovetail.launch.processes.preflight import check_draft, check_target
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import DEMONSTRATED, settings_flags
from dovetail.launch.settings.models import DEMO_FOLDER, with_draft, with_target
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import MAX_DEPTH, MAX_GAMMA, MAX_WIDTH
from simulation.folder import Folder

NODES, LEVELS, CHILDREN = 384, 12, 32
"""The size of the tree recorded at a position; as many children as a draft keeps of a node when it
grows ahead."""


# -- recording -------------------------------------------------------------------------------------


@click.command("record", cls=HelpCommand, short_help="Keep what a draft says at every position.")
@click.option(
    "--prompts", "file", type=FILE, help="File of prompts; the first turn of each is decoded."
)
@click.option(
    "--out",
    type=OUT_FOLDER,
    required=True,
    help="The folder to write; an interrupted run is continued.",
)
@click.option("--limit", type=COUNT, help="Prompts taken.  [default: all]")
@seed_option("Seed of every reply.")
@click.option(
    "--sharpening",
    type=Number(0.0, 100.0, min_open=True),
    default=1.0,
    show_default=True,
    cls=Rare,
    help="Sharpening of the scores that are recorded (tree.sharpening).",
)
@click.option(
    "--nodes",
    type=click.IntRange(1, MAX_GAMMA),
    default=NODES,
    show_default=True,
    cls=Rare,
    help="Nodes expanded at each position, at least.",
)
@click.option(
    "--levels",
    type=click.IntRange(1, MAX_DEPTH),
    default=LEVELS,
    show_default=True,
    cls=Rare,
    help="Levels of the recorded trees.",
)
@click.option(
    "--children",
    type=click.IntRange(1, MAX_WIDTH),
    default=CHILDREN,
    show_default=True,
    cls=Rare,
    help="Children recorded of each node.",
)
@click.option("--threads", type=COUNT, default=1, show_default=True, cls=Rare, help="CPU threads.")
@settings_flags("target", "draft", "sampling", shown=DEMONSTRATED)
def record(
    configuration: Configuration,
    file: Path | None,
    out: Path,
    limit: int | None,
    seed: int,
    sharpening: float,
    nodes: int,
    levels: int,
    children: int,
    threads: int,
) -> None:
    """Decode prompts once, a token a round, and keep the draft's tree at every position.

    The reply is the same with any tree, so that one recording serves every policy and size of tree.
    Nothing is timed.
    """
    settings = configuration.settings
    if settings.draft.kind in ("none", "ngram"):
        raise UserError(
            f"draft.kind = {settings.draft.kind!r}: only a draft with a model can be recorded; "
            "name one with --draft"
        )
    if settings.sampling.rejects:
        raise UserError(
            "sampling.acceptance = 'rejection' draws again in each round, so that there is nothing "
            "to record: use 'coupled'"
        )
    check_target(settings)
    check_draft(settings)
    prompts = read_prompts(file or DEMO_FOLDER / "prompts.jsonl")[:limit]
    os.environ.update(thread_environment(threads))
    from dovetail.workers.drafters.registry import open_draft_worker
    from dovetail.workers.serving.open_target import open_target_worker
    from simulation.survey import Order, Recorder, processors

    with spinner() as say:
        say("loading the models")
        model = with_target(settings.target)
        target = open_target_worker(model, name="target", threads=threads)
        draft = open_draft_worker(
            with_draft(settings.draft), name="draft", threads=threads, target=model.model
        )
    order = Order(
        processors(settings.sampling),
        seed,
        sharpening,
        nodes,
        levels,
        children,
        settings.sampling.max_tokens,
    )
    recorder = Recorder(target, draft, order)
    with progress_bar(len(prompts), "replies") as step:
        done = recorder.record_all(prompts, Folder(out, recorder.about), step)
    there = len(prompts) - done
    note(
        f"{out}: {counted(done, 'reply', 'replies')} recorded, {there} "
        f"{'was' if there == 1 else 'were'} there"
    )
