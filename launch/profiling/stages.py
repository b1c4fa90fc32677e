"""The stages of a profile: probe, start, warm up, run and watch, sound - or watch what others have
decoded. What they bring is one `Evidence`.

Knows the order and where each fact comes from, not what follows from them.
"""

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from dovetail.launch.console.terminal import counted, note, progress_bar, spinner
from dovetail.launch.files.directory import announcements, profile_path
from dovetail.launch.files.prompts import Prompt
from dovetail.launch.machine.binding import Place
from dovetail.launch.machine.cores import lay_out
from dovetail.launch.machine.topology import Topology, format_numbers, read_topology
from dovetail.launch.processes.connection import (
    Connection,
    ahead_of,
    find_coordinator,
    names_models,
    speaks_http,
)
from dovetail.launch.processes.stack import check_stack, layout_of, start_stack, wait_until_ready
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.profiling.advice import UNKNOWN
from dovetail.launch.profiling.evidence import Evidence
from dovetail.launch.profiling.facts import HEAD, SMALL, Facts, coordinator_of, role_of
from dovetail.launch.profiling.forecast import Tree, levels_of
from dovetail.launch.profiling.probing import probe
from dovetail.launch.profiling.samplers import Samplers
from dovetail.launch.profiling.watching import Watch
from dovetail.launch.profiling.workload import Soundings, Workload, watch_others
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.embedded import with_draft
from dovetail.protocol.calibration import MachineLimits
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Reported, WorkerState
from dovetail.protocol.profile import load_profile, machine_key
from dovetail.protocol.settings import Settings, TargetSettings

LIGHT_DRAFTS = ("none", "ngram")
"""Drafts that leave a core to the target."""
OWN_END = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::")
"""Hosts of a URL that are this machine, wherever its server listens."""


def own_run(
    owned: ExitStack, configuration: Configuration, prompts: Sequence[Prompt], seed: int
) -> tuple[Evidence, Watch]:
    """A workload on processes of our own."""
    check_stack(configuration)
    if running := announcements():
        note(
            f"another of your coordinators runs on this machine (pid {running[0].pid}); what it "
            f"does disturbs this profile: --connect {running[0].address} watches it"
        )
    settings, topology, layout = (
        configuration.settings,
        read_topology(),
        layout_of(configuration.settings),
    )
    taken = {
        *layout.target.cores,
        *(() if settings.draft.kind in LIGHT_DRAFTS else layout.draft.cores),
    }
    spare = [core[0] for node in topology.nodes for core in node.cores if not taken & set(core)]
    supervisor = owned.enter_context(Supervisor())
    probed = _Probed()
    with spinner() as say:
        if settings.target.device == "cpu":
            say("probing the machine")
            others = other_nodes(topology, settings.target, layout.target)
            probed = _probe_places(supervisor, layout.target, spare, others)
        say("starting")
        stack = start_stack(supervisor, configuration, layout=layout, anew=True)
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
    ahead = ahead_of(settings.draft)
    tree = Tree(settings.tree.gamma, settings.tree.depth)
    facts = Facts(
        status,
        soundings,
        tree,
        settings.tree.width,
        _went_ahead(watch) if ahead is None else ahead,
        settings.tree.policy,
        not settings.tree.insist,
        settings.draft.kind,
        bool(set(layout.target.cores) & set(layout.draft.cores)),
        len(spare),
        _blocks(configuration),
        probed.limits,
        probed.wider,
        probed.others_nodes,
        _workload_words(settings, len(prompts), seed, drafts=workload.drafts),
    )
    return facts.evidence(watch), watch


@dataclass(frozen=True)
class _Probed:
    """The limits of the target's cores, of these and the spare ones, and of other nodes."""

    limits: MachineLimits | None = None
    wider: MachineLimits | None = None
    others_nodes: Mapping[str, MachineLimits] = field(default_factory=dict)


def _probe_places(
    supervisor: Supervisor, target: Place, spare: Sequence[int], others: Mapping[str, Place]
) -> _Probed:
    """Measure the limits of every place that the target has or could have."""
    wider = Place((*target.cores, *spare), target.nodes)
    return _Probed(
        probe(supervisor, target),
        probe(supervisor, wider) if spare else None,
        {numa: probe(supervisor, place) for numa, place in others.items()},
    )


def _workload_words(settings: Settings, prompts: int, seed: int, *, drafts: bool) -> str:
    """Return the workload in words: prompts, sampling and trees."""
    tree = settings.tree
    shape = (
        f"policy {tree.policy}, {tree.gamma}/{tree.depth}/{tree.width}" if drafts else "no draft"
    )
    return (
        f"{counted(prompts, 'prompt')}, temperature {settings.sampling.temperature:g}, "
        f"seed {seed}, {shape}"
    )


def other_nodes(topology: Topology, target: TargetSettings, now: Place) -> Mapping[str, Place]:
    """Return the other values that target.numa could have - the best node, all nodes with memory
    interleaved, or all nodes with a shard each - and the place that each gives; empty on a machine
    with one memory node."""
    if len(topology.computing) < 2:
        return {}
    found: dict[str, Place] = {}
    for numa in ("auto", format_numbers(node.number for node in topology.computing), "shard"):
        try:
            place = lay_out(topology, numa=numa, threads=target.threads).target
        except UserError:  # it has not so many threads
            continue
        if place != now and place not in found.values():
            found[numa] = place
    return found


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
        raise UserError(
            f"{named} is a setting of the workers and has no effect with --connect: leave one of "
            "the two out"
        )
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
        policy, cuts = settings.tree.policy, not settings.tree.insist
    else:
        with progress_bar(int(seconds), "s") as step, _watched(watch):
            watch_others(watch, seconds, step)
        words, policy, cuts = "a server that was watched", UNKNOWN, False
    _check_rounds(watch)
    status = client.status()
    target = role_of(status.workers, "target")
    records = [seen.record for seen in watch.rounds]
    tree = Tree(
        max(record.verified for record in records),
        max((max(levels_of(r.parents[: r.verified]), default=0) for r in records), default=0),
    )
    limits = _known_limits(target) if target.host == socket.gethostname() else None
    kind = HEAD if any(worker.feature_bytes for worker in status.workers) else SMALL
    facts = Facts(
        status,
        Soundings(),
        tree,
        None,
        _went_ahead(watch),
        policy,
        cuts,
        kind,
        _share_cores(watch),
        0,
        None,
        limits,
        None,
        {},
        words,
    )
    return facts.evidence(watch), watch


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
            f"none of your servers on this machine serves {address}: name its coordinator's "
            "address instead (`dovetail status` tells it)"
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
    """Return what happens in the block is watched."""
    watch.begin()
    yield
    watch.end()


def _check_rounds(watch: Watch) -> None:
    if not watch.rounds:
        raise UserError(
            "nothing was decoded beyond the first token of a reply: take a prompt with a "
            "longer one, or allow more tokens"
        )


def _samplers(state: Reported) -> Samplers:
    """Return samplers of the processes that are on this machine: workers, coordinator, and this
    one."""
    here, coordinator = socket.gethostname(), coordinator_of(state)
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


def _blocks(configuration: Configuration) -> int | None:
    """Decoder layers of a Dovetail head; None for any other draft."""
    draft = configuration.settings.draft
    if draft.kind not in ("auto", "dovetail"):
        return None
    folder = Path(with_draft(draft).model).expanduser()
    if not (folder / "config.json").is_file():
        return None
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return (
        int(told["num_hidden_layers"])
        if any(str(name).endswith("Dovetail") for name in told.get("architectures", ()))
        else None
    )


def _known_limits(target: WorkerState) -> MachineLimits | None:
    """Return the limits that the latest calibration of this machine with as many threads found."""
    entries = [
        entry
        for entry in load_profile(profile_path()).entries
        if entry.key.machine == machine_key() and entry.key.threads == max(1, target.threads)
    ]
    found = [calibration for entry in entries for calibration in entry.calibrations]
    return max(found, key=lambda calibration: calibration.measured).limits if found else None
