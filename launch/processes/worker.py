"""A worker in this process: its threads, its model, and the loop that serves a coordinator."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dovetail.launch.console.network_notice import leaves_the_machine, of_worker
from dovetail.launch.console.terminal import QUANTISED, counted, counting_bar, note
from dovetail.launch.files.directory import (
    only_announcement,
    substitutes_path,
    writable_profile_path,
)
from dovetail.launch.machine.binding import Place
from dovetail.launch.machine.cores import lay_out_here, parse_cores, parse_nodes
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes.child import (
    end_undisturbed,
)
from dovetail.launch.processes.preflight import (
    estimated_bytes,
)
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.embedded import with_draft, with_target
from dovetail.protocol.errors import CheckpointError, RequestError, UserError
from dovetail.protocol.links import open_link
from dovetail.protocol.links.sockets import CONNECT_TIMEOUT_S
from dovetail.protocol.settings import TargetSettings

if TYPE_CHECKING:
    from dovetail.workers.serving.registration import Worker


Role = Literal["draft", "target", "unified"]
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


TOLD = "-"
"""The address of a worker that is told it on standard input."""


def await_address(configuration: Configuration, role: Role | Literal["unified"]) -> str:
    """Return the line of standard input that says where the coordinator is; what a worker imports
    is imported before it is read, so that both begin at the same time."""
    if role != "draft" or configuration.settings.draft.kind != "ngram":
        import_module("dovetail.workers.loop")
        import_module("dovetail.workers.models.loading")
    address = sys.stdin.readline().strip()
    if not address:  # whoever started us ends
        sys.exit(0)
    return address


def announced(configuration: Configuration) -> tuple[str, Configuration]:
    """Return where the only coordinator of this user is, and the settings with its keys;
    `UserError` if there is none."""
    if (found := only_announcement()) is None:
        raise UserError(
            "you have no coordinator running on this machine: start one with `dovetail "
            "coordinator`, or name one with --connect ADDRESS"
        )
    keys = configuration.settings.coordinator.keys or found.keys
    return found.address, configuration.over("the coordinator's", {"coordinator.keys": keys})


def place_of(
    role: Role, target: TargetSettings, cores: str | None, memory_nodes: str
) -> Place | None:
    """Return where this worker is to be bound: where it is told; else a target on a machine of
    several nodes to those that its settings mean; None: nowhere."""
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


def serve_role(
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
    """Return whether the coordinator let the worker go. Connect first: a wrong address or key is
    told at once, not after a model has been loaded."""
    settings = configuration.settings.coordinator
    keys = Path(settings.keys) if settings.keys else None
    began = time.monotonic()
    link = open_link(connect, keys=keys, role=role)
    answer_s = min(CONNECT_TIMEOUT_S, max(ANSWER_S, ANSWER_FACTOR * (time.monotonic() - began)))
    try:
        from dovetail.workers.loop import serve  # torch comes in here, after the binding
        from dovetail.workers.progress import Watchdog, hearing_loads
        from dovetail.workers.serving.loading import Telling
        from dovetail.workers.serving.registration import (
            Reconnecting,  # torch comes in here, after the binding
        )

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


def serve_both(
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
    """Serve in a process with both roles: each has a link of its own and a thread, the target this
    one."""
    settings = configuration.settings
    keys = Path(settings.coordinator.keys) if settings.coordinator.keys else None
    parts: tuple[Role, Role] = ("target", "draft")
    began = time.monotonic()
    links = {part: open_link(connect, keys=keys, role=part) for part in parts}
    answer_s = min(CONNECT_TIMEOUT_S, max(ANSWER_S, ANSWER_FACTOR * (time.monotonic() - began)))
    over = threading.Event()
    try:
        from dovetail.workers.loop import serve  # torch comes in here, after the binding
        from dovetail.workers.progress import Watchdog, hearing_loads
        from dovetail.workers.serving.loading import Telling
        from dovetail.workers.serving.registration import (
            Reconnecting,  # torch comes in here, after the binding
        )
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
    """Return how the worker of this role is opened: (name, threads) -> worker."""
    target, profile = with_target(configuration.settings.target), writable_profile_path()
    if role == "target":
        from dovetail.workers.serving.open_target import open_target_worker

        _check_text(target.model)
        memory = configuration.settings.memory
        return lambda name, threads: open_target_worker(
            target, name=name, threads=threads, profile=profile, memory=memory
        )
    draft = configuration.settings.draft
    if draft.kind == "none":
        raise UserError(
            "draft.kind = 'none' is not a worker: leave the draft worker out to decode with the "
            "target alone"
        )
    draft = with_draft(draft)
    from dovetail.workers.drafters.registry import open_draft_worker

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
    from dovetail.runtime.text.tokenizer import TextCodec
    from dovetail.workers.models.checkpoints.hub import find_folder
    from dovetail.workers.models.checkpoints.tokenizer import read_tokenizer

    folder = find_folder(source)
    try:
        TextCodec(*read_tokenizer(folder))
    except RequestError as error:
        raise CheckpointError(f"{folder}: {error}") from None
