"""`dovetail swap`: starts a worker on standby, or waits for one on another machine, and requests
that it replace another while requests run. Afterwards it outlives this command; its output goes to
a file in the runtime directory."""

import json
import shlex
import socket
from collections.abc import Collection, Sequence
from typing import Any

import click

from dovetail.launch.console.help import HelpCommand, connect_option, json_option, rare
from dovetail.launch.console.terminal import leaves_the_machine, note
from dovetail.launch.files.directory import WorkerNote, announcements
from dovetail.launch.machine.fit import check_memory, nodes_of
from dovetail.launch.processes.connection import find_coordinator
from dovetail.launch.processes.preflight import check_draft, check_target
from dovetail.launch.processes.replacement import (
    Change,
    Expected,
    Newcomer,
    leaver,
    restarted,
    serving,
    summary_of,
    where,
)
from dovetail.launch.processes.stack import ROLES, SECTIONS, Played, layout_of, worker_arguments
from dovetail.launch.processes.worker import (
    STUCK,
    before_of,
    last_before,
    noted_place,
    values_of,
)
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import BASIC, settings_flags
from dovetail.protocol.errors import DovetailError, LinkError, UserError
from dovetail.protocol.messages import Reported, Role, WorkerState
from dovetail.protocol.settings import HEAD_KINDS, TARGETS_OWN
from dovetail.workers.models.checkpoints.gguf.view import FILE

EVERYWHERE = ("//0.0.0.0:", "//[::]:")
MODELS: dict[Role, tuple[str, ...]] = {
    "target": ("target.model",),
    "draft": ("draft.model", "draft.kind"),
}
"""Role -> the settings that name its model."""
PLACED = ("target.device", "target.threads", "target.numa", "draft.device")
"""Settings that determine where a worker runs."""
KINDS_OWN = (
    *("draft.weights", "draft.share", "draft.contrast", "draft.head_rows"),
    "draft.pickled",
)
"""Settings that another draft model or kind may not support."""
LOCAL = (*PLACED, "target.isa", "draft.isa", "memory.", STUCK)
"""Settings that may not apply on another machine."""


@click.command(cls=HelpCommand)
@click.option(
    "--role",
    type=click.Choice(["draft", "target", "unified"]),
    required=True,
    help="The worker's role; unified: both, in one process.",
)
@click.option(
    "--replace",
    "replaced",
    metavar="WORKER",
    help="The worker to replace, by name or pid.  [default: the only one of the role, if "
    "there is one]",
)
@click.option("--beside", is_flag=True, help="Replace no worker: the new one is added.")
@rare("--name", help="Name of the new worker in `dovetail status`.  [default: one that is free]")
@click.option(
    "--print",
    "elsewhere",
    is_flag=True,
    help="Start nothing: print the command for another machine, and wait for that worker.",
)
@connect_option()
@json_option()
@settings_flags(
    "target",
    "draft",
    "memory",
    "cache",
    "coordinator.keys",
    "coordinator.answer_s",
    "coordinator.stuck_s",
    shown=(*BASIC, "draft.device", "coordinator.keys"),
)
def command(
    configuration: Configuration,
    role: Played,
    replaced: str | None,
    beside: bool,
    name: str | None,
    elsewhere: bool,
    connect: str | None,
    as_json: bool,
) -> None:
    """Replace a worker by one with these settings, while requests run.

    Settings that are not given are taken from the replaced worker, or the last one that left, if it
    ran on this machine; otherwise name the model. A target that would compute other bytes is
    refused unless the setting that differs is given.

    The new worker is tested with short sessions, then gets all new sessions and takes over running
    ones: all sessions of a draft; those of a target one by one if it computes the same bytes (with
    move = any at the coordinator: if it has the same vocabulary). Other sessions finish where they
    are. Then the old worker ends. If the new one fails, it is stopped, the old one stays, and the
    exit code is 1. No request fails because of a swap. A process with both roles replaces the
    target first, then the draft.
    """
    _check_choice(configuration, role, replaced, beside=beside)
    if role == "unified":
        configuration = configuration.over(
            "--role unified",
            {"draft.share": True}
            | ({} if configuration.settings.draft.model else {"draft.kind": "substitute"}),
        )
    parts: tuple[Role, ...] = ("target", "draft") if role == "unified" else (role,)
    with find_coordinator(configuration, connect, role="operator") as client:
        state = client.status()
        given = connect is not None and leaves_the_machine(connect)
        way = connect if connect is not None and given else state.address
        old = {part: None if beside else leaver(state.workers, part, replaced) for part in parts}
        asked = {option for option in configuration.origins if configuration.given(option)}
        addresses = {state.address, way}
        own = any(option.startswith((*ROLES, "memory.")) for option in asked)
        alike = old[parts[0]] is None and not (beside or elsewhere or name or own)
        if alike and (back := restarted(client, parts[0])) is not None:
            again = f"`dovetail serve` has restarted {back.name} (pid {back.pid})"
            click.echo(json.dumps(summary_of(back, None))) if as_json else note(again)
            return
        before, whose = settings_before(configuration, parts[0], old[parts[0]], state, addresses)
        name = _name(state.workers, role, name, old[parts[0]])
        reads = None
        if parts == ("draft",):
            target = serving(state.workers, "target")
            reads = before_of(target) if target is not None else last_before(addresses, "target")
        configuration = as_before(configuration, parts[0], before, reads, elsewhere=elsewhere)
        change = Change(client, role, name, old, Expected(whose, asked), beside=beside)
        if elsewhere:
            line = _command_for_another_machine(configuration, role, name, way)
            done = _wait_for_another_machine(change, name, line, to_stderr=as_json)
        else:
            _check_models(configuration, role)
            keys = configuration.settings.coordinator.keys or announced_keys(state.address)
            bound = before is not None and role != "unified" and asked.isdisjoint(PLACED)
            place = noted_place(before) if before is not None and bound else None
            done = _start_here(change, configuration, role, name, way, keys, place)
    if as_json:
        both = role == "unified"
        told = {"pid": change.newcomers["target"].pid, **done} if both else done[role]
        click.echo(json.dumps(told))
    for words in () if as_json else change.words:
        note(words)


def _check_choice(
    configuration: Configuration, role: Played, replaced: str | None, *, beside: bool
) -> None:
    if beside and replaced is not None:
        raise UserError(f"--beside keeps every worker: leave out either it or --replace {replaced}")
    _check_flags(configuration, role)
    if role == "draft" and configuration.settings.draft.kind == "none":
        raise UserError("--draft none is not a worker: use `dovetail drain WORKER`")
    if role == "unified" and replaced is not None:
        raise UserError(f"--role unified replaces two workers: leave out --replace {replaced}")


def _check_models(configuration: Configuration, role: Played) -> None:
    if role != "draft":
        check_target(configuration.settings)
    if role != "target":
        check_draft(configuration.settings)
    nodes = nodes_of(layout_of(configuration.settings).target) if role == "target" else ()
    check_memory(configuration.settings, (role,), nodes=nodes)


def _wait_for_another_machine(
    change: Change, name: str, line: str, *, to_stderr: bool
) -> dict[str, Any]:
    click.echo(line, err=to_stderr)
    note(
        "FOLDER contains its NAME.key and coordinator.pub; the model has the same name as here; "
        "device, threads and memory that are not named are chosen there"
    )
    note(f"waiting for {name}; Ctrl-C stops waiting")
    change.wait(None)
    return change.make()


def _start_here(
    change: Change,
    configuration: Configuration,
    role: Played,
    name: str,
    address: str,
    keys: str,
    place: Sequence[str] | None,
) -> dict[str, Any]:
    """Start the worker on this machine and complete the replacement. It ends with us unless it has,
    or may have, sessions. `place`: the flags that bind it; None: use the settings."""
    layout = layout_of(configuration.settings) if place is None else None
    flags = worker_arguments(configuration, role, address, layout)
    kept = [flag for flag in flags if not flag.startswith("--name=")]
    own = [*(place or ()), *([f"--keys={keys}"] if keys else [])]
    arguments = [*kept, *own, f"--name={name}", "--standby", "--own-log"]
    with Newcomer(arguments, name) as process:
        child = process.start()
        try:
            change.wait(child)
            done = change.make()
        except BaseException as error:
            if change.is_begun(interrupted=isinstance(error, KeyboardInterrupt | SystemExit)):
                process.stays()
            elif isinstance(error, LinkError):
                raise DovetailError(
                    f"{error} during the swap, and {name} is stopped: swap again once it is back; "
                    "`dovetail status` shows which workers are there"
                ) from None
            raise
        process.stays()
    return done


def free_name(workers: Sequence[WorkerState], role: Played) -> str:
    taken = {worker.name for worker in workers}
    if role == "unified":
        taken = {name.removesuffix("-target").removesuffix("-draft") for name in taken}
    numbered = (f"{role}-{number}" for number in range(2, len(taken) + 3))
    return next(name for name in (role, *numbered) if name not in taken)


def _name(
    workers: Sequence[WorkerState], role: Played, name: str | None, old: WorkerState | None
) -> str:
    if name is None:
        return free_name(workers, role)
    for worker in workers:
        if worker.name == name and worker is not old:
            raise UserError(f"--name {where(worker)} is taken: choose another")
    return name


def _check_flags(configuration: Configuration, role: Played) -> None:
    if role == "unified":
        return
    other = "draft" if role == "target" else "target"
    read = TARGETS_OWN if role == "draft" else ()
    typed = (
        name
        for name, origin in configuration.origins.items()
        if origin == f"--{name}" and name.split(".")[0] == other and name not in read
    )
    if (idle := next(typed, None)) is not None:
        own = f"{role}.{idle.partition('.')[2]}"
        instead = f", or write --{own}" if own in configuration.origins else ""
        raise UserError(
            f"--{idle} is a setting of a {other}, not of a {role}: leave it out{instead}"
        )


def settings_before(
    configuration: Configuration,
    role: Role,
    old: WorkerState | None,
    state: Reported,
    addresses: Collection[str],
) -> tuple[WorkerNote | None, str]:
    """Return the settings and fingerprint of the replaced worker, of the one that the new worker
    joins, or of the last one; `UserError` if they are unknown and no model is given."""
    model = old or serving(state.workers, role)
    before = before_of(model) if model is not None else last_before(addresses, role)
    if before is None and not any(configuration.given(name) for name in MODELS[role]):
        whose = f"of {model.name} on {model.host}" if model is not None else f"of an earlier {role}"
        raise UserError(
            f"the settings {whose} are not known on this machine: give the model with --{role} "
            "MODEL"
        )
    noted = before.fingerprint if before else ""
    return before, noted if model is None else model.fingerprint


def as_before(
    configuration: Configuration,
    role: Role,
    before: WorkerNote | None,
    reads: WorkerNote | None,
    *,
    elsewhere: bool,
) -> Configuration:
    """Return the settings, completed by those of the worker `before`, and a draft's by the target
    that it `reads`; not those of another kind of draft, or of this machine for one `elsewhere`."""
    named = any(configuration.given(name) for name in MODELS[role])
    sections = (*SECTIONS[role], "memory", STUCK)
    known = values_of(before) if before is not None else {}
    values = {n: v for n, v in known.items() if n.startswith(sections)}
    if reads is not None:
        values |= {n: v for n, v in values_of(reads).items() if n in TARGETS_OWN}
    elif role == "draft" and not configuration.given("target.model"):
        kind = configuration.given("draft.kind") and configuration.settings.draft.kind
        if kind in (*HEAD_KINDS, "mtp", "substitute"):
            raise UserError(
                f"a {kind} draft reads its target, whose model is not known here: give it with "
                "--target MODEL"
            )
    own = (*MODELS[role], *(KINDS_OWN if role == "draft" else ())) if named else ()
    if named and values.get("target.weights") == FILE:
        own = (*own, "target.weights")  # its blocks belong to another file
    wanted = {
        name: value
        for name, value in values.items()
        if not (configuration.given(name) or name in own or (elsewhere and name.startswith(LOCAL)))
    }
    return configuration.over("as the present workers have it", wanted)


def announced_keys(address: str) -> str:
    return next((found.keys for found in announcements() if found.address == address), "")


def _command_for_another_machine(
    configuration: Configuration, role: Played, name: str, address: str
) -> str:
    """Return the command line for the other machine; `UserError` if no other machine can reach the
    coordinator."""
    if not leaves_the_machine(address):
        raise UserError(
            f"no other machine reaches {address}: start the coordinator with --listen "
            "tcp://HOST:PORT --keys FOLDER"
        )
    for anywhere in EVERYWHERE:
        address = address.replace(anywhere, f"//{socket.gethostname()}:")
    sections = ("target", "draft") if role == "draft" else SECTIONS[role]
    settings = [
        flag
        for flag in configuration.typed(*sections)
        if configuration.given(flag.removeprefix("--").partition("=")[0])
    ]
    place = ("--standby", f"--connect={address}", "--keys=FOLDER")
    return shlex.join(["dovetail", "worker", f"--role={role}", f"--name={name}", *place, *settings])
