"""`dovetail plan`: before anything is loaded, what this hardware should do with this model: where
its layers, a draft and its tree should be, at how many tokens/s and in how much memory, and whether
speculation pays at all.

Models are read by their config.json alone; costs are those that `dovetail calibrate` has kept, or
estimates that say so; what a draft brings is read off recorded rounds, or assumed from papers. The
searching is done by `runtime/planner.py`.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from dovetail.launch.console.terminal import explained, note, print_table, progress_bar, spinner
from dovetail.launch.planning.acceptance import Recorded
from dovetail.launch.planning.alternatives import (
    KINDS,
    Alternative,
    Offered,
    alternatives,
    names_of,
)
from dovetail.launch.planning.candidates import UNTRAINED, Candidate, Reader
from dovetail.launch.planning.designs import Design, config_of, read_config
from dovetail.launch.planning.here import Here, look_here
from dovetail.launch.planning.prices import Hardware, Prices, described, level, price
from dovetail.launch.planning.telling import (
    figure,
    flags,
    placement,
    settings,
    told,
    toml,
    verdict,
    why,
)
from dovetail.launch.processes.preflight import is_path
from dovetail.launch.settings.configure import Configuration, SettingsCommand, settings_flags
from dovetail.launch.settings.embedded import with_target
from dovetail.launch.simulation.machines import SIZES, read_machine
from dovetail.launch.simulation.recording import read_library
from dovetail.protocol.errors import CheckpointError, UserError
from dovetail.protocol.settings import Settings, TreeSettings
from dovetail.runtime.planner import Option, Planner
from dovetail.workers.models.backends.placement import WEIGHT_BYTES

GPU = "cuda:0"
"""Of a described machine."""
WIDTH = TreeSettings.model_fields["width"].default
"""Of trees, where the settings of the embedded pair are of no concern."""
COLUMNS = {
    "alternative": "a kind of placement; of each the best that was found",
    "placement": "layers of the target, and the draft",
    "tokens/s": "predicted; * played by the simulator, drafting ahead included",
    "tau": "tokens that a round brings",
    "tree": "gamma/depth/width and policy",
    "VRAM GB": "of the device, for target and draft: weights, buffers, one long conversation",
    "RAM GB": "of the host, for weights",
    "why": "what a round takes, and what bounds it",
}


@click.command(cls=SettingsCommand, epilog=explained(COLUMNS))
@click.option(
    "--draft",
    "drafts",
    multiple=True,
    metavar="MODEL|KIND|none",
    help="A draft to plan with; repeat.  [default: those that the target could have]",
)
@click.option(
    "--machine",
    metavar="NAME|FILE",
    help="Another machine: one of `simulate machines`, or a file like theirs (.toml).",
)
@click.option(
    "--target-size",
    type=click.Choice(list(SIZES)),
    help="In place of --target: a model of that size.",
)
@click.option(
    "--rounds",
    multiple=True,
    type=click.Path(path_type=Path),
    help="What `simulate record` kept of a draft; repeat.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on stdout instead of a table."
)
@settings_flags("target", "memory", "draft.device", "draft.weights", "tree.width", stratified=False)
def command(
    configuration: Configuration,
    drafts: tuple[str, ...],
    machine: str | None,
    target_size: str | None,
    rounds: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Say what this machine should do with this model: placements side by side, with predicted
    tokens/s and memory, and the settings of the best one.

    With --target.split.device cpu the CPU stands for a GPU.
    """
    _check(configuration, machine, target_size)
    recorded = [Recorded(read_library(path), str(path)) for path in rounds]
    with spinner() as say:
        say("reading the models")
        found = (
            _elsewhere(configuration, machine, target_size)
            if machine is not None
            else subject_here(configuration, say)
        )
    width = None if found.embedded or configuration.given("tree.width") else WIDTH
    candidates = Reader(
        configuration, found.design, recorded, folder_of, embedded=found.embedded, width=width
    ).read(drafts)
    with progress_bar(KINDS * max(1, len({one.kind for one in candidates})), "placements") as step:
        every = found.search(candidates, step)
    if not every:
        less = "take smaller weights (--weights half, int8), or raise them"
        raise UserError(
            "nothing fits: the target needs more than memory.vram and memory.ram leave it "
            f"({found.needs}): {less}"
        )
    result = found.result(every)
    if as_json:
        click.echo(json.dumps(result))
        return
    _show(every, result, found.device or "cpu", "--target FOLDER " if found.unnamed else "")


def _check(configuration: Configuration, machine: str | None, target_size: str | None) -> None:
    """What is wrong with the command line, before anything is looked at."""
    target = configuration.settings.target
    if target_size is not None and (target.model or target.inflate):
        raise UserError(
            f"--target-size {target_size} stands in the place of a target: leave --target and "
            "--inflate out"
        )
    if target_size is not None and machine is None:
        raise UserError(
            f"--target-size {target_size} goes with --machine: name the folder of a "
            "config.json with --target, or a machine"
        )
    if target.weights not in WEIGHT_BYTES:
        raise UserError(
            f"target.weights = {target.weights!r} cannot be split or streamed, and is not "
            "planned with: use fp32, half, int8 or bf16"
        )
    if machine is not None and (target.split.device or target.device != "cpu" or target.inflate):
        raise UserError(
            f"--machine {machine} has a device of its own, and what is inflated is not planned "
            "for it: leave target's devices and --inflate out"
        )
    for name, value in (
        ("target.split.layers", target.split.layers),
        ("target.resident", target.resident),
    ):
        if value != "auto":
            raise UserError(f"{name} = {value}: that is what a plan finds out; leave it out")


class Subject:
    """A target on a machine, with all that the planner asks."""

    def __init__(
        self,
        configuration: Configuration,
        design: Design,
        hardware: Hardware,
        device: str | None,
        draft_device: str,
        weights: str,
    ) -> None:
        self.configuration, self.design, self.hardware = configuration, design, hardware
        self.device, self.draft_device, self.weights = device, draft_device, weights
        self.target = design.target(weights, device or GPU)
        self.embedded = self.unnamed = False
        self.left_out: list[str] = []
        """Kinds of placements for which there is too little memory."""
        self.prices: Prices = price(hardware, self.target, weights)
        self.here: Here | None = None
        self.levels: dict[str, str] = {}
        """Where t_D of each draft is from."""

    @property
    def needs(self) -> str:
        return f"{(self.target.host_bytes(0, 0)) / 1e9:.3g} GB on the CPU"

    @property
    def planner(self) -> Planner:
        return Planner(self.target, self.prices.machine)

    def search(
        self, candidates: Sequence[Candidate], step: Callable[[str], None]
    ) -> list[Alternative]:
        """All alternatives, the fastest first."""
        offered = [one for candidate in candidates for one in self.offered(candidate)]
        found = alternatives(self.planner, offered, ahead=self.ahead, step=step)
        self.left_out = [
            name
            for name in names_of(self.planner, offered)
            if not any(one.name == name for one in found)
        ]
        return found

    def offered(self, candidate: Candidate) -> list[Offered]:
        """A candidate as drafts: one of its own, and where it can one that shares with the
        target."""
        measured = self.here.level(candidate) if self.here is not None else None
        self.levels[candidate.name] = (
            "measured" if measured is not None else str(self.hardware.draft)
        )
        on_device = self.device is not None and self.draft_device == self.device
        beside_s = self.hardware.proposal_s
        found = [
            candidate.draft(
                level(self.hardware, candidate.size, measured), beside_s, on_device=on_device
            )
        ]
        if candidate.kind == "substitute" and on_device and self.prices.machine.device is not None:
            found.append(
                candidate.shared(
                    level(
                        self.hardware, candidate.size, measured, self.prices.machine.device.layer_s
                    ),
                    beside_s,
                )
            )
        return [Offered(candidate, draft) for draft in found]

    def ahead(self, option: Option) -> bool:
        """Whether target and draft have cores or devices of their own: a stand-in's draft has a
        core; a GPU's shares it with what is there of the target."""
        assert option.draft is not None
        return not option.draft.shares and (
            self.device in (None, "cpu") or self.draft_device != self.device or not option.computed
        )

    def _origins(self, every: Sequence[Alternative]) -> dict[str, str]:
        """Where the numbers are from, those of the drafts that stand in the table among them."""
        there = {one.candidate.name: one.candidate for one in every if one.candidate is not None}
        levels = {f"a level of the {name}": self.levels[name] for name in there}
        return {
            **self.prices.origins,
            **levels,
            **{f"what the {name} brings": one.acceptance.origin for name, one in there.items()},
        }

    def _measurable(self) -> str:
        """The flags of the calibrations that would put measurements in the place of estimates;
        nothing for another machine."""
        if self.here is None or not any(
            "estimated" in origin
            for origin in (*self.prices.origins.values(), *self.levels.values())
        ):
            return ""
        target = [
            flag
            for flag in self.configuration.arguments("target")
            if not flag.startswith("--target.split")
        ]
        return " ".join(
            [
                *target,
                *([f"--target.split.device={self.device}"] if self.device else []),
                "--draft DRAFT",
            ]
        )

    def result(self, every: Sequence[Alternative]) -> dict[str, Any]:
        """As `--json` has it."""
        alone = next((one for one in every if one.candidate is None), None)
        rows = [told(one, self.device or "cpu", self._settings(one), alone) for one in every]
        choice = rows[0]
        ready = next((row for row in rows if not row["lacks"]), None)
        link = self.prices.machine.link
        return {
            "machine": self.hardware.title,
            "device": self.device,
            "device_says": "" if self.device else self._without_device(),
            "left_out": list(self.left_out),
            "weights": self.weights,
            "layers": self.target.layers,
            "limits": {
                "vram_gb": _giga(self.hardware.device_bytes),
                "ram_gb": _giga(self.hardware.host_bytes),
            },
            "origins": self._origins(every),
            "measurable": self._measurable(),
            "alternatives": rows,
            "choice": choice,
            "at_once": ready,
            "verdict": verdict(
                every,
                self.weights,
                self.target.layers * self.target.layer + self.target.head,
                link,
                self.target.layer,
            ),
        }

    def _without_device(self) -> str:
        said = "there is no GPU here: everything is on the CPU, and a draft on a core of its own"
        if self.configuration.settings.memory.vram == "auto":
            return said
        return (
            f"{said}; memory.vram limits nothing: --target.split.device=cpu has the CPU "
            "stand for a GPU, --machine plans for another machine"
        )

    def _settings(self, one: Alternative) -> dict[str, Any]:
        return settings(
            one,
            self.device or "cpu",
            self.draft_device,
            self.configuration.over("plan", {"target.weights": self.weights}),
        )


def _giga(size: int | None) -> float | None:
    return None if size is None else size / 1e9


def subject_here(configuration: Configuration, say: Callable[[str], None]) -> Subject:
    """The target of the settings on this machine."""
    _check_folder(configuration.settings)
    here = look_here(configuration, say)
    target = configuration.settings.target
    subject = Subject(
        configuration, here.design, here.hardware, here.device, here.draft_device, target.weights
    )
    subject.embedded, subject.here = not target.model, here
    subject.prices = price(
        here.hardware, subject.target, target.weights, here.calibration, here.parts
    )
    return subject


def _elsewhere(configuration: Configuration, machine: str, target_size: str | None) -> Subject:
    """A machine that is described."""
    current = configuration.settings
    found = read_machine(machine)
    weights = current.target.weights if configuration.given("target.weights") else found.weights
    if weights not in found.target.peak_gflop_s:
        raise UserError(
            f"{found.title} says nothing of {weights} weights: choose "
            f"{' or '.join(found.target.peak_gflop_s)}"
        )
    config = (
        config_of(target_size)
        if target_size is not None
        else read_config(folder_of(with_target(current.target).model), "target model")
    )
    hardware = described(found, weights, current.memory.vram_bytes, current.memory.ram_bytes)
    device = GPU if hardware.device is not None else None
    subject = Subject(configuration, Design(config), hardware, device, device or "cpu", weights)
    subject.embedded, subject.unnamed = (
        not current.target.model and target_size is None,
        target_size is not None,
    )
    return subject


def _check_folder(settings: Settings) -> None:
    """Raise `CheckpointError` before anything is measured for a target whose config.json cannot be
    read."""
    if settings.target.model:
        read_config(folder_of(settings.target.model), "target model")


def folder_of(source: str) -> Path:
    """Of a model: the folder that is named, or of a hub id one with its config.json."""
    folder = Path(source).expanduser()
    if not folder.is_dir() and (folder.exists() or is_path(source)):
        raise CheckpointError(
            f"{source} is no folder: name one that has a config.json, or the id of a hub "
            "(OWNER/NAME)"
        )
    from dovetail.workers.models.checkpoints.hub import CONFIG_ALONE, find_folder  # half a second

    return find_folder(source, files=CONFIG_ALONE)


# -- what is shown ---------------------------------------------------------------------------------


def _show(every: Sequence[Alternative], result: dict[str, Any], device: str, model: str) -> None:
    """The table, what follows from it, and how the best of it is started; `model`: the flag for a
    target that was named by its size alone."""
    limits = ", ".join(
        f"{name} {size:.3g} GB"
        for name, size in (
            ("VRAM", result["limits"]["vram_gb"]),
            ("RAM", result["limits"]["ram_gb"]),
        )
        if size is not None
    )
    click.echo(
        f"{result['machine']}; target of {result['layers']} layers in {result['weights']}; "
        f"limits: {limits or 'none'}"
    )
    if result["device_says"]:
        click.echo(result["device_says"])
    for name, origin in result["origins"].items():
        click.echo(f"{name}: {origin}")
    print_table(tuple(COLUMNS), [_line(one, device) for one in every])
    if result["left_out"]:
        click.echo(f"with this memory there is no room for: {', '.join(result['left_out'])}")
    for line in result["verdict"]:
        click.echo(line)
    for line in _lacking(result, model):
        click.echo(line)
    choice = result["choice"]
    untrained = " --draft.model=HEAD" if choice["lacks"].startswith(UNTRAINED) else ""
    click.echo(
        f"\nStart it: dovetail generate {model}{flags(choice['settings'])}{untrained}\nor with "
        f"--config of a file with\n\n{toml(choice['settings'])}"
    )
    if result["measurable"]:
        note(f"estimates become measurements with: dovetail calibrate {result['measurable']}")


def _lacking(result: dict[str, Any], model: str) -> list[str]:
    choice, ready = result["choice"], result["at_once"]
    if not choice["lacks"]:
        return []
    said = [f"what it lacks: its draft {choice['lacks']}"]
    if ready is not None:
        said.append(
            f"at once there is {ready['name']}, {figure(ready['tokens_per_s'])} tokens/s: "
            f"dovetail generate {model}{flags(ready['settings'])}"
        )
    return said


def _line(one: Alternative, device: str) -> tuple[object, ...]:
    option, tree = one.option, one.option.tree
    rate = f"{figure(one.tokens_per_s)}{'*' if one.played else ''}"
    size = f"{tree.gamma}/{tree.depth}/{tree.width} {tree.policy}" if tree is not None else "-"
    vram = option.device_bytes / 1e9 if option.computed or option.device_bytes else 0.0
    return (
        one.name,
        placement(one, device),
        rate,
        one.tau,
        size,
        vram,
        option.host_bytes / 1e9,
        why(one),
    )
