"""A coordinator with its workers, started together and awaited."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from dovetail.launch.console.terminal import QUANTISED, Intervals, loading_text, note
from dovetail.launch.machine.cores import CoreLayout
from dovetail.launch.machine.fit import check_memory, nodes_of
from dovetail.launch.machine.sharding import choice_of, layout_for
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes import forked
from dovetail.launch.processes.preflight import (
    check_draft,
    check_target,
    check_text,
    check_whole,
    draft_bytes,
    draft_has_gpu_alone,
    draft_room,
    text_here,
)
from dovetail.launch.processes.supervise import Child, Supervisor
from dovetail.launch.processes.worker import TOLD
from dovetail.launch.settings.catalog import SETTINGS
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.models import with_target
from dovetail.protocol.errors import DovetailError, SettingsError, UserError
from dovetail.protocol.links import open_link
from dovetail.protocol.messages import Reported, Role
from dovetail.protocol.settings import DRAFT_KINDS, HEAD_KINDS, Settings
from dovetail.runtime.client import Client
from dovetail.workers.models.checkpoints.gguf.view import spelled

POLL_S = 0.05
LOADING_POLL_S = 0.02  # seconds between two polls of parts that are not ready yet
Played = Literal["target", "draft", "unified"]
ROLES: tuple[Played, ...] = ("target", "draft")
SECTIONS: dict[str, tuple[str, ...]] = {
    "target": ("target", "memory", "cache"),
    "draft": ("draft", "cache"),
    "unified": ("target", "memory", "draft"),
}
"""The sections of settings that a worker has."""


@dataclass(frozen=True)
class Stack:
    """A coordinator and the workers of one set of settings, as child processes."""

    address: str
    configuration: Configuration
    coordinator: Child
    workers: tuple[Child, ...]

    def connect(self) -> Client:
        answer_s = self.configuration.settings.coordinator.answer_s
        return Client(open_link(self.address, role="client"), answer_s)

    def losses(self) -> list[DovetailError]:
        return [child.failure() for child in (self.coordinator, *self.workers) if child.ended]


def begin_stack(
    supervisor: Supervisor,
    configuration: Configuration,
    *,
    layout: CoreLayout | None = None,
    prefix: str = "",
    measures: bool = False,
) -> Callable[[], Stack]:
    """Begin to start the processes of these settings; return a function that waits for the start.
    They are not restarted, and keep no journal unless the settings name one. `measures`: without a
    prefix cache. A process without a spinner's threads can fork, which is faster."""
    check_stack(configuration)
    layout = layout or layout_of(configuration.settings)
    alone = ("coordinator.recovery_s", "0"), ("coordinator.journal", "off")
    waits = [f"--{name}={value}" for name, value in alone if not configuration.given(name)]
    reuse = ["--coordinator.reuse=false"] if measures else []
    flags = [*coordinator_arguments(configuration), *waits, *reuse]
    commands = {}
    for role in processes_of(configuration.settings):
        settings = with_room_for_draft(configuration) if role == "target" else configuration
        commands[f"{prefix}{role} worker"] = worker_arguments(settings, role, TOLD, layout)
    started = begin_workers(supervisor, configuration.settings, commands)
    coordinator = supervisor.begin_coordinator(
        layout.coordinator.cores, f"{prefix}coordinator", flags=flags
    )

    def finish() -> Stack:
        address = supervisor.await_address(coordinator)
        workers = started()
        for worker in workers.values():
            worker.tell(address, last=True)
        return Stack(address, configuration, coordinator, tuple(workers.values()))

    return finish


def begin_workers(
    supervisor: Supervisor, settings: Settings, commands: Mapping[str, Sequence[str]]
) -> Callable[[], dict[str, Child]]:
    """Begin to start workers by name, which read the coordinator's address from stdin; return a
    function that waits for them. Two workers with models are forked from one process that imports
    for both; a single one only if that process is already running. On several memory nodes a note
    reports whether the target is spread, and why."""
    if words := choice_of(settings.target, shares=settings.draft.share is True).words:
        note(words)
    alone = dict(commands)
    start: Callable[[], dict[str, Child]] = dict
    if forked.begun() or (processes_of(settings) == ROLES and settings.draft.kind != "ngram"):
        alone = {
            name: arguments
            for name, arguments in commands.items()
            if settings.draft.kind == "ngram" and "--role=draft" in arguments
        }
        together = {name: commands[name] for name in commands if name not in alone}
        start = partial(supervisor.start_forked, supervisor.start_nursery(), together)
    children = {name: supervisor.start(name, alone[name], asks=True) for name in alone}

    def started() -> dict[str, Child]:
        if (folder := text_here(with_target(settings.target).model)) is not None:
            check_text(folder)
        found = {**children, **start()}
        return {name: found[name] for name in commands}

    return started


def check_stack(configuration: Configuration, *hubs: str) -> None:
    """`UserError` for settings that this machine cannot serve, by the models' configurations.
    `hubs`: number of further processes without a model."""
    check_models(configuration)
    check_memory(
        configuration.settings,
        ("coordinator", *hubs, *processes_of(configuration.settings)),
        nodes=nodes_of(layout_of(configuration.settings).target),
    )


def check_models(configuration: Configuration) -> None:
    """`UserError` for models whose files show that they cannot be loaded on any machine."""
    check_target(configuration.settings)
    _check_pair(configuration)
    if configuration.settings.draft.kind != "none":
        check_draft(configuration.settings)


def layout_of(settings: Settings) -> CoreLayout:
    return layout_for(settings.target, shares=settings.draft.share is True)


def wait_until_ready(
    supervisor: Supervisor, stack: Stack, note: Callable[[str], None] = lambda _: None
) -> Reported:
    """Wait until all workers of a stack are registered; raise the error of a process that ends
    before. `note` is called with the missing workers."""
    wanted = ["target", *(["draft"] if stack.configuration.settings.draft.kind != "none" else [])]
    intervals = Intervals()
    with stack.connect() as client:
        while True:
            state = client.status()
            there = {role for worker in state.workers for role in worker.roles}
            missing = [role for role in wanted if role not in there]
            if not missing:
                return state
            last = [line for child in stack.workers for line in child.last_words()[-1:]]
            words = "".join(f" ({line})" for line in last if line.endswith(QUANTISED))
            note(f"loading {' and '.join(missing)}{words}{loading_text(state.loading)}")
            if not sys.stderr.isatty():
                intervals.tell(state.loading)
            supervisor.check()
            time.sleep(LOADING_POLL_S)


def coordinator_arguments(configuration: Configuration) -> list[str]:
    """Return the settings of a coordinator as flags, without its address."""
    return [
        flag
        for flag in configuration.arguments("coordinator")
        if not flag.startswith(("--coordinator.listen=", "--coordinator.keys="))
    ]


def http_arguments(configuration: Configuration, address: str, url: str) -> list[str]:
    """Return the command of the HTTP API of a coordinator, without keys. `url`: its earlier URL;
    empty at the first start."""
    settings = configuration.settings
    # port 0 applies to the first start
    port = [f"--http.port={url.rpartition(':')[2]}"] if url else []
    wishes = configuration.arguments("tree", "sampling", "draft", "http")
    embedded = configuration.origins["tree.thresholds"] == "default"
    if (bounds := settings.tree.thresholds) and embedded:
        wishes.append(f"--tree.thresholds={SETTINGS['tree.thresholds'].flag_text(bounds)}")
    called = [] if settings.target.model or settings.http.model else ["--http.model=demo"]
    answer = f"--coordinator.answer_s={settings.coordinator.answer_s}"
    return ["http", f"--connect={address}", *wishes, *called, *port, answer]


def processes_of(settings: Settings) -> tuple[Played, ...]:
    if settings.draft.kind == "none":
        return ("target",)
    return ("unified",) if settings.draft.share is True else ROLES


def worker_arguments(
    configuration: Configuration, role: Role | Played, address: str, layout: CoreLayout | None
) -> list[str]:
    """The command of a worker with these settings and its binding; a head or a substitute reads the
    target's weights. `layout`: the places of this machine; None if the caller adds them."""
    where = [] if layout is None else _place_arguments(role, layout)
    target = configuration.settings.target.model
    reads = [f"--target.model={target}"] if role == "draft" and target else []
    own = configuration.arguments(*SECTIONS[role])
    if role == "draft" and (room := draft_room(configuration.settings)):
        own.append(f"--memory.vram={room}B")
    coordinator = configuration.settings.coordinator
    patience = [
        f"--coordinator.{name}={getattr(coordinator, name)}" for name in ("stuck_s", "answer_s")
    ]
    command = ["worker", f"--role={role}", f"--connect={address}", f"--name={role}"]
    return [*command, *where, *own, *reads, *patience]


def _place_arguments(role: Role | Played, layout: CoreLayout) -> list[str]:
    place = layout.draft if role == "draft" else layout.target
    both = sorted({*layout.target.cores, *layout.draft.cores})
    cores = format_numbers(both) if role == "unified" else place.cores_text
    return [f"--cores={cores}", f"--memory-nodes={format_numbers(place.nodes)}"]


def with_room_for_draft(configuration: Configuration) -> Configuration:
    """Return the settings of a target with its draft: on a shared GPU the draft gets its memory
    first, all of it if the CPU computes the target. `SettingsError` if nothing is left."""
    memory = configuration.settings.memory
    if memory.vram_bytes is None:
        return configuration
    if draft_has_gpu_alone(configuration.settings):
        return configuration.over(
            "memory.vram, which is the draft's", {"memory.vram": "auto", "target.prefill": "local"}
        )
    if not (taken := draft_bytes(configuration.settings)):
        return configuration
    if taken >= memory.vram_bytes:
        text = f"memory.vram = {memory.vram!r}, and the draft alone takes {taken / 1e9:.3g} GB"
        raise SettingsError(f"{text}: choose a smaller draft, or raise memory.vram")
    left = {"memory.vram": f"{memory.vram_bytes - taken}B"}
    return configuration.over("memory.vram, without the draft's share", left)


def _check_pair(configuration: Configuration) -> None:
    """The embedded draft has the vocabulary of the embedded target; another target needs a named
    draft."""
    target, draft = configuration.settings.target.model, configuration.settings.draft
    if target and not draft.model and DRAFT_KINDS[draft.kind].own_model:
        there = Path(target).expanduser().is_dir()
        hub = ", which is not a folder here and would be downloaded from the Hugging Face hub"
        check_whole(target)
        what, which = "draft", "a smaller model of its vocabulary"
        if draft.kind in HEAD_KINDS:
            train = f"one that `dovetail train {draft.kind}` made for it"
            trained = DRAFT_KINDS[draft.kind].trained
            what, which = f"{draft.kind} head", train if trained else "one that was made for it"
        raise UserError(
            f"no {what} is named for the target {spelled(target)!r}{'' if there else hub}: add "
            f"--draft FOLDER with {which}, --draft ngram or substitute, which need no model, or "
            "--draft none for the target alone"
        )
