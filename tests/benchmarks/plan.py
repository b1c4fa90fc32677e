"""The command `plan`: what `dovetail plan` predicts of a placement beside what it comes to, in
tokens/s and in memory, with the CPU standing for the GPU.

Everything is measured on the cores that the processes get by themselves. The rounds of each draft
are recorded; then for every placement the machine is calibrated, since memory is not always equally
fast, and a stack of processes of its own decodes the recorded replies. With --work the rounds are
kept, so that a long run can be taken in pieces.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from benchmarks.duels import settings_of
from benchmarks.options import Command, option, options, report
from dovetail.launch.console.terminal import note, print_table
from dovetail.launch.planning.acceptance import Recorded
from dovetail.launch.planning.alternatives import Alternative, expected
from dovetail.launch.planning.candidates import Reader
from dovetail.launch.planning.recording import Library, read_library
from dovetail.launch.planning.subject import Subject, folder_of, subject_here
from dovetail.launch.planning.words import placement, settings
from dovetail.launch.processes.stack import start_stack, wait_until_ready
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.embedded import DEMO_FOLDER
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import TreeSettings
from dovetail.runtime.planner import Tree
from simulation.figures import Figures, figures
from simulation.methods import Method
from simulation.validation import decode
from support.inflated import as_flags, models_at

DOVETAIL = ("-P", "-m", "dovetail.launch.cli")
SIMULATION = (str(Path(__file__).resolve().parent.parent / "simulation"),)
DEVICE = "cpu"
WITHIN = 0.1
"""Predicted over measured may be off by so much."""
TREE = Tree("dynamic", 7, 7, 4)
DEEP = Tree("dynamic", 15, 8, 4)
GIGA, MS = 1e9, 1e3


@dataclass(frozen=True)
class Case:
    """A placement: layers on the device, how many of them stay there, and a draft with its tree."""

    computed: float
    """Share of all layers; `resident` likewise."""
    resident: float
    draft: str = "none"
    tree: Tree | None = None
    shared: bool = False


CASES: Mapping[str, Case] = {
    "target alone": Case(0.0, 0.0),
    "target on the CPU, small draft": Case(0.0, 0.0, "small", TREE),
    "split target, head": Case(0.5, 0.5, "dovetail", DEEP),
    "half of the layers streamed, small draft": Case(1.0, 0.5, "small", DEEP),
    "all layers streamed, head": Case(1.0, 0.0, "dovetail", DEEP),
    "mixed: CPU, resident, streamed; small draft": Case(0.75, 0.25, "small", TREE),
    "one process with a substitute": Case(
        1.0, 0.5, "substitute", Tree("beam", 24, 8, 3), shared=True
    ),
}


@click.command(cls=Command)
@option(
    "--placement",
    "names",
    multiple=True,
    type=click.Choice(list(CASES)),
    help="Can be repeated.  [default: all]",
)
@option("--inflate", default="512MiB", help="Size to which the target is inflated.")
@option(
    "--weights", type=click.Choice(("fp32", "half", "int8")), default="fp32", help="The target's."
)
@option("--limit", type=click.IntRange(min=1), default=4, help="Prompts that are decoded.")
@option("--max-tokens", type=click.IntRange(min=2), default=64, help="Tokens of a reply.")
@option(
    "--seconds", type=float, default=8.0, help="Seconds of the calibration before each placement."
)
@option(
    "--work",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep calibrations and rounds there for the next run.",
)
@options("json")
def plan(names: tuple[str, ...], work: Path | None, as_json: bool, **how: Any) -> None:
    """Compare what `dovetail plan` predicts of placements with what they come to, in tokens/s and
    in memory."""
    chosen = {name: CASES[name] for name in names or CASES}
    if find_spec("hqq") is None and (
        left := [name for name, case in chosen.items() if case.draft == "substitute"]
    ):
        note(f"left out, since hqq is not installed: {', '.join(left)}")
        chosen = {name: case for name, case in chosen.items() if name not in left}
    with _folder(work) as folder:
        os.environ["XDG_CACHE_HOME"] = str(
            folder
        )  # no profile file of the user's, here and in every process that is started
        base_bytes = _base_bytes(how)
        rows = [_row(name, case, folder, how, base_bytes) for name, case in chosen.items()]
    report(
        {"rows": rows, "settings": how, "base_gb": base_bytes / GIGA}, as_json, lambda: _show(rows)
    )


@contextmanager
def _folder(work: Path | None) -> Iterator[Path]:
    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
        yield work.resolve()
        return
    with TemporaryDirectory(prefix="dovetail-plan-") as folder:
        yield Path(folder)


def _row(
    name: str, case: Case, folder: Path, how: Mapping[str, Any], base_bytes: int
) -> dict[str, Any]:
    """One placement, predicted and measured."""
    draft = case.draft if case.draft != "none" else "small"
    library = _library(draft, folder, how)
    note(f"{name}: calibrating")
    _run(
        DOVETAIL,
        "calibrate",
        f"--seconds={how['seconds']}",
        "--keep-anyway",
        f"--target.split.device={DEVICE}",
        *_pair(how, draft),
    )
    subject = subject_here(_base(how, draft), lambda _: None)
    predicted = _predicted(subject, name, case, library)
    note(f"{name}: decoding")
    measured, peak = _measured(subject, predicted, library)
    note(
        f"{name}: {predicted.tokens_per_s:.1f} tokens/s predicted, {measured.tokens_per_s:.1f} "
        "measured"
    )
    planned = (
        predicted.option.device_bytes
        + predicted.option.host_bytes
        - (0 if case.shared or case.draft == "none" else _draft_bytes(predicted))
    )
    return {
        "placement": name,
        "in_words": placement(predicted, DEVICE),
        "predicted": predicted.tokens_per_s,
        "measured": measured.tokens_per_s,
        "ratio": predicted.tokens_per_s / measured.tokens_per_s,
        "round_ms_predicted": {
            "draft": predicted.option.draft_s * MS,
            "verify": predicted.option.verify_s * MS,
            "all": predicted.option.round_s * MS,
        },
        "round_ms_measured": {
            "draft": measured.draft_s * MS,
            "verify": measured.verify_s * MS,
            "all": measured.decode_s / measured.rounds * MS,
        },
        "tau_predicted": predicted.option.tau,
        "tau_measured": measured.tau,
        "planned_gb": planned / GIGA,
        "peak_gb": (peak - base_bytes) / GIGA,
        "holds": abs(predicted.tokens_per_s / measured.tokens_per_s - 1.0) <= WITHIN,
    }


def _draft_bytes(found: Alternative) -> int:
    assert found.candidate is not None
    return found.candidate.size.bytes


def _base(how: Mapping[str, Any], draft: str, **more: Any) -> Configuration:
    flags = {
        **models_at(how["inflate"], draft),
        "target.weights": how["weights"],
        "target.split.device": DEVICE,
        "draft.device": DEVICE,
    }
    return settings_of({**flags, "sampling.max_tokens": how["max_tokens"], **more})


def _library(draft: str, folder: Path, how: Mapping[str, Any]) -> Library:
    """The rounds of a draft, recorded where they are not."""
    rounds = folder / f"{draft}-{how['limit']}-{how['max_tokens']}"
    if not rounds.exists():
        lengths = [f"--limit={how['limit']}", f"--max-tokens={how['max_tokens']}"]
        _run(SIMULATION, "record", *lengths, f"--out={rounds}", *_pair(how, draft))
    return read_library(rounds)


def _pair(how: Mapping[str, Any], draft: str) -> list[str]:
    models = as_flags(models_at(how["inflate"], draft))
    return [*models, f"--target.weights={how['weights']}", f"--draft.device={DEVICE}"]


def _run(program: Sequence[str], *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *program, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UserError(f"{program[-1]} {arguments[0]} failed: {done.stderr.strip()}")


def _predicted(subject: Subject, name: str, case: Case, library: Library) -> Alternative:
    layers, planner = subject.target.layers, subject.planner
    computed, resident = round(case.computed * layers), round(case.resident * layers)
    if case.tree is None:
        return expected(
            planner, name, planner.option(computed, resident, None, None, 1.0), None, ahead=False
        )
    reader = Reader(
        subject.configuration,
        subject.design,
        [Recorded(library, "the recording")],
        folder_of,
        embedded=True,
        width=None,
    )
    (candidate,) = reader.read([case.draft])
    offered = next(one for one in subject.offered(candidate) if one.shared is case.shared)
    option = planner.option(
        computed, resident, offered.draft, case.tree, candidate.acceptance.tokens(case.tree)
    )
    return expected(planner, name, option, offered, ahead=subject.ahead(option))


def _measured(subject: Subject, predicted: Alternative, library: Library) -> tuple[Figures, int]:
    """Decode the recorded requests; return the figures, and the peak memory of the target's process
    in bytes."""
    found = settings(predicted, DEVICE, DEVICE, subject.configuration)
    configuration = _without_split(subject.configuration).over("plan", found)
    ahead = False if predicted.offered is not None and predicted.offered.shared else None
    tree = TreeSettings(
        **{**configuration.settings.tree.model_dump(), "sharpening": library.about.sharpening}
    )
    with Supervisor() as supervisor:
        stack = start_stack(supervisor, configuration, anew=True)
        state = wait_until_ready(supervisor, stack, lambda _: None)
        (target,) = [worker for worker in state.workers if "target" in worker.roles]
        with stack.connect() as client:
            method = Method(predicted.name, tree, ahead)
            decode(
                client, library, library.recordings[0], method
            )  # caches are filled, threads are awake
            replies = [
                decode(client, library, recording, method) for recording in library.recordings
            ]
        return figures([reply.result for reply in replies]), peak_bytes(target.pid)


def _without_split(configuration: Configuration) -> Configuration:
    return configuration.over("plan", {"target.split.device": ""})


def peak_bytes(process: int) -> int:
    """The most memory that a process has had."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _base_bytes(how: Mapping[str, Any]) -> int:
    """Return the bytes that a target's process has beside weights (Python, torch, transformers):
    those of the embedded target as it is, less its 29 MB of weights."""
    configuration = settings_of({"draft.kind": "none", "target.weights": how["weights"]})
    with Supervisor() as supervisor:
        state = wait_until_ready(
            supervisor, start_stack(supervisor, configuration, anew=True), lambda _: None
        )
        return peak_bytes(state.workers[0].pid) - sum(
            file.stat().st_size * 2 for file in (DEMO_FOLDER / "target").glob("*.safetensors")
        )


def _show(rows: list[dict[str, Any]]) -> None:
    within = f"within {WITHIN:.0%}"
    headings = (
        "placement",
        "predicted tokens/s",
        "measured",
        "predicted / measured",
        within,
        "tau, predicted",
        "measured",
        "GB, planned",
        "peak",
    )
    names = (
        "placement",
        "predicted",
        "measured",
        "ratio",
        "holds",
        "tau_predicted",
        "tau_measured",
        "planned_gb",
        "peak_gb",
    )
    print_table(headings, [tuple(row[name] for name in names) for row in rows])
