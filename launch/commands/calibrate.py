"""`dovetail calibrate`: what a pass of the target costs on this machine, beside what the hardware
would allow.

The measuring happens in a process of its own, on the cores and the memory that the target worker
would get and bound as it is, because torch must not be imported before that; the draft is measured
afterwards, on the draft's. What is found goes to the profile file, from where workers read it and
tell it the coordinator.

`python -m dovetail.launch.commands.calibrate` is that process; it says on stdout, line by line,
what it is doing, and then what it found.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

import click

from dovetail.launch.cli import run
from dovetail.launch.commands.worker import THREAD_VARIABLES
from dovetail.launch.console.terminal import counted, note, print_table, progress_bar
from dovetail.launch.files.chart import Curve, check_chart, draw
from dovetail.launch.files.directory import profile_path, substitutes_path, writable_profile_path
from dovetail.launch.files.outputs import check_output
from dovetail.launch.machine.binding import Place, bind
from dovetail.launch.machine.cores import lay_out_here, parse_cores, parse_nodes
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes.child import claim_stdout, end_when_told, end_with
from dovetail.launch.processes.preflight import (
    check_draft,
    check_inflation,
    check_source,
    estimated_bytes,
    free_memory_bytes,
    is_path,
    memory_bytes,
)
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.embedded import with_draft, with_target
from dovetail.launch.settings.flags import SettingsCommand, settings_flags
from dovetail.protocol.errors import CheckpointError, DovetailError, SettingsError, UserError
from dovetail.protocol.files import writing
from dovetail.protocol.profile import (
    Calibration,
    ContextCurve,
    DeviceCosts,
    Entry,
    ProfileKey,
    Reading,
    load_profile,
    update_profile,
)
from dovetail.protocol.settings import HEAD_KINDS

Role = Literal["target", "draft"]
ReadT = TypeVar("ReadT", Calibration, ContextCurve, DeviceCosts, Reading)

SECONDS, MOST_SECONDS = 30.0, 3600.0
ISAS = ("plain", "avx2", "avx512", "vnni", "neon")
TORCH_CAPS = {
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "FBGEMM_ENABLE_INSTRUCTIONS": "AVX512"},
    "vnni": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "FBGEMM_ENABLE_INSTRUCTIONS": "AVX512_VNNI"},
}
"""Variables that hold torch's libraries to an instruction set; read when they are loaded."""
PERCENT = 100
TABLE_ROWS = (1, 2, 4, 8, 16, 32, 64)


@click.command(cls=SettingsCommand)
@click.option(
    "--context",
    "contexts",
    type=click.IntRange(min=1),
    multiple=True,
    help="Rows in the cache; can be repeated.  [default: a quarter of 512, 512, 4 x 512]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1, max=MOST_SECONDS),
    default=SECONDS,
    show_default=True,
    help="About how long to measure passes.",
)
@click.option(
    "--isa",
    type=click.Choice(ISAS),
    help="Use no better instructions than these; then nothing goes to the profile file.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw T_V and its limit over the rows into this SVG file.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on stdout instead of tables."
)
@settings_flags("target", "draft")
def command(
    configuration: Configuration,
    contexts: tuple[int, ...],
    seconds: float,
    isa: str | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure T_V(M), the seconds of a pass of the target over M rows, for M = 1 to 64 and several
    lengths of the cache, and the limits of this machine.

    A target folder may hold a config.json alone: its weights are random then, which costs the same,
    so that a model can be measured before it is downloaded. Where memory does not hold all layers,
    fewer are measured and the times scaled by weights. Median of several passes.

    Of a draft, a small model or a head of the target's, t_D is measured too: the seconds of a level
    of its tree. With --target.prefill DEVICE so is what prompts take that this device reads for a
    target on the CPU; from then on target.prefill auto knows for which it pays. With
    --target.split.device DEVICE, or --target.device DEVICE, so is what layers take on it, resident
    and streamed, and its link: what `dovetail plan` puts placements together from.
    """
    if math.isnan(seconds):  # which no range excludes
        raise UserError("--seconds nan is no number of seconds: write one such as 30")
    check_chart(plot)
    check_output(plot, "the plot")
    _check(configuration)
    place = lay_out_here(
        numa=configuration.settings.target.numa,
        threads=configuration.settings.target.threads,
        target_bytes=estimated_bytes(configuration.settings.target),
    )
    options = [
        f"--seconds={seconds}",
        *(f"--context={length}" for length in contexts),
        *([f"--isa={isa}"] if isa else []),
    ]
    profile = writable_profile_path() if isa is None else None
    if profile is not None:
        load_profile(profile)  # a damaged one is told now, not after the measurement
    with Supervisor() as supervisor, progress_bar(PERCENT, "%") as step:
        found = _measure(
            supervisor, "target", place.target, [*options, *configuration.arguments("target")], step
        )
        drafted = (
            _measure(
                supervisor,
                "draft",
                place.draft,
                [*options[:1], *_draft_arguments(configuration)],
                step,
            )
            if _has_draft(configuration)
            else None
        )
    key, calibration, read, parts = (
        found.pop("key"),
        _read(Calibration, found.pop("calibration")),
        found["reading"],
        found["device"],
    )
    levels = _read(ContextCurve, drafted["levels"]) if drafted is not None else None
    found["t_d"] = (
        {str(rows): taken for rows, taken in zip(levels.t_v.rows, levels.t_v.seconds, strict=True)}
        if levels is not None
        else {}
    )
    if profile is not None:
        _keep(profile, key, lambda entry: entry.with_calibration(calibration))
        if read is not None:
            _keep(profile, key, lambda entry: entry.with_reading(_read(Reading, read)))
        if parts is not None:
            _keep(profile, key, lambda entry: entry.with_device(_read(DeviceCosts, parts)))
        if drafted is not None and levels is not None:
            _keep(profile, drafted["key"], lambda entry: entry.with_levels(levels))
    if plot is not None:
        with writing(plot, "the plot"):
            plot.write_text(_chart(found), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(found))
        return
    _show(found)
    note(
        f"kept in {profile}"
        if profile is not None
        else f"not kept: {'--isa was given' if isa else f'{profile_path()} cannot be written'}"
    )


def _check(configuration: Configuration) -> None:
    """What is wrong with the settings, before a process is started."""
    target = configuration.settings.target
    for name, value in (
        ("target.resident", target.resident),
        ("target.split.layers", target.split.layers),
    ):
        if value != "auto":
            raise SettingsError(
                f"{name} = {value!r}: calibrate measures layers one by one, wherever they may "
                "come to be; leave it out"
            )
    folder = Path(target.model).expanduser() if target.model else None
    if (
        folder is not None
        and (folder.exists() or is_path(target.model))
        and not (folder / "config.json").is_file()
    ):
        raise CheckpointError(
            f"the target model {target.model} has no config.json: name a folder that has one, "
            "or the id of a hub (OWNER/NAME)"
        )
    if folder is not None and not folder.exists():
        check_source("target", target.model)
    check_inflation(target.inflate, memory_bytes())
    if _has_draft(configuration):
        check_draft(configuration.settings)


def _device(configuration: Configuration) -> str:
    """What is to be measured beside the CPU; empty: nothing."""
    target = configuration.settings.target
    return target.split.device or (target.device if target.device != "cpu" else "")


def _has_draft(configuration: Configuration) -> bool:
    """Whether there is a draft to measure: a substitute, a small model or a head that is named, or
    an embedded one beside the embedded target."""
    draft = configuration.settings.draft
    return draft.kind == "substitute" or (
        draft.kind in ("auto", "small", *HEAD_KINDS)
        and bool(draft.model or not configuration.settings.target.model)
    )


def _draft_arguments(configuration: Configuration) -> list[str]:
    """The settings of the draft; a head reads the target's embedding, and a substitute is inflated
    as its target is."""
    target = configuration.settings.target
    named = {"--target.model": target.model, "--target.inflate": target.inflate}
    return [
        *configuration.arguments("draft"),
        *(f"{flag}={value}" for flag, value in named.items() if value),
    ]


def _read(kind: type[ReadT], told: object) -> ReadT:
    """What a process has measured, from its JSON."""
    return kind.model_validate_json(json.dumps(told))


def _keep(profile: Path, key: object, change: Callable[[Entry], Entry]) -> None:
    update_profile(profile, ProfileKey.model_validate(key), change)


def _measure(
    supervisor: Supervisor,
    role: Role,
    place: Place,
    arguments: Sequence[str],
    step: Callable[[str], None],
) -> dict[str, Any]:
    """What a process of `role` finds, bound to `place`."""
    where = [
        f"--role={role}",
        f"--cores={format_numbers(place.cores)}",
        f"--memory-nodes={format_numbers(place.nodes)}",
    ]
    child = supervisor.start(
        f"measurement of the {role}",
        [*where, *arguments],
        module="dovetail.launch.commands.calibrate",
        reads=True,
    )
    assert child.process.stdout is not None
    shown = 0
    for line in child.process.stdout:
        if not line.endswith(b"\n"):  # its last one, torn: it was killed
            break
        message = json.loads(line)
        if "found" in message:
            result: dict[str, Any] = message["found"]
            return result
        reached = int(PERCENT * message["share"])
        for _ in range(reached - shown):
            step(f"{role}: {message['doing']}")
        shown = max(shown, reached)
    child.process.wait()
    raise child.failure()


# -- what is shown ---------------------------------------------------------------------------------


def _show(found: dict[str, Any]) -> None:
    backends, layers = found["backends"], found["layers"]
    what = (
        f"{found['parameters'] / 1e6:.0f} M weights in linears, {found['weights']}, "
        f"{_threads(found)}"
    )
    click.echo(f"target      {found['model']} ({what})")
    if found["layers_measured"] < layers:
        click.echo(
            f"            {found['layers_measured']} of {layers} layers were measured, which "
            "memory holds; times are scaled by weights"
        )
    click.echo(
        f"back end    {backends['backend']} "
        f"({backends['kernels']}{', ' + backends['isa'] if 'isa' in backends else ''}): "
        f"{backends['why']}"
    )
    peaks = ", ".join(f"{name} {peak:.0f}" for name, peak in found["peaks_gflop_s"].items())
    click.echo(
        f"machine     reads {found['bandwidth_gb_s']:.1f} GB/s; 10^9 operations a second: "
        f"{peaks} (probe: {found['probe']})"
    )
    for length in found["skipped_contexts"]:
        click.echo(
            f"skipped     a cache of {length} rows: filling it would take too long; a larger "
            "--seconds measures it"
        )
    others = [length for length in found["t_v_by_context"] if int(length) != found["context"]]
    rows = [_pass(found, str(m), others) for m in TABLE_ROWS]
    print_table(
        (
            "M",
            f"T_V ms, cache {found['context']}",
            "limit ms",
            "achieved",
            "T_V(M)/T_V(1)",
            *(f"ms, cache {length}" for length in others),
        ),
        rows,
    )
    if len(found["t_v_measured"]) < len(found["t_v"]):
        click.echo(
            f"measured at M = {format_numbers(found['t_v_measured'])}; between them T_V is "
            "interpolated linearly (--json has all of it)"
        )
    if linears := backends.get("linears"):
        headings = (
            "linear",
            "up to rows",
            "chosen",
            "seconds of a product of each candidate",
            "not used",
        )
        print_table(headings, [_linear(choice) for choice in linears])
    if (read := found["reading"]) is not None:
        curves = zip(
            read["local"]["rows"],
            read["local"]["seconds"],
            read["streamed"]["seconds"],
            strict=True,
        )
        times = ", ".join(
            f"{rows} rows {_ms(own):.3g} and {_ms(other):.3g} ms" for rows, own, other in curves
        )
        click.echo(f"prompts, read by the CPU and by {read['device']}: {times}")
    if (parts := found["device"]) is not None:
        click.echo(
            f"{parts['device']}: its link carries {parts['link_gb_s']:.1f} GB/s; a layer takes "
            f"(CPU; resident; streamed) {_parts(parts)}"
        )
    if found["t_d"]:
        click.echo(
            "t_D, a level of the draft: "
            + ", ".join(f"{rows} rows {_ms(taken):.3g} ms" for rows, taken in found["t_d"].items())
        )


def _pass(found: dict[str, Any], m: str, others: Sequence[str]) -> tuple[object, ...]:
    taken, share = found["t_v"][m], f"{found['achieved'][m]:.0%}"
    elsewhere = (_ms(found["t_v_by_context"][length][m]) for length in others)
    return (
        int(m),
        _ms(taken),
        _ms(found["t_v_limit"][m]),
        share,
        taken / found["t_v"]["1"],
        *elsewhere,
    )


def _parts(parts: dict[str, Any]) -> str:
    costs = _read(DeviceCosts, parts)
    curves = (costs.host_layer, costs.layer, costs.streamed)
    return ", ".join(
        f"{rows} rows {'; '.join(f'{_ms(curve.at(rows)):.3g}' for curve in curves)} ms"
        for rows in costs.layer.rows
    )


def _linear(choice: dict[str, Any]) -> tuple[object, ...]:
    rows = choice["rows"] if choice["rows"] < 1 << 20 else "any"
    times = ", ".join(f"{name} {taken:.2e}" for name, taken in choice["seconds"].items())
    return (
        f"{choice['n']} x {choice['k']}",
        rows,
        choice["chosen"],
        times,
        "; ".join(f"{name}: {why}" for name, why in choice["refused"].items()),
    )


def _threads(found: dict[str, Any]) -> str:
    return counted(found["threads"], "thread")


def _ms(seconds: float) -> float:
    return seconds * 1e3


def _chart(found: dict[str, Any]) -> str:
    """T_V at each length of the cache, and the limit."""
    curves = [
        Curve(f"cache of {length} rows", [(int(m), _ms(s)) for m, s in curve.items()])
        for length, curve in found["t_v_by_context"].items()
    ]
    limit = Curve(
        "limit of the hardware",
        [(int(m), _ms(s)) for m, s in found["t_v_limit"].items()],
        dashed=True,
    )
    name = Path(found["model"].removesuffix(" (random weights)")).name
    title = f"T_V(M): {name}, {found['weights']}, {found['backends']['backend']}, {_threads(found)}"
    return draw(title, "rows of a pass, M", "milliseconds", [*curves, limit])


# -- the process that measures ---------------------------------------------------------------------


@click.command()
@click.option("--role", type=click.Choice(["target", "draft"]), required=True)
@click.option("--cores", required=True)
@click.option("--memory-nodes", default="")
@click.option("--seconds", type=float, required=True)
@click.option("--context", "contexts", type=int, multiple=True)
@click.option("--isa", default="")
@click.option("--parent", type=int, required=True)
@settings_flags("target", "draft")
def measure(
    configuration: Configuration,
    role: Role,
    cores: str,
    memory_nodes: str,
    seconds: float,
    contexts: tuple[int, ...],
    isa: str,
    parent: int,
) -> None:
    """Bind this process, and only then import torch and measure."""
    end_with(parent)
    end_when_told()
    said = claim_stdout()
    place = Place(parse_cores(cores), parse_nodes(memory_nodes))
    bind(place)
    target, draft = configuration.settings.target, configuration.settings.draft
    threads = target.threads if role == "target" and target.threads != "auto" else len(place.cores)
    os.environ.update({**dict.fromkeys(THREAD_VARIABLES, str(threads)), **TORCH_CAPS.get(isa, {})})
    from dovetail.workers.calibration.devices import measure_device
    from dovetail.workers.calibration.draft import calibrate_draft
    from dovetail.workers.calibration.target import calibrate
    from dovetail.workers.devices import open_device
    from dovetail.workers.models.memory import is_out_of_memory

    found: dict[str, Any]
    device = _device(configuration)
    if device:
        open_device(device, threads)  # one that is not there is told now, not after the measurement
    try:
        if role == "draft":
            named = with_target(target)
            key, levels = calibrate_draft(
                with_draft(draft),
                threads=threads,
                target=named.model,
                inflate=named.inflate,
                cache=substitutes_path(),
                seconds=seconds / 4,
            )
            found = {"key": key.model_dump(), "levels": levels.model_dump()}
        else:
            found = calibrate(
                with_target(target),
                threads=threads,
                memory_bytes=free_memory_bytes(),
                profile=None if isa else writable_profile_path(),
                seconds=seconds,
                contexts=contexts,
                isa=isa,
                say=lambda text, share: _tell(said, {"doing": text, "share": share}),
            )
            costs = (
                measure_device(with_target(target), device=device, threads=threads, seconds=seconds)
                if device
                else None
            )
            found["device"] = None if costs is None else costs.model_dump()
    except Exception as error:
        if is_out_of_memory(error):
            raise DovetailError(
                "memory ended while the model was loaded or measured: name a smaller model, or "
                "other weights"
            ) from None
        raise
    _tell(said, {"found": found})


def _tell(said: TextIO, message: object) -> None:
    print(json.dumps(message), file=said, flush=True)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], measure))
