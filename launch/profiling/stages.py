"""The stages of a profile, which give one `Evidence`: start, warm up, run and watch, sound; or
watch what others decode."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dovetail.launch.console.terminal import counted, note, progress_bar, spinner
from dovetail.launch.files.directory import announcements
from dovetail.launch.files.prompts import Prompt
from dovetail.launch.planning.planner import Tree
from dovetail.launch.processes.connection import (
    Connection,
    ahead_of,
    find_coordinator,
    models_of,
    names_models,
    speaks_http,
)
from dovetail.launch.processes.stack import begin_stack, check_stack, layout_of, wait_until_ready
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.profiling.evidence import Evidence
from dovetail.launch.profiling.measured import levels_of
from dovetail.launch.profiling.samplers import Samplers
from dovetail.launch.profiling.timeline import Slice
from dovetail.launch.profiling.workload import Watch, Workload, watch_others
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Reported
from dovetail.protocol.settings import Settings, TreeSettings

OWN_END = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::")
"""Hosts of a URL that are this machine, wherever its server listens."""


def own_run(
    owned: ExitStack, configuration: Configuration, prompts: Sequence[Prompt], seed: int
) -> tuple[Evidence, Watch]:
    check_stack(configuration)
    if running := announcements():
        note(
            f"another of your coordinators runs on this machine (pid {running[0].pid}); what it "
            f"does disturbs this profile: --connect {running[0].address} watches it"
        )
    settings, layout = configuration.settings, layout_of(configuration.settings)
    supervisor = owned.enter_context(Supervisor())
    with spinner() as say:
        say("starting")
        stack = begin_stack(supervisor, configuration, layout=layout, measures=True)()
        state = wait_until_ready(supervisor, stack, say)
    connection = Connection(owned.enter_context(stack.connect()), state, stack)
    watch = Watch(owned.enter_context(stack.connect()), _samplers(state))
    workload = Workload(connection, settings, seed)
    with progress_bar(len(prompts) + workload.soundings + 1, "replies") as step:
        workload.warm_up(prompts[0])
        step("warmed up")
        with _watched(watch):
            workload.run(prompts, watch, step)
        _check_rounds(watch)
        status = connection.client.status()
        soundings = workload.sound(prompts, step)
    tree, ahead = settings.tree, ahead_of(settings.draft)
    evidence = _evidence(
        watch,
        status,
        soundings=soundings,
        tree=Tree(tree.policy, tree.gamma, tree.depth, tree.width),
        adapts=not tree.insist,
        ahead=_went_ahead(watch) if ahead is None else ahead,
        own_device=not set(layout.target.cores) & set(layout.draft.cores),
        workload=_workload_words(settings, len(prompts), seed, drafts=workload.drafts),
    )
    return evidence, watch


def _evidence(watch: Watch, status: Reported, **fields: Any) -> Evidence:
    return Evidence(
        slices=[Slice.of(span) for span in watch.spans],
        rounds=watch.rounds,
        workers=watch.workers,
        states=status.workers,
        pairs=status.pairs,
        start_ns=watch.start_ns,
        end_ns=watch.end_ns,
        samples=watch.samplers.taken,
        absent=watch.samplers.absent,
        here=socket.gethostname(),
        title=models_of(status),
        missed=watch.missed,
        changes=watch.changes,
        coordinator=_coordinator_of(status),
        **fields,
    )


def _workload_words(settings: Settings, prompts: int, seed: int, *, drafts: bool) -> str:
    tree = settings.tree
    shape = (
        f"policy {tree.policy}, {tree.gamma}/{tree.depth}/{tree.width}" if drafts else "no draft"
    )
    return (
        f"{counted(prompts, 'prompt')}, temperature {settings.sampling.temperature:g}, "
        f"seed {seed}, {shape}"
    )


def attached(
    owned: ExitStack,
    configuration: Configuration,
    address: str,
    prompts: Sequence[Prompt],
    seconds: float,
    seed: int,
) -> tuple[Evidence, Watch]:
    """A coordinator that runs: some prompts of ours on it, or what others have decoded
    meanwhile."""
    if named := names_models(configuration):
        raise UserError(f"{named} has no effect with --connect: leave one of the two out")
    address = _behind(address)
    client = owned.enter_context(find_coordinator(configuration, address))
    state = client.status()
    watch = Watch(owned.enter_context(find_coordinator(configuration, address)), _samplers(state))
    settings = configuration.settings
    if prompts:
        workload = Workload(Connection(client, state), settings, seed)
        with progress_bar(len(prompts), "replies") as step, _watched(watch):
            workload.run(prompts, watch, step)
        words = f"{counted(len(prompts), 'prompt')} on a server that runs"
    else:
        with progress_bar(int(seconds), "s") as step, _watched(watch):
            watch_others(watch, seconds, step)
        words = "a server that was watched"
    _check_rounds(watch)
    status = client.status()
    if not any("target" in worker.roles for worker in status.workers):
        raise UserError("the last target worker has left: this run cannot be profiled")
    records = [seen.record for seen in watch.rounds]
    evidence = _evidence(
        watch,
        status,
        tree=Tree(
            settings.tree.policy,
            max(record.verified for record in records),
            max((max(levels_of(r.parents[: r.verified]), default=0) for r in records), default=0),
            TreeSettings.model_fields["width"].default,
        ),
        adapts=bool(prompts) and not settings.tree.insist,
        set_here=bool(prompts),
        ahead=_went_ahead(watch),
        own_device=not _share_cores(watch),
        workload=words,
    )
    return evidence, watch


def _behind(address: str) -> str:
    """The coordinator's address behind the URL of a server of this user on this machine; an address
    stays as it is."""
    if not speaks_http(address):
        return address
    wanted = _listener(address)
    found = next(
        (one.address for one in announcements() if one.url and _listener(one.url) == wanted), None
    )
    if found is None:
        raise UserError(
            f"none of your servers here serves {address}: name its coordinator's address instead"
        )
    return found


def _listener(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port of a URL; all names of this machine's own end are one. `UserError` if
    it is no URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UserError(f"{url!r} is not an address: write http://HOST:PORT for a server") from None
    return (
        parts.scheme,
        "localhost" if parts.hostname in OWN_END else parts.hostname,
        port or {"http": 80, "https": 443}.get(parts.scheme),
    )


@contextmanager
def _watched(watch: Watch) -> Iterator[None]:
    watch.begin()
    yield
    watch.end()


def _check_rounds(watch: Watch) -> None:
    if not watch.rounds:
        raise UserError("no reply had a second token: take longer ones, or allow more tokens")


def _coordinator_of(state: Reported) -> int | None:
    local = state.address.startswith("ipc://") and Path(f"/proc/{state.pid}").exists()
    return state.pid if local else None


def _samplers(state: Reported) -> Samplers:
    """Return samplers of the processes that are on this machine: workers, coordinator, and this
    one."""
    here, coordinator = socket.gethostname(), _coordinator_of(state)
    workers = [
        worker.pid
        for worker in state.workers
        if worker.host == here and Path(f"/proc/{worker.pid}").exists()
    ]
    return Samplers([*workers, *([coordinator] if coordinator is not None else []), os.getpid()])


def _went_ahead(watch: Watch) -> bool:
    return any(seen.record.ahead for seen in watch.rounds)


def _share_cores(watch: Watch) -> bool:
    targets, drafts = (
        [set(worker.cores) for worker in watch.workers if role in worker.roles]
        for role in ("target", "draft")
    )
    return any(target & draft for target in targets for draft in drafts)
