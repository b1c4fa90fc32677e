"""`dovetail worker`: one worker on its cores. Cores and thread counts are set before torch is
imported, which reads them once."""

import os
import sys
from contextlib import nullcontext

import click

from dovetail.launch.console.help import HelpCommand, Number, connect_option, parent_option, rare
from dovetail.launch.console.logs import keep_stderr_short, remove_stderr
from dovetail.launch.console.terminal import note
from dovetail.launch.machine.fit import check_memory, nodes_of
from dovetail.launch.machine.sharding import choice_of
from dovetail.launch.machine.topology import Binding, Place, bind
from dovetail.launch.processes.child import LET_GO, ending_at_once, handle_signals, name_process
from dovetail.launch.processes.connection import call_model, only_coordinator
from dovetail.launch.processes.notification import Notifier
from dovetail.launch.processes.nursery import thread_environment
from dovetail.launch.processes.preflight import check_draft, check_target, check_unified
from dovetail.launch.processes.worker import (
    TOLD,
    Role,
    WorkerProcess,
    await_address,
    flags_of,
    model_of,
    parts_of,
    place_of,
    thread_count,
)
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import BASIC, settings_flags
from dovetail.protocol.settings import DRAFT_KINDS
from dovetail.workers.models.checkpoints.gguf.view import spelled

RECONNECT_S = 300.0


@click.command(cls=HelpCommand)
@click.option(
    "--role",
    type=click.Choice(["draft", "target", "unified"]),
    required=True,
    help="The worker's role; unified: both.",
)
@connect_option(
    "The coordinator: ipc://PATH or tcp://HOST:PORT; -: a "
    "line of standard input.  "
    "[default: the only one of this user]"
)
@click.option(
    "--cores",
    metavar="LIST",
    help="Cores to bind to, such as 0,2-3; for a target in two shards 0-3/4-7.  "
    "[default: not bound]",
)
@rare(
    "--memory-nodes",
    metavar="LIST",
    default="",
    help="Memory nodes to take memory from, with --cores; one for each shard.  "
    "[default: not bound]",
    show_default=False,
)
@rare(
    "--reconnect-s",
    type=Number(min=0.0),
    default=RECONNECT_S,
    help="How long to try to reach a lost coordinator; the model stays loaded meanwhile.",
)
@click.option("--name", help="Name of this worker in `dovetail status`.  [default: its role]")
@click.option(
    "--standby",
    is_flag=True,
    help="Wait on standby, without sessions, until `dovetail swap` promotes this worker.",
)
@click.option("--own-log", is_flag=True, hidden=True, help="stderr is a file; keep it short.")
@parent_option
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
    role: Role,
    connect: str | None,
    cores: str | None,
    memory_nodes: str,
    reconnect_s: float,
    name: str | None,
    standby: bool,
    own_log: bool,
    parent: int | None,
) -> None:
    """Run one draft or target worker by hand, or one process that is both, on any machine, until
    its coordinator dismisses it.

    Without --cores a target is bound to its memory nodes (target.numa) if there are several or one
    is named. Otherwise nothing is bound, and a target takes target.threads threads (auto: one fewer
    than there are cores). A draft on the CPU uses one thread, or, with several memory nodes, as
    many as one node has cores. A draft head reads its target's embedding from target.model on this
    machine, and a substitute reads all of it. The draft of a unified worker is a substitute, which
    shares embedding, norms, head, resident layers, keys and values with the target.
    """
    handle_signals(parent)
    notifier = Notifier(parts_of(role))
    if connect is None:
        connect, configuration = only_coordinator(configuration)
    for check in {
        "target": [check_target],
        "draft": [check_draft],
        "unified": [check_target, check_unified],
    }[role]:
        check(configuration.settings)
    target = configuration.settings.target
    place = place_of(role, target, cores, memory_nodes)
    if parent is None:  # otherwise it was checked before any process was started
        check_memory(configuration.settings, (role,), nodes=nodes_of(place))
    name_process(role, _model(configuration, role))
    binding = bind(place) if place is not None else Binding("none", Place(()))
    threads = thread_count(role, target, place)
    if own_log:
        keep_stderr_short()
    os.environ.update(thread_environment(threads))
    say = note if parent is None else lambda _: None
    if (
        role == "target"
        and cores is None
        and (words := choice_of(configuration.settings.target).words)
    ):
        say(words)
    with nullcontext() if parent is None else ending_at_once():
        if told := connect == TOLD:
            connect = await_address(configuration, role)
        drain = WorkerProcess(
            configuration,
            role,
            connect,
            reconnect_s,
            name or role,
            threads,
            binding,
            say,
            standby,
            notifier,
            flags_of(configuration, cores, memory_nodes),
            told,
        ).serve()
        if drain is None:
            return
        if own_log:
            remove_stderr()
        if drain.dismissed or parent is not None:
            sys.exit(LET_GO)


def _model(configuration: Configuration, role: Role) -> str:
    kind = configuration.settings.draft.kind
    if role == "draft" and not DRAFT_KINDS[kind].own_model:
        return kind
    return call_model(spelled(model_of(configuration, role))).removesuffix(".gguf")
