"""A worker in this process: its threads, its model, and the loop that serves a coordinator."""

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dovetail.launch.console.terminal import (
    QUANTISED,
    counted,
    counting_bar,
    leaves_the_machine,
    note,
    of_worker,
)
from dovetail.launch.files.directory import (
    WorkerNote,
    forget_worker,
    note_worker,
    substitutes_path,
    worker_notes,
    writable_profile_path,
)
from dovetail.launch.machine.cores import lay_out_here, parse_place
from dovetail.launch.machine.sharding import layout_for
from dovetail.launch.machine.topology import Binding, Place, format_numbers
from dovetail.launch.processes.child import end_undisturbed, pace, pace_less
from dovetail.launch.processes.notification import Notifier
from dovetail.launch.processes.nursery import import_at_once
from dovetail.launch.processes.preflight import check_text, text_here
from dovetail.launch.settings.catalog import SETTINGS
from dovetail.launch.settings.configure import Configuration, parse_setting
from dovetail.launch.settings.models import with_draft, with_target
from dovetail.protocol.errors import UserError
from dovetail.protocol.links import Link, open_link
from dovetail.protocol.links.sockets import CONNECT_TIMEOUT_S
from dovetail.protocol.messages import AHEAD, Drain, Open, WorkerState
from dovetail.protocol.settings import TargetSettings
from dovetail.workers import kernels
from dovetail.workers.models.checkpoints.gguf.view import resolved

if TYPE_CHECKING:
    from dovetail.workers.serving.registration import Worker


Part = Literal["draft", "target"]
Role = Part | Literal["unified"]
USER_ERROR = 2
ANSWER_S, ANSWER_FACTOR = 1.0, 3.0
"""Seconds to wait for a lost coordinator, or this multiple of the first connection's time."""

TOLD = "-"  # the address argument of a worker that reads its address from standard input
NOWHERE = Place(())


def await_address(configuration: Configuration, role: Role) -> str:
    """Return the coordinator's address from standard input, after importing the worker's modules,
    so that both start at the same time."""
    if role != "draft" or configuration.settings.draft.kind != "ngram":
        import_at_once(["dovetail.workers.loop", "dovetail.workers.models.loading"])
    address = sys.stdin.readline().strip()
    if not address:  # our parent ends
        sys.exit(0)
    return address


def place_of(
    role: Role, target: TargetSettings, cores: str | None, memory_nodes: str
) -> Place | None:
    """Return the cores and nodes for this worker: the given ones, else, for a target on a machine
    with several nodes, those of its settings; None: no binding."""
    if cores is not None:
        return parse_place(cores, memory_nodes)
    if memory_nodes:
        raise UserError("--memory-nodes needs --cores; or leave it out and set target.numa")
    if role == "draft":  # the target's settings may be for another machine
        return None
    place = layout_for(target).target
    return place if place.nodes or target.numa not in ("auto", "off") else None


def thread_count(role: Role, target: TargetSettings, place: Place | None) -> int:
    """Threads of this worker: those of the settings, else one per bound core, else those of the
    layout for one machine."""
    if role != "draft" and target.threads != "auto":
        if place is not None and target.threads > len(place.cores):
            raise UserError(
                f"target.threads = {target.threads} is more than its cores, "
                f"{format_numbers(place.cores)}"
            )
        return target.threads
    if place is not None:
        return len(place.cores)
    return len(layout_for(target).target.cores if role != "draft" else lay_out_here().draft.cores)


def parts_of(role: Role) -> tuple[Part, ...]:
    return ("target", "draft") if role == "unified" else (role,)


@dataclass(frozen=True)
class WorkerProcess:
    """This process as a worker of one role, or of both."""

    configuration: Configuration
    role: Role
    connect: str  # address of the coordinator
    reconnect_s: float  # how long to try to reach a lost coordinator
    name: str
    threads: int
    binding: Binding
    say: Callable[[str], None]
    standby: bool
    notifier: Notifier
    flags: Sequence[str]  # its settings and binding, for a worker that replaces it
    told: bool = False
    """True if the address is sent on stdin, by a command that has checked a local tokenizer."""

    @property
    def _title(self) -> str:
        return f"{self.role} worker {self.name}"

    def serve(self) -> Drain | None:
        """Return the Drain that dismissed the worker; None if the coordinator is lost. The worker
        connects first, so that a wrong address or key is reported before a model is loaded."""
        parts = parts_of(self.role)
        keys = self.configuration.settings.coordinator.keys
        folder = Path(keys) if keys else None
        began = time.monotonic()
        reach = partial(open_link, self.connect, keys=folder)
        links = {part: reach(role=part) for part in parts}
        answer_s = min(CONNECT_TIMEOUT_S, max(ANSWER_S, ANSWER_FACTOR * (time.monotonic() - began)))
        over, others = threading.Event(), dict[Part, SecondRole]()
        try:
            workers = self._load(links)
            load_s = time.monotonic() - began
            self.say(
                f"{self._title} is loaded, {counted(self.threads, 'thread')}, bound: "
                f"{self.binding}; it serves {self.connect}"
            )
            if leaves_the_machine(self.connect):
                self.say(
                    "\n".join(of_worker(one.hello(0), self.connect) for one in workers.values())
                )
            first, *works = (
                partial(
                    self._work,
                    links[part],
                    workers[part],
                    part,
                    partial(reach, role=part, timeout_s=answer_s),
                    load_s,
                )
                for part in parts
            )
            others |= {
                part: SecondRole(work, over) for part, work in zip(parts[1:], works, strict=True)
            }
            for thread in others.values():
                thread.start()
            drain = first()
            if drain is not None and not drain.dismissed:
                with suppress(OSError, UserError):  # there is no note
                    forget_worker(self.connect)
            end_undisturbed()
            for thread in others.values():
                thread.join(ANSWER_S)
            parted = "released it" if drain is not None else "disconnected"
            self.say(f"{self._title} ends: its coordinator {parted}")
            return drain
        finally:
            over.set()
            for part, link in links.items():
                if part not in others or not others[part].is_alive():
                    link.close()  # otherwise it belongs to its thread and ends with the process

    def _load(self, links: Mapping[Part, Link]) -> "dict[Part, Worker]":
        from dovetail.workers.progress import hearing_loads
        from dovetail.workers.serving.loading import Telling

        first, *others = links
        settings = self.configuration.settings
        if (isa := getattr(settings, first).isa) != "auto":
            kernels.use_isa(kernels.isa_of(isa))
        name = f"{self.name}-{first}" if others else self.name
        model = model_of(self.configuration, first)
        telling = Telling(links[first], name, (first,), model)

        def told(doing: str, done: int, total: int) -> None:
            self.notifier.loading()
            telling(doing, done, total)

        with hearing_loads(told):
            if others:
                return dict(zip(links, self._open_unified(), strict=True))
            if first == "target":
                self._check_text(with_target(self.configuration.settings.target).model)
            place = self.binding.place
            return {first: _opener(self.configuration, first, place)(self.name, self.threads)}

    def _check_text(self, source: str) -> None:
        """Check the tokenizer of the target, unless the command that started this worker has."""
        from dovetail.workers.models.checkpoints.hub import find_folder

        if not (self.told and text_here(source)):
            check_text(find_folder(source))

    def _open_unified(self) -> "tuple[Worker, Worker]":
        from dovetail.workers.unified import open_unified

        settings = self.configuration.settings
        target = with_target(settings.target)
        self._check_text(target.model)
        with counting_bar(QUANTISED) as tell:
            return open_unified(
                target,
                settings.draft,
                name=self.name,
                threads=self.threads,
                memory=settings.memory,
                profile=writable_profile_path(),
                cache=substitutes_path(),
                tell=tell,
            )

    def _work(
        self, link: Link, worker: "Worker", part: Part, again: Callable[[], Link], load_s: float
    ) -> Drain | None:
        """Serve in one role until the coordinator dismisses it, or is lost for good (None)."""
        from dovetail.workers.loop import serve
        from dovetail.workers.progress import Watchdog
        from dovetail.workers.serving.registration import Reconnecting

        title = f"{self._title}, {part}" if self.role == "unified" else self._title
        watchdog = Watchdog(title, self.configuration.settings.coordinator.stuck_s)
        watchdog.start()
        reconnecting = Reconnecting(
            again, self.reconnect_s, lambda news: self.say(f"{title}: {news}")
        )
        noted = partial(self._note, str(worker.hello(0).fingerprint or ""))
        return serve(
            link,
            worker,
            binding=str(self.binding),
            standby=self.standby,
            load_s=load_s,
            answer_s=self.configuration.settings.coordinator.answer_s,
            reconnecting=reconnecting if self.reconnect_s else None,
            watchdog=watchdog,
            listener=self.notifier.part(part, noted, _pace_for),
        )

    def _note(self, fingerprint: str) -> None:
        try:
            note_worker(self.connect, parts_of(self.role), self.flags, fingerprint)
        except (OSError, UserError) as error:
            self.say(f"{self._title}: `dovetail swap` cannot use its settings ({error})")


def _pace_for(order: Open) -> None:
    """End pacing when a client's session opens. Raise the share for every later prefill of a log
    that is about to move here, so that it does not fall behind the stream."""
    if order.key != AHEAD:
        pace(None)
    elif order.base is not None:
        pace_less()


class SecondRole(threading.Thread):
    """The second of two roles; if an error ends it before the first, this is reported, and the
    process ends."""

    def __init__(self, work: Callable[[], object], over: threading.Event) -> None:
        super().__init__(name="draft", daemon=True)
        self._work, self._over = work, over

    def run(self) -> None:
        try:
            self._work()
        except UserError as error:
            note(f"dovetail: {error}")
            os._exit(USER_ERROR)
        except BaseException:
            if self._over.is_set():  # the process ends
                return
            traceback.print_exc()
            os._exit(1)


def _opener(
    configuration: Configuration, role: Role, place: Place = NOWHERE
) -> "Callable[[str, int], Worker]":
    """Return the function that opens the worker of this role: (name, threads) -> worker."""
    target, profile = with_target(configuration.settings.target), writable_profile_path()
    if role == "target":
        from dovetail.workers.kernels.shards import Shard
        from dovetail.workers.serving.open_target import open_target_worker

        memory = configuration.settings.memory
        shards = [Shard(cores, node) for cores, node in place.shards_at_nodes]
        return lambda name, threads: open_target_worker(
            target,
            name=name,
            threads=threads,
            profile=profile,
            memory=memory,
            shards=shards,
            prompts=configuration.settings.cache,
        )
    draft = configuration.settings.draft
    if draft.kind == "none":
        raise UserError("draft.kind = 'none' is not a worker: start no draft worker")
    draft = with_draft(draft)
    from dovetail.workers.drafters.registry import open_draft_worker

    def opened(name: str, threads: int) -> "Worker":
        with counting_bar(QUANTISED) as tell:
            return open_draft_worker(
                draft,
                name=name,
                threads=threads,
                target=target.model,
                context=target.longest,
                profile=profile,
                cache=substitutes_path(),
                tell=tell,
                vram=configuration.settings.memory.vram_bytes,
                prompts=configuration.settings.cache,
            )

    return opened


def model_of(configuration: Configuration, role: Role) -> str:
    settings = configuration.settings
    if role == "draft" and settings.draft.kind not in ("mtp", "substitute"):
        return with_draft(settings.draft).model
    return with_target(settings.target).model


SECTIONS = ("target", "draft", "memory", "cache")
MODELS = ("target.model", "draft.model")
STUCK = "coordinator.stuck_s"
PLACE = ("--cores=", "--memory-nodes=")


def values_of(note: WorkerNote) -> dict[str, Any]:
    parts = (flag.removeprefix("--").partition("=") for flag in note.flags)
    known = {name: text for name, _, text in parts if name in SETTINGS}
    found = {name: parse_setting(name, text, f"--{name}") for name, text in known.items()}
    return {n: resolved(value) if n in MODELS else value for n, value in found.items()}


def noted_place(note: WorkerNote) -> list[str]:
    return [flag for flag in note.flags if flag.startswith(PLACE)]


def flags_of(configuration: Configuration, cores: str | None, memory_nodes: str) -> list[str]:
    """Return the settings and binding of a worker as flags that are valid in any folder."""
    place = [
        f"{name}{value}" for name, value in zip(PLACE, (cores, memory_nodes), strict=True) if value
    ]
    typed = (flag.partition("=") for flag in configuration.typed(*SECTIONS))
    settings = [
        f"{name}={_absolute(value) if name.removeprefix('--') in MODELS else value}"
        for name, _, value in typed
    ]
    return [*settings, f"--{STUCK}={configuration.value(STUCK)}", *place]


def before_of(worker: WorkerState) -> WorkerNote | None:
    """Return a registered worker's saved settings; None if it runs elsewhere or as another user."""
    if worker.host != socket.gethostname():
        return None
    found = [note for note in worker_notes() if note.pid == worker.pid]
    return found[-1] if found else None


def last_before(addresses: Collection[str], role: str) -> WorkerNote | None:
    """Return the saved settings of the last worker of a role on this machine that was registered
    with a coordinator at these addresses; None if there was none."""
    found = [note for note in worker_notes() if role in note.roles and note.address in addresses]
    return found[-1] if found else None


def _absolute(model: str) -> str:
    path = Path(model).expanduser()
    return str(path.absolute()) if model and path.exists() else model
