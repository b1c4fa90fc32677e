"""`dovetail calibrate`: the cost of a target pass on this machine, and the hardware's limit. A
child process (`machine/measurement.py`) measures on the target's cores, then on the draft's, since
binding must precede the import of torch. Results go to the profile file."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from dovetail.launch.bench.load.served import PLAIN, PLAIN_PATH, ask, served
from dovetail.launch.console.help import (
    COUNT,
    FILE,
    HelpCommand,
    Number,
    json_instead_of,
    option,
    rare,
)
from dovetail.launch.console.terminal import counted, note, print_table, progress_bar
from dovetail.launch.files.charts import Curve, check_chart, draw
from dovetail.launch.files.directory import profile_path, writable_profile_path
from dovetail.launch.files.outputs import check_output
from dovetail.launch.machine.measurement import Role, beside_cpu
from dovetail.launch.machine.others import OTHERS, Load, Others
from dovetail.launch.machine.sharding import (
    choice_of,
    layout_for,
    may_be_sharded,
    node_times,
    other_layout,
)
from dovetail.launch.machine.topology import Place, format_numbers, read_topology
from dovetail.launch.processes.preflight import check_draft, check_source, is_path
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import settings_flags
from dovetail.launch.settings.models import with_target
from dovetail.protocol.calibration import Calibration, ContextCurve, DeviceCosts, ReadingCosts
from dovetail.protocol.errors import CheckpointError, DovetailError, SettingsError
from dovetail.protocol.experts import Routing
from dovetail.protocol.files import writing
from dovetail.protocol.profile import (
    Entry,
    ProfileKey,
    load_profile,
    rewrite_profile,
    update_profile,
)
from dovetail.protocol.settings import HEAD_KINDS, TARGETS_OWN, TargetSettings
from dovetail.runtime.costs.passes import curves_of
from dovetail.workers.models.checkpoints.gguf.view import weight_paths
from dovetail.workers.models.checkpoints.hub import CONFIG_ALONE, find_folder

ReadT = TypeVar("ReadT", Calibration, ContextCurve, DeviceCosts, ReadingCosts)
TABLE_ROWS = (1, 2, 4, 8, 16, 32, 64)


def read_found(kind: type[ReadT], told: object) -> ReadT:
    """Parse the measurements of a process from JSON."""
    return kind.model_validate_json(json.dumps(told))


def show_found(found: dict[str, Any]) -> None:
    backends, layers = found["backends"], found["layers"]
    active, every = found["active_parameters"], found["parameters"]
    part = "" if active == every else f" ({active / 1e6:.0f} M of them active)"
    what = f"{every / 1e6:.0f} M weights in linears{part}, {found['weights']}, {_threads(found)}"
    click.echo(f"target      {found['model']} ({what})")
    if found["layers_measured"] < layers:
        click.echo(
            f"            {found['layers_measured']} of {layers} layers were measured, as memory "
            "allows; times are scaled by weights"
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
            f"skipped     a cache of {length} rows, which would take too long to fill; raise "
            "--seconds to measure it"
        )
    others = [length for length in found["t_v_by_context"] if int(length) != found["context"]]
    rows = [_pass(found, str(m), others) for m in TABLE_ROWS]
    own = ("M", f"T_V ms, cache {found['context']}", "limit ms", "achieved", "T_V(M)/T_V(1)")
    print_table((*own, *(f"ms, cache {length}" for length in others)), rows)
    if (experts := found["experts"]) is not None:
        click.echo(_experts(experts))
    if len(found["t_v_measured"]) < len(found["t_v"]):
        click.echo(
            f"measured at M = {format_numbers(found['t_v_measured'])}; in between, T_V is "
            "interpolated linearly (--json has all values)"
        )
    if linears := backends.get("linears"):
        seconds = "seconds of a product of each candidate"
        headings = ("linear", "up to rows", "chosen", seconds, "not used")
        print_table(headings, [_linear(choice) for choice in linears])
    _show_parts(found)


def _show_parts(found: dict[str, Any]) -> None:
    if (read := found["reading"]) is not None:
        own, other = read["local"], read["streamed"]["seconds"]
        times = ", ".join(
            f"{rows} rows {_ms(here):.3g} and {_ms(there):.3g} ms"
            for rows, here, there in zip(own["rows"], own["seconds"], other, strict=True)
        )
        click.echo(f"prompts read by the CPU and by {read['device']}: {times}")
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
    limit = _ms(found["t_v_limit"][m])
    return (int(m), _ms(taken), limit, share, taken / found["t_v"]["1"], *elsewhere)


def _experts(experts: Mapping[str, Any]) -> str:
    routing = Routing(row=experts["row"], most=experts["most"])
    shown = [m for m in TABLE_ROWS if str(m) in experts["passes"]]
    through = ", ".join(
        f"{experts['passes'][str(m)]} at M = {m} ({routing.unique(m):.0f} if rows chose "
        "independently)"
        for m in shown[1:4]
    )
    return (
        f"experts     {routing.row} of {routing.most} a row, over all layers; {through}; each "
        f"further one takes {experts['expert_s'] * 1e6:.3g} us"
    )


def _parts(parts: dict[str, Any]) -> str:
    costs = read_found(DeviceCosts, parts)
    curves = (costs.host_layer, costs.layer, costs.streamed)
    return ", ".join(
        f"{rows} rows {'; '.join(f'{_ms(curve.at(rows)):.3g}' for curve in curves)} ms"
        for rows in costs.layer.rows
    )


def _linear(choice: dict[str, Any]) -> tuple[object, ...]:
    rows = choice["rows"] if choice["rows"] < 1 << 20 else "any"
    times = ", ".join(f"{name} {taken:.2e}" for name, taken in choice["seconds"].items())
    refused = "; ".join(f"{name}: {why}" for name, why in choice["refused"].items())
    return (f"{choice['n']} x {choice['k']}", rows, choice["chosen"], times, refused)


def _threads(found: dict[str, Any]) -> str:
    return counted(found["threads"], "thread")


def _ms(seconds: float) -> float:
    return seconds * 1e3


def chart_of(found: dict[str, Any]) -> str:
    """T_V at each length of the cache, and the limit."""
    curves = [
        Curve(f"cache of {length} rows", [(int(m), _ms(s)) for m, s in curve.items()])
        for length, curve in found["t_v_by_context"].items()
    ]
    least = [(int(m), _ms(s)) for m, s in found["t_v_limit"].items()]
    limit = Curve("limit of the hardware", least, dashed=True)
    name = Path(found["model"].removesuffix(" (random weights)")).name
    title = f"T_V(M): {name}, {found['weights']}, {found['backends']['backend']}, {_threads(found)}"
    return draw(title, "rows of a pass, M", "milliseconds", [*curves, limit])


SECONDS, MOST_SECONDS = 30.0, 3600.0
BLOCKS = "file"  # weights that are read from a file and cannot be random
PERCENT = 100
REPLIES, MOST_TOKENS = 3, 64
"""Number of streamed replies for the overhead of a round; the fastest counts."""


@click.command(cls=HelpCommand)
@click.option(
    "--context",
    "contexts",
    type=COUNT,
    multiple=True,
    help="Rows in the cache; can be repeated.  [default: a quarter of 512, 512, 4 x 512]",
)
@option(
    "--seconds",
    type=Number(min=0.1, max=MOST_SECONDS),
    default=SECONDS,
    help="Approximate time for measuring passes.",
)
@click.option("--plot", type=FILE, help="Plot T_V and its limit over the rows in this SVG file.")
@rare("--keep-anyway", is_flag=True, help="Save the figures even if other programs were busy.")
@json_instead_of("tables")
@settings_flags("target", "draft")
def command(
    configuration: Configuration,
    contexts: tuple[int, ...],
    seconds: float,
    plot: Path | None,
    keep_anyway: bool,
    as_json: bool,
) -> None:
    """Measure T_V(M), the seconds of a pass of the target over M rows, for M = 1 to 64 and several
    lengths of the cache, and the limits of this machine.

    A target folder may contain only config.json: weights are then random, at the same cost, so that
    a model can be measured before it is downloaded. If not all layers fit into memory, fewer are
    measured and the times scaled. Times are medians of several passes. If other programs use more
    than a tenth of the processors, nothing is saved and the exit code is 1. Results hold for the
    kernels' instruction set. For a draft, a small model or a head, t_D is measured: the seconds of
    one level of its tree. --target.prefill DEVICE measures how long this device takes to read
    prompts for a target on the CPU; target.prefill auto then uses it for prompts for which it pays
    off. The device of --target.split.device or --target.device is measured with resident and
    streamed layers, and its link; `dovetail plan` composes placements from these. On a machine with
    several memory nodes, a target that can be spread is measured on the best node and spread over
    all; target.numa auto then uses the faster layout.
    """
    check_chart(plot)
    check_output(plot, "the plot")
    _check(configuration)
    profile = writable_profile_path()
    if profile is not None:
        load_profile(profile)  # report a damaged file now, not after the measurement
    found, drafted, spread = _measure_both(configuration, contexts, seconds)
    calibration = read_found(Calibration, found.pop("calibration"))
    watch = Others()
    if (overhead_s := _overhead_s(configuration, calibration, seconds)) is not None:
        calibration = calibration.model_copy(update={"overhead_s": overhead_s})
    found["overhead_ms"] = None if calibration.overhead_s is None else 1e3 * calibration.overhead_s
    loads = [Load(**told) for one in (found, *spread, drafted) if one and (told := one["others"])]
    if (load := watch.load(lambda pid, _: pid == os.getpid())) is not None:
        loads.append(load)
    most = max(loads, key=lambda load: load.share, default=None)
    found["others"] = None if most is None else asdict(most)
    busy = most is not None and most.share > OTHERS and not keep_anyway
    levels = read_found(ContextCurve, drafted["levels"]) if drafted is not None else None
    curve = () if levels is None else zip(levels.t_v.rows, levels.t_v.seconds, strict=True)
    found["t_d"] = {str(rows): taken for rows, taken in curve}
    key = found.pop("key")
    if profile is not None and not busy:
        _keep_target(profile, key, calibration, found)
        if spread:
            _keep_nodes(configuration.settings.target, spread)
        if drafted is not None and levels is not None:
            _keep(profile, drafted["key"], lambda entry: entry.with_levels(levels))
    if plot is not None:
        with writing(plot, "the plot"):
            plot.write_text(chart_of(found), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(found))
    else:
        show_found(found)
        if words := choice_of(configuration.settings.target).words:
            click.echo(words)
        if calibration.overhead_s is not None:
            added = f"{found['overhead_ms']:.2f} ms to a pass of a served reply"
            click.echo(f"Messages, coordinator and HTTP add {added}.")
        if most is not None and not (busy and profile is not None):
            click.echo(f"Other programs {most.words}.")
    if busy and most is not None and profile is not None:
        text = f"nothing was saved because other programs {most.words}"
        raise DovetailError(f"{text}: stop them, or add --keep-anyway")
    if not as_json:
        lost = f"not saved: {profile_path()} cannot be written"
        note(f"saved in {profile}" if profile is not None else lost)


def _overhead_s(
    configuration: Configuration, calibration: Calibration, seconds: float
) -> float | None:
    """Return the seconds of messages, coordinator and HTTP per pass, from about `seconds` of
    streams. None if the served target differs from the measured one, or other programs slowed the
    passes."""
    folder = find_folder(with_target(configuration.settings.target).model, files=CONFIG_ALONE)
    whole = calibration.layers_measured == calibration.layers and any(weight_paths(folder))
    if beside_cpu(configuration) or not whole or not (folder / "tokenizer.json").exists():
        return None
    tokens = max(2, min(MOST_TOKENS, int(seconds / REPLIES / calibration.t_v.at(1))))
    alone = {"draft.kind": "none", "draft.model": ""}
    with served(configuration.over("calibrate", alone), None) as server:
        wishes = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        body = {**server.body(PLAIN, "", seed=1, **wishes), "prompt": "Once upon a time"}
        del body["messages"]  # not every model has a chat template
        asked = range(REPLIES)
        replies = [ask(server.site, body, number, path=PLAIN_PATH) for number in asked]
    if error := next((reply.words or reply.error for reply in replies if reply.error), ""):
        raise DovetailError(f"the target was measured but cannot be served: {error}")
    context = replies[0].prompt_tokens + replies[0].output_tokens / 2
    token_s = min(reply.tpot_s or 0.0 for reply in replies)
    overhead_s = token_s - curves_of(calibration).at(1, context)
    return overhead_s if overhead_s > 0.0 else None


def _check(configuration: Configuration) -> None:
    target = configuration.settings.target
    for name in ("target.resident", "target.split.layers"):
        if (value := configuration.value(name)) != "auto":
            text = f"{name} = {value!r}: calibrate measures layers one by one; leave it out"
            raise SettingsError(text)
    if target.weights == BLOCKS and (device := beside_cpu(configuration)):
        text = f"layers on {device} are measured with random weights"
        raise SettingsError(f"{text}, not with target.weights = {BLOCKS!r}")
    if target.model:
        folder = Path(target.model).expanduser()
        there = folder.exists()
        if (there or is_path(target.model)) and not (folder / "config.json").is_file():
            text = f"the target model {target.model} has no config.json"
            raise CheckpointError(f"{text}: name a folder that has one, or a hub id")
        if not there:
            check_source("target", target.model)
    if _has_draft(configuration):
        check_draft(configuration.settings)


def _has_draft(configuration: Configuration) -> bool:
    """True if there is a draft to measure: a substitute, an MTP layer, a named small model or
    head, or the embedded draft of the embedded target."""
    draft = configuration.settings.draft
    return draft.kind in ("mtp", "substitute") or (
        draft.kind in ("auto", "small", *HEAD_KINDS)
        and bool(draft.model or not configuration.settings.target.model)
    )


def _draft_arguments(configuration: Configuration) -> list[str]:
    """The settings of the draft; a head or a substitute reads the target's weights, in its
    context."""
    target = configuration.settings.target
    named = {f"--{name}": getattr(target, name.removeprefix("target.")) for name in TARGETS_OWN}
    return [
        *configuration.arguments("draft"),
        *(f"{flag}={value}" for flag, value in named.items() if value not in ("", "auto")),
    ]


def _keep_target(
    profile: Path, key: object, calibration: Calibration, found: dict[str, Any]
) -> None:
    read, parts = found["reading"], found["device"]
    _keep(profile, key, lambda entry: entry.having(calibration))
    if read is not None:
        _keep(profile, key, lambda entry: entry.having(read_found(ReadingCosts, read)))
    if parts is not None:
        _keep(profile, key, lambda entry: entry.having(read_found(DeviceCosts, parts)))


def _keep_nodes(target: TargetSettings, both: Sequence[dict[str, Any]]) -> None:
    """Save the costs of a target on one memory node and spread over all in the profile file, for
    target.numa = 'auto'."""
    if (profile := writable_profile_path()) is None:
        return
    costs = [read_found(Calibration, found["calibration"]) for found in both]
    for found, calibration in zip(both, costs, strict=True):
        _keep(profile, found["key"], partial(Entry.having, costs=calibration))
    times = node_times(target, read_topology(), *costs)
    rewrite_profile(profile, lambda known: known.holding(times))


def _keep(profile: Path, key: object, change: Callable[[Entry], Entry]) -> None:
    update_profile(profile, ProfileKey.model_validate(key), change)


def _measure_both(
    configuration: Configuration, contexts: Sequence[int], seconds: float
) -> tuple[dict[str, Any], dict[str, Any] | None, list[dict[str, Any]]]:
    """Return the results for the target, for the draft if there is one, and for the target on one
    memory node and on all of them if both were measured."""
    target = configuration.settings.target
    place = layout_for(target)
    long = f"--seconds={seconds}"
    lengths = [f"--context={length}" for length in contexts]
    ours = [long, *lengths, *configuration.arguments("target")]
    with Supervisor() as supervisor, progress_bar(PERCENT, "%") as step:
        found, spread = _measure(supervisor, "target", place.target, ours, step), []
        by_kernels = found["backends"]["backend"] == "kernels"
        if by_kernels and may_be_sharded(target, read_topology()):
            other = other_layout(target, read_topology(), place).target
            both = [{**found}, _measure(supervisor, "target", other, ours, step)]
            spread = both if other.shards else both[::-1]
        if not _has_draft(configuration):
            return found, None, spread
        drafts = [long, *_draft_arguments(configuration)]
        return found, _measure(supervisor, "draft", place.draft, drafts, step), spread


def _measure(
    supervisor: Supervisor,
    role: Role,
    place: Place,
    arguments: Sequence[str],
    step: Callable[[str], None],
) -> dict[str, Any]:
    """Run the measurement for `role` in a process bound to `place`, and return its results."""
    nodes, module = format_numbers(place.nodes), "dovetail.launch.machine.measurement"
    where = [f"--role={role}", f"--cores={place.cores_text}", f"--memory-nodes={nodes}"]
    name = f"measurement of the {role}"
    child = supervisor.start(name, [*where, *arguments], module=module, reads=True)
    assert child.process.stdout is not None
    shown = 0
    for line in child.process.stdout:
        if not line.endswith(b"\n"):  # its incomplete last line: it was killed
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
