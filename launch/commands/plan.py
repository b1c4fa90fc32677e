"""`dovetail plan`: the placement of layers and draft, tree, tokens/s, memory, and whether
speculation pays off. Reads only config.json, costs from `calibrate` or estimates, and acceptance
from recorded rounds or papers. `launch/planning/planner.py` searches."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from dovetail.launch.console.help import HelpCommand, json_instead_of
from dovetail.launch.console.terminal import explained, note, print_table, progress_bar, spinner
from dovetail.launch.planning.acceptance import Recorded, read_library
from dovetail.launch.planning.candidates import UNTRAINED, Reader
from dovetail.launch.planning.choice import find_drafts
from dovetail.launch.planning.designs import Design, config_of, planned_types, read_design
from dovetail.launch.planning.downloads import downloads
from dovetail.launch.planning.machines import SIZES, machine_names, read_machine
from dovetail.launch.planning.planner import Option
from dovetail.launch.planning.subject import GPU, KINDS, Subject, folder_of, subject_here
from dovetail.launch.planning.words import figure, placement, serve_command, tree_of
from dovetail.launch.processes import preflight
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import settings_flags
from dovetail.launch.settings.models import with_target
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import DRAFT_KINDS, TreeSettings, byte_count
from dovetail.workers.models.backends.sizes import INT4, WEIGHT_BYTES
from dovetail.workers.models.checkpoints.gguf.view import FILE, spelled

WIDTH = TreeSettings.model_fields["width"].default
"""The width of trees, except with the settings of the embedded pair."""
COLUMNS = {
    "alternative": "a kind of placement; the best of each kind",
    "placement": "layers of the target, and the draft",
    "tokens/s": "predicted; with --rounds, including drafting ahead",
    "tau": "tokens committed per round",
    "tree": "gamma/depth/width and policy",
    "VRAM GB": "of the device, for target and draft: weights, buffers, one long conversation",
    "RAM GB": "of the host, for weights",
}


WEIGHTS = {
    "weights": "a type that the target can have here; the table below is for the first that fits",
    "GB": "of layers and head",
    "tokens/s": "predicted for the best placement and draft that are ready; -: does not fit",
    "tree": "its gamma/depth/width and policy",
    "computes": "the loss measured on the embedded target",
}

DOWNLOADS = {
    "draft": "its hub id, for --draft",
    "kind": "of draft",
    "GB": "of its weights; -: not published",
    "tokens": "published accepted length, the target's own token included; -: none was found",
    "source": "where it is published, and how it was measured",
}


@click.command(cls=HelpCommand, epilog=explained(WEIGHTS | COLUMNS | DOWNLOADS))
@click.option(
    "--draft",
    "drafts",
    multiple=True,
    metavar="MODEL|KIND|none",
    help="A draft to plan with; can be repeated.  [default: heads and smaller "
    "models on this machine, and those that the target could have]",
)
@click.option(
    "--machine",
    metavar="NAME|FILE",
    help=f"Another machine: {', '.join(machine_names())}, or a file like theirs (.toml).",
)
@click.option(
    "--target-size",
    type=click.Choice(list(SIZES)),
    help="In place of --target: a model of that size.",
)
@click.option(
    "--gguf-size",
    metavar="SIZE",
    help="Size of a GGUF file of the target that is not here, such as 4.6GiB; with --machine.",
)
@click.option(
    "--rounds",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Recording of a draft made by `python tests/simulation record` in a checkout; can be "
    "repeated.",
)
@json_instead_of("a table")
@settings_flags("target", "memory", "draft.device", "draft.weights", "tree.width", stratified=False)
def command(
    configuration: Configuration,
    drafts: tuple[str, ...],
    machine: str | None,
    target_size: str | None,
    gguf_size: str | None,
    rounds: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Print the best command to serve this model on this machine, and a table of placements with
    predicted tokens/s and memory.

    With --target.split.device cpu, the CPU takes the place of a GPU.
    """
    _check(configuration, machine, target_size)
    file_bytes = _file_bytes(configuration, machine, gguf_size)
    for name in {*drafts} - DRAFT_KINDS.keys():
        folder_of(name)  # a wrong one is refused before anything is measured
    recorded = [Recorded(read_library(path), str(path)) for path in rounds]
    with spinner(lines=machine is None) as say:
        subjects = (
            [_elsewhere(configuration, machine, target_size, file_bytes)]
            if machine is not None
            else _here(configuration, say)
        )
        first = subjects[0]
        there = [] if drafts else _there(first)
        say("comparing drafts and placements")
        width = None if first.embedded or configuration.given("tree.width") else WIDTH
        offered = [
            Reader(
                *(one.configuration, one.design, recorded, folder_of),
                embedded=one.embedded,
                width=width,
                on_device=one.device not in (None, "cpu"),
            ).read(drafts, there)
            for one in subjects
        ]
    kinds = max(1, len({one.kind for one in offered[0]}))
    with progress_bar(len(subjects) * KINDS * kinds, "placements") as step:
        searched = [
            one.search(candidates, step) for one, candidates in zip(subjects, offered, strict=True)
        ]
    chosen = next((place for place, every in enumerate(searched) if every), 0)
    found, every = subjects[chosen], searched[chosen]
    if not every:
        less = "use smaller weights (--weights half, int8, int4), or raise these limits"
        needs = min(one.target.host_bytes(0, 0) for one in subjects) / 1e9
        raise UserError(
            "nothing fits: the target needs more than memory.vram and memory.ram leave it "
            f"({needs:.3g} GB on the CPU): {less}"
        )
    compared = [one.brief(its) for one, its in zip(subjects, searched, strict=True)]
    no_chats = "" if found.unnamed else preflight.no_chats(found.configuration.settings.target)
    result = {**found.result(every), "weights_compared": compared, "no_chats": no_chats}
    model = ["--target=FOLDER"] if found.unnamed else []
    ready = result["at_once"] or result["choice"]
    result["command"] = serve_command(ready["settings"], *model)
    named = spelled(first.configuration.settings.target.model)
    result["downloads"] = [one.model_dump() for one in downloads().of(named)]
    if as_json:
        click.echo(json.dumps(result))
        return
    _show(every, result, found.device or "cpu", model)


def _here(configuration: Configuration, say: Callable[[str], None]) -> list[Subject]:
    found: list[Subject] = []
    folder = folder_of(with_target(configuration.settings.target).model)
    for weights in planned_types(configuration, folder):
        own = configuration.over("plan", {"target.weights": weights})
        found.append(subject_here(own, say, found[0] if found else None))
    return found


def _there(found: Subject) -> list[str]:
    """Return the drafts of a target that are on this machine; those of the embedded target are
    known."""
    if found.here is None or found.embedded:
        return []
    configuration = found.configuration
    drafts = find_drafts(configuration, folder_of(configuration.settings.target.model))
    return [draft.settings.model or draft.kind for draft in drafts.fitting]


def _check(configuration: Configuration, machine: str | None, target_size: str | None) -> None:
    target = configuration.settings.target
    if target_size is not None and target.model:
        raise UserError(f"--target-size {target_size} replaces --target: leave one of the two out")
    if target_size is not None and machine is None:
        remedy = "needs --machine; for this machine name a --target"
        raise UserError(f"--target-size {target_size} {remedy}")
    if target.weights not in (*WEIGHT_BYTES, FILE, INT4):
        remedy = "cannot be planned: use fp32, half, int8, int4 or bf16"
        raise UserError(f"target.weights = {target.weights!r} {remedy}")
    if machine is not None and (target.split.device or target.device != "cpu"):
        raise UserError(f"--machine {machine} has its own device: leave target's devices out")
    for name in ("target.split.layers", "target.resident"):
        if (value := configuration.value(name)) != "auto":
            raise UserError(f"{name} = {value}: a plan chooses this; leave it out")


def _file_bytes(configuration: Configuration, machine: str | None, gguf_size: str | None) -> int:
    if gguf_size is None:
        return 0
    if machine is None or configuration.given("target.weights"):
        remedy = "needs --machine, and no --weights; here name the file with --target"
        raise UserError(f"--gguf-size {gguf_size} {remedy}")
    try:
        return byte_count(gguf_size)
    except ValueError as error:
        raise UserError(f"--gguf-size: {error}") from None


def _elsewhere(
    configuration: Configuration, machine: str, target_size: str | None, file_bytes: int
) -> Subject:
    current = configuration.settings
    found = read_machine(machine)
    design = (
        Design(config_of(target_size))
        if target_size is not None
        else read_design(folder_of(with_target(current.target).model))
    )
    design = replace(design, file_bytes=file_bytes)
    in_file = file_bytes or any(tensor.packed_bytes for tensor in design.tensors)
    weights = FILE if in_file else found.weights
    if configuration.given("target.weights"):
        weights = current.target.weights
    hardware = found.hardware(weights, current.memory.vram_bytes, current.memory.ram_bytes)
    if (numa := current.target.numa) not in ("auto", "shard"):
        raise UserError(f"target.numa = {numa!r} with --machine: write shard, or leave it out")
    if numa == "shard" and hardware.nodes is None:
        remedy = "set its nodes, or leave numa out"
        raise UserError(f"target.numa = 'shard': {found.title} has one memory node: {remedy}")
    device = GPU if hardware.device is not None else None
    return Subject(
        *(configuration, design, hardware, device, device or "cpu", weights),
        embedded=not current.target.model and target_size is None,
        unnamed=target_size is not None,
    )


def _show(
    every: Sequence[Option], result: dict[str, Any], device: str, model: Sequence[str]
) -> None:
    """Print the command for the best alternative that is ready, the table and the conclusions.
    `model`: the flag for a target given only by its size."""
    click.echo(result["command"])
    if (ready := result["at_once"]) is not None:
        rate = figure(ready["tokens_per_s"])
        how = "estimated, before a calibration" if result["uncalibrated"] else "predicted"
        click.echo(f"{rate} tokens/s are {how} ({ready['name']}: {ready['placement']})")
    sizes = {"VRAM": result["limits"]["vram_gb"], "RAM": result["limits"]["ram_gb"]}
    limits = ", ".join(f"{name} {size:.3g} GB" for name, size in sizes.items() if size is not None)
    total, active = result["parameters"], result["active_parameters"]
    of = f", {total / 1e9:.3g} B weights, {active / 1e9:.3g} B active" if total != active else ""
    target = f"target of {result['layers']} layers, weights {result['weights']}{of}"
    click.echo(f"{result['machine']}; {target}; limits: {limits or 'none'}")
    if len(result["weights_compared"]) > 1 or result["weights"] == "int8":  # may be refused
        print_table(tuple(WEIGHTS), [_brief(one) for one in result["weights_compared"]])
    if words := result["kernels"]:
        click.echo(f"{'warning: ' if ':' in words else ''}kernels {words}")
    if result["device_says"]:
        click.echo(result["device_says"])
    if result["no_chats"]:
        click.echo(result["no_chats"])
    for name, falls in result["falls"].items():
        click.echo(f"draft.device = auto puts the {name} on the CPU, as assumed here: {falls}")
    for name, origin in result["origins"].items():
        click.echo(f"{name}: {origin}")
    print_table(tuple(COLUMNS), [_line(one, device) for one in every])
    if result["left_out"]:
        click.echo(f"these do not fit into memory: {', '.join(result['left_out'])}")
    for line in result["verdict"]:
        click.echo(line)
    if (best := result["choice"])["lacks"]:
        more = [*model, *(["--draft.model=HEAD"] if best["lacks"].startswith(UNTRAINED) else [])]
        click.echo(f"{best['name']} needs more: the draft {best['lacks']}")
        click.echo(f"then: {serve_command(best['settings'], *more)}")
    if found := result["downloads"]:
        click.echo(f"drafts that may be downloaded (as of {downloads().read}):")
        print_table(tuple(DOWNLOADS), [_download(one) for one in found])
        first = found[0]["id"] or found[0]["kind"]
        click.echo(f"to use one, name it: --draft {first}; it is downloaded on first use")
    if result["measurable"]:
        note(f"to replace estimates by measurements: dovetail calibrate {result['measurable']}")


def _brief(one: dict[str, Any]) -> tuple[object, ...]:
    fits = one["tokens_per_s"] is not None
    rate, tree = (figure(one["tokens_per_s"]), one["tree"]) if fits else ("-", "-")
    return one["weights"], one["gb"], rate, tree, one["computes"]


def _download(one: dict[str, Any]) -> tuple[object, ...]:
    numbers = (one[name] if one[name] is not None else "-" for name in ("gb", "tokens"))
    return one["id"] or "in the checkpoint", one["kind"], *numbers, one["source"]


def _line(one: Option, device: str) -> tuple[object, ...]:
    rates = (figure(one.tokens_per_s), one.tau, tree_of(one))
    sizes = (one.device_bytes / 1e9, one.host_bytes / 1e9)
    return (one.name, placement(one, device), *rates, *sizes)
