"""`dovetail worker`: one draft or target worker on cores of its own.

Binds cores and sets thread counts before torch is imported - threads inherit the binding, and torch
reads the counts once - and then hands over to the worker's loop. Knows where the embedded models
are; what a model is, the worker knows.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from dovetail.launch.console.help import Rare
from dovetail.launch.console.logs import keep_stderr_short, remove_stderr
from dovetail.launch.console.terminal import QUANTISED, counted, counting_bar, note
from dovetail.launch.console.travels import leaves_the_machine, of_worker
from dovetail.launch.files.directory import (
    only_announcement,
    substitutes_path,
    writable_profile_path,
)
from dovetail.launch.machine.binding import Binding, Place, bind
from dovetail.launch.machine.cores import lay_out_here, parse_cores, parse_nodes
from dovetail.launch.machine.fit import check_memory, only_node
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes.child import (
    LET_GO,
    end_undisturbed,
    end_when_told,
    end_with,
    show_stacks_when_asked,
)
from dovetail.launch.processes.preflight import (
    check_draft,
    check_target,
    check_unified,
    estimated_bytes,
)
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.embedded import with_draft, with_target
from dovetail.launch.settings.flags import SettingsCommand, settings_flags
from dovetail.protocol.errors import CheckpointError, RequestError, UserError
from dovetail.protocol.links import CONNECT_TIMEOUT_S, open_link
from dovetail.protocol.settings import TargetSettings

if TYPE_CHECKING:
    from dovetail.workers.loop import Worker

Role = Literal["draft", "target", "unified"]

RECONNECT_S = 300.0
USER_ERROR = 2
ANSWER_S, ANSWER_FACTOR = 1.0, 3.0
"""A coordinator that is looked for answers within so long, or so many times as long as it took to
connect at first, or is tried again: a handshake takes three and a half round trips."""

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


@click.command(cls=SettingsCommand)
@click.option(
    "--role",
    type=click.Choice(["draft", "target", "unified"]),
    required=True,
    help="What this worker does; unified: both.",
)
@click.option(
    "--connect",
    metavar="ADDRESS",
    help="The coordinator: ipc://PATH or tcp://HOST:PORT.  [default: the only one of this user]",
)
@click.option(
    "--cores", metavar="LIST", help="Cores to bind to, such as 0,2-3.  [default: not bound]"
)
@click.option(
    "--memory-nodes",
    metavar="LIST",
    default="",
    cls=Rare,
    help="Memory nodes to take memory from, with --cores.  [default: not bound]",
)
@click.option(
    "--reconnect-s",
    type=click.FloatRange(min=0.0),
    default=RECONNECT_S,
    show_default=True,
    cls=Rare,
    help="How long to look for a coordinator that was lost; the model stays loaded meanwhile.",
)
@click.option("--name", help="Name of this worker in `dovetail status`.  [default: its role]")
@click.option(
    "--standby",
    is_flag=True,
    help="Get no sessions until `dovetail swap` puts this worker in place.",
)
@click.option(
    "--own-log",
    is_flag=True,
    hidden=True,
    help="stderr is a file that is read by nobody else: it is kept short.",
)
@click.option(
    "--parent", type=int, hidden=True, help="End when this process, which started us, ends."
)
@settings_flags(
    "target",
    "draft",
    "memory",
    "coordinator.keys",
    "coordinator.stuck_s",
    shown=("draft.device", "coordinator.keys"),
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
    its coordinator lets it go.

    Without --cores a target is bound to its memory nodes (target.numa) if there are several or one
    is named; else nothing is bound, and it takes target.threads threads (auto: one less than there
    are cores); a draft on the CPU one, or where there are several nodes as many as one has cores.

    A draft that is a head of its target's takes the target's embedding from target.model on this
    machine, and a substitute all of it. A unified worker has a substitute for its draft, which
    shares embedding, norms, head, resident layers, keys and values with the target.
    """
    if parent is not None:
        end_with(parent)
    end_when_told()
    show_stacks_when_asked()
    if connect is None:
        connect, configuration = _announced(configuration)
    for check in {
        "target": [check_target],
        "draft": [check_draft],
        "unified": [check_target, check_unified],
    }[role]:
        check(configuration.settings)
    place = place_of(role, configuration.settings.target, cores, memory_nodes)
    if parent is None:  # else it was looked at before any process was started
        check_memory(configuration.settings, (role,), node=only_node(place))
    binding = bind(place) if place is not None else Binding("none", Place(()))
    threads = thread_count(role, configuration.settings.target, place)
    if own_log:
        keep_stderr_short()
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    say = note if parent is None else lambda _: None
    serve = _serve_both if role == "unified" else _serve
    let_go = serve(
        configuration,
        role,
        connect,
        reconnect_s,
        name or role,
        threads,
        str(binding),
        say,
        standby=standby,
    )
    if let_go and own_log:
        remove_stderr()
    if let_go and parent is not None:
        sys.stderr.flush()
        os._exit(
            LET_GO
            # what an interpreter puts away takes seconds, in which whoever looks after us would
            # take us for stuck
        )


def _announced(configuration: Configuration) -> tuple[str, Configuration]:
    """Where the only coordinator of this user is, and the settings with its keys; `UserError` if
    there is none."""
    if (found := only_announcement()) is None:
        raise UserError(
            "no coordinator of yours is running on this machine: start one with `dovetail "
            "coordinator`, or name one with --connect ADDRESS"
        )
    keys = configuration.settings.coordinator.keys or found.keys
    return found.address, configuration.over("the coordinator's", {"coordinator.keys": keys})


def place_of(
    role: Role, target: TargetSettings, cores: str | None, memory_nodes: str
) -> Place | None:
    """Where this worker is to be bound: where it is told; else a target on a machine of several
    nodes to those that its settings mean; None: nowhere."""
    if cores is not None:
        return Place(parse_cores(cores), parse_nodes(memory_nodes))
    if memory_nodes:
        raise UserError(
            "--memory-nodes goes with --cores: name the cores too, or leave both out and set "
            "target.numa"
        )
    if role == "draft":  # what the settings say of the target may hold for another machine
        return None
    place = lay_out_here(
        numa=target.numa, threads=target.threads, target_bytes=estimated_bytes(target)
    ).target
    return place if place.nodes or target.numa not in ("auto", "off") else None


def thread_count(role: Role, target: TargetSettings, place: Place | None) -> int:
    """Threads for this worker: what the settings say, else one for each core that it is bound to,
    else what the layout of one machine would give it."""
    if role != "draft" and target.threads != "auto":
        if place is not None and target.threads > len(place.cores):
            raise UserError(
                f"target.threads = {target.threads} is more than the cores "
                f"{format_numbers(place.cores)} that it is bound to: leave it out"
            )
        return target.threads
    if place is not None:
        return len(place.cores)
    return len(
        lay_out_here(numa=target.numa).target.cores
        if role != "draft"
        else lay_out_here().draft.cores
    )


def _serve(
    configuration: Configuration,
    role: Role,
    connect: str,
    reconnect_s: float,
    name: str,
    threads: int,
    binding: str,
    say: Callable[[str], None],
    *,
    standby: bool,
) -> bool:
    """Whether the coordinator let the worker go. Connect first: a wrong address or key is told at
    once, not after a model has been loaded."""
    settings = configuration.settings.coordinator
    keys = Path(settings.keys) if settings.keys else None
    began = time.monotonic()
    link = open_link(connect, keys=keys, role=role)
    answer_s = min(CONNECT_TIMEOUT_S, max(ANSWER_S, ANSWER_FACTOR * (time.monotonic() - began)))
    try:
        from dovetail.workers.loop import (
            Reconnecting,
            serve,
        )  # torch comes in here, after the binding
        from dovetail.workers.progress import Watchdog, hearing_loads
        from dovetail.workers.serving.loading import Telling

        with hearing_loads(
            Telling(
                link,
                name,
                ("target" if role == "target" else "draft",),
                model_of(configuration, role),
            )
        ):
            worker = _opener(configuration, role)(name, threads)
        load_s = time.monotonic() - began
        say(
            f"{role} worker {name} is loaded, {counted(threads, 'thread')}, bound: {binding}; "
            f"it serves {connect}"
        )
        if leaves_the_machine(connect):
            say(of_worker(worker.hello(0), connect))
        again = partial(open_link, connect, keys=keys, role=role, timeout_s=answer_s)
        reconnecting = Reconnecting(
            again, reconnect_s, lambda news: say(f"{role} worker {name}: {news}")
        )
        watchdog = Watchdog(f"{role} worker {name}", settings.stuck_s)
        watchdog.start()
        again_if = reconnecting if reconnect_s else None
        let_go = serve(
            link,
            worker,
            binding=binding,
            standby=standby,
            load_s=load_s,
            reconnecting=again_if,
            watchdog=watchdog,
        )
        end_undisturbed()
        say(f"{role} worker {name} ends: its coordinator {_parted(let_go)}")
        return let_go
    finally:
        link.close()


def _parted(let_go: bool) -> str:
    """Return what a worker's coordinator did when the worker ended."""
    return "released it" if let_go else "disconnected"


def _serve_both(
    configuration: Configuration,
    role: Role,
    connect: str,
    reconnect_s: float,
    name: str,
    threads: int,
    binding: str,
    say: Callable[[str], None],
    *,
    standby: bool,
) -> bool:
    """The same for a process with both roles: each has a link of its own and a thread, the target
    this one."""
    settings = configuration.settings
    keys = Path(settings.coordinator.keys) if settings.coordinator.keys else None
    parts: tuple[Role, Role] = ("target", "draft")
    began = time.monotonic()
    links = {part: open_link(connect, keys=keys, role=part) for part in parts}
    answer_s = min(CONNECT_TIMEOUT_S, max(ANSWER_S, ANSWER_FACTOR * (time.monotonic() - began)))
    over = threading.Event()
    try:
        from dovetail.workers.loop import (
            Reconnecting,
            serve,
        )  # torch comes in here, after the binding
        from dovetail.workers.progress import Watchdog, hearing_loads
        from dovetail.workers.serving.loading import Telling
        from dovetail.workers.unified import open_unified

        target, draft, profile = (
            with_target(settings.target),
            settings.draft,
            writable_profile_path(),
        )
        _check_text(target.model)
        with (
            counting_bar(QUANTISED) as tell,
            hearing_loads(Telling(links["target"], f"{name}-target", ("target",), target.model)),
        ):
            opened = open_unified(
                target,
                draft,
                name=name,
                threads=threads,
                memory=settings.memory,
                profile=profile,
                cache=substitutes_path(),
                tell=tell,
            )
        workers, load_s = dict(zip(parts, opened, strict=True)), time.monotonic() - began
        say(
            f"unified worker {name} is loaded, {counted(threads, 'thread')}, bound: {binding}; "
            f"it serves {connect}"
        )
        if leaves_the_machine(connect):
            say("\n".join(of_worker(worker.hello(0), connect) for worker in opened))

        def work(part: Role) -> bool:
            again = partial(open_link, connect, keys=keys, role=part, timeout_s=answer_s)
            reconnecting = Reconnecting(
                again, reconnect_s, lambda news: say(f"unified worker {name}, {part}: {news}")
            )
            watchdog = Watchdog(f"unified worker {name}, {part}", settings.coordinator.stuck_s)
            watchdog.start()
            again_if = reconnecting if reconnect_s else None
            return serve(
                links[part],
                workers[part],
                binding=binding,
                standby=standby,
                load_s=load_s,
                reconnecting=again_if,
                watchdog=watchdog,
            )

        beside = Beside(partial(work, "draft"), over)
        beside.start()
        let_go = work("target")
        end_undisturbed()
        beside.join(ANSWER_S)
        say(f"unified worker {name} ends: its coordinator {_parted(let_go)}")
        return let_go
    finally:
        over.set()
        for link in links.values():
            link.close()


class Beside(threading.Thread):
    """The second of two roles; what ends it unasked, before the first one is over, is said, and
    ends the process."""

    def __init__(self, work: Callable[[], bool], over: threading.Event) -> None:
        super().__init__(name="draft", daemon=True)
        self._work, self._over = work, over

    def run(self) -> None:
        try:
            self._work()
        except UserError as error:
            note(f"dovetail: {error}")
            os._exit(USER_ERROR)
        except BaseException:
            if self._over.is_set():  # its link was closed
                return
            traceback.print_exc()
            os._exit(1)


def _opener(configuration: Configuration, role: Role) -> "Callable[[str, int], Worker]":
    """How the worker of this role is opened: (name, threads) -> worker."""
    target, profile = with_target(configuration.settings.target), writable_profile_path()
    if role == "target":
        from dovetail.workers.target import open_target_worker

        _check_text(target.model)
        memory = configuration.settings.memory
        return lambda name, threads: open_target_worker(
            target, name=name, threads=threads, profile=profile, memory=memory
        )
    draft = configuration.settings.draft
    if draft.kind == "none":
        raise UserError(
            "draft.kind = 'none' is no worker: leave the draft worker out to decode with the "
            "target alone"
        )
    draft = with_draft(draft)
    from dovetail.workers.draft import open_draft_worker

    def opened(name: str, threads: int) -> "Worker":
        with counting_bar(QUANTISED) as tell:
            return open_draft_worker(
                draft,
                name=name,
                threads=threads,
                target=target.model,
                inflate=target.inflate,
                profile=profile,
                cache=substitutes_path(),
                tell=tell,
            )

    return opened


def model_of(configuration: Configuration, role: Role) -> str:
    """The model that a worker of this role loads, as the settings name it."""
    settings = configuration.settings
    if role == "draft" and settings.draft.kind != "substitute":
        return with_draft(settings.draft).model
    return with_target(settings.target).model


def _check_text(source: str) -> None:
    """`CheckpointError` for a tokenizer or a chat template that the coordinator would refuse,
    before the weights are read."""
    from dovetail.runtime.text import TextCodec
    from dovetail.workers.models.checkpoints.checkpoint import read_tokenizer
    from dovetail.workers.models.checkpoints.hub import find_folder

    folder = find_folder(source)
    try:
        TextCodec(*read_tokenizer(folder))
    except RequestError as error:
        raise CheckpointError(f"{folder}: {error}") from None
