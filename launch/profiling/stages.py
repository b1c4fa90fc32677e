"""The stages of a profile, which result in one `Evidence`: start, warm up, run and watch, sound; or
watch what others decode. Soundings are short replies with other trees, and with none, that measure
the cost of passes over other numbers of rows and the gain of a larger tree."""

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from dovetail.launch.profiling.measured import Evidence, Soundings, levels_of
from dovetail.launch.profiling.samplers import Samplers
from dovetail.launch.profiling.timeline import Slice
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Reported, RoundRecord, Seen, SeenRound, SeenSpan, SeenWorker
from dovetail.protocol.settings import MAX_DEPTH, Settings, TreeSettings
from dovetail.runtime.client import Client

EVERY_S = 0.1  # between two polls: the coordinator answers one within a millisecond or two
SAMPLE_S = 0.25
"""Between two readings of the samplers: the kernel counts busy time in hundredths of a second."""


class RunWatch:
    """All observations since its start; call `glance` as often as possible."""

    def __init__(self, client: Client, samplers: Samplers) -> None:
        """`client`: used only for this. Earlier events are skipped."""
        self._client, self.samplers = client, samplers
        self._next = 0
        self.missed = 0  # rounds and spans that were dropped before they were read
        self.rounds: list[SeenRound] = []
        self.spans: list[SeenSpan] = []
        self._workers: dict[str, SeenWorker] = {}
        self._there: Sequence[str] = ()
        self.changes: dict[str, str] = {}
        """Workers that registered or left meanwhile, and which of the two."""
        self.start_ns = self.end_ns = 0
        """The watched interval, on the coordinator's clock."""
        self._looked_s = self._sampled_s = 0.0

    @property
    def went_ahead(self) -> bool:
        return any(seen.record.ahead for seen in self.rounds)

    @property
    def workers(self) -> Sequence[SeenWorker]:
        return [*self._workers.values()]

    def begin(self) -> None:
        """Watch from now on; at the coordinator's next tick, workers begin to record fine spans."""
        while self._look().more:
            pass
        self.rounds.clear()
        self.spans.clear()
        self.start_ns, self.missed = self.end_ns, 0
        self._workers = {name: self._workers[name] for name in self._there}
        self.changes.clear()
        self.samplers.take()
        self._looked_s = self._sampled_s = time.monotonic()

    def glance(self) -> None:
        now_s = time.monotonic()
        if now_s - self._sampled_s >= SAMPLE_S:
            self.samplers.take()
            self._sampled_s = now_s
        if now_s - self._looked_s >= EVERY_S:
            while self._look().more:
                pass
            self._looked_s = now_s

    def end(self) -> None:
        """Read events for the last time; later ones are not seen."""
        self.samplers.take()
        while self._look().more:
            pass

    def _look(self) -> Seen:
        seen = self._client.look(self._next, spans=True)
        self._next, self.end_ns = seen.next, seen.at_ns
        self._notice(seen.workers)
        self.missed += seen.missed
        self.rounds += seen.rounds
        self.spans += seen.spans
        return seen

    def _notice(self, workers: Sequence[SeenWorker]) -> None:
        now = {worker.name: worker for worker in workers}
        for name in {*now, *self._there}:
            if name not in now:
                self.changes[name] = "went"
            elif name not in self._there:
                self.changes[name] = "came"
            elif now[name].worker_epoch != self._workers[name].worker_epoch:
                self.changes[name] = "was restarted"
        self._workers.update(now)
        self._there = [*now]


WIDE, DEEPER = 63, 4  # nodes, and additional levels, of the trees by which larger ones are judged
LADDER = (1, 3, 7, 31)
"""Nodes of the trees for measuring passes, in addition to 0, that of the run, and WIDE."""
WIDE_TOKENS, LADDER_TOKENS, WARM_TOKENS = 96, 24, 12
WIDE_PROMPTS = 4


@dataclass(frozen=True)
class Workload:
    """Decodes prompts with the settings of a run."""

    connection: Connection
    settings: Settings
    seed: int

    @property
    def drafts(self) -> bool:
        return self.settings.draft.kind != "none"

    def warm_up(self, prompt: Prompt) -> None:
        self._decode(prompt, WARM_TOKENS)

    def run(self, prompts: Sequence[Prompt], watch: RunWatch, step: Callable[[str], None]) -> None:
        for prompt in prompts:
            self._decode(prompt, self.settings.sampling.max_tokens, glance=watch.glance)
            step(prompt.id)

    def sound(self, prompts: Sequence[Prompt], step: Callable[[str], None]) -> Soundings:
        first, depth = prompts[0], self.settings.tree.depth
        plain = self._recorded(first, LADDER_TOKENS, speculate=False)
        step("the target alone")
        if not self.drafts:
            return Soundings(plain=plain)
        others: list[RoundRecord] = []
        for gamma in LADDER:
            tree = self._fixed(gamma, depth)
            others += self._recorded(first, LADDER_TOKENS, tree=tree, ahead=False)
            step(f"gamma {gamma}")
        wide = []
        tree = self._fixed(max(WIDE, self.settings.tree.gamma), min(MAX_DEPTH, depth + DEEPER))
        for prompt in prompts[:WIDE_PROMPTS]:
            wide.append(self._recorded(prompt, WIDE_TOKENS, tree=tree, ahead=False))
            step("a wide tree")
        return Soundings(wide, plain, others)

    @property
    def soundings(self) -> int:
        """Return how many steps `sound` takes at most."""
        return 1 + (len(LADDER) + WIDE_PROMPTS if self.drafts else 0)

    def _fixed(self, gamma: int, depth: int) -> TreeSettings:
        """A tree of this size that is grown level by level; rejection sampling requires a static
        one."""
        tree = self.settings.tree
        policy = tree.policy if self.settings.sampling.acceptance == "rejection" else "dynamic"
        shape = {"policy": policy, "gamma": gamma, "depth": depth}
        return tree.model_copy(update={**shape, "insist": True, "thresholds": ()})

    def _recorded(self, prompt: Prompt, max_tokens: int, **fields: Any) -> list[RoundRecord]:
        rounds: list[RoundRecord] = []
        self._decode(prompt, max_tokens, record=rounds.append, **fields)
        return rounds

    def _decode(
        self,
        prompt: Prompt,
        max_tokens: int,
        *,
        tree: TreeSettings | None = None,
        speculate: bool = True,
        ahead: bool | None = None,
        **calls: Any,
    ) -> None:
        settings = self.settings
        least = min(settings.sampling.min_tokens, max_tokens)
        self.connection.decode(
            prompt.turns[:1],
            sampling=settings.sampling.model_copy(update={"min_tokens": least}),
            tree=tree or settings.tree,
            max_tokens=max_tokens,
            seed=self.seed,
            speculate=speculate and self.drafts,
            ahead=ahead if ahead is not None else ahead_of(settings.draft),
            **calls,
        )


def watch_others(watch: RunWatch, seconds: float, step: Callable[[str], None]) -> None:
    """Watch what others decode for this long; Ctrl-C ends it early. `UserError` if nothing was
    decoded."""
    deadline, shown = time.monotonic() + seconds, 0
    try:
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(EVERY_S, left))
            watch.glance()
            while shown < int(seconds - left):
                shown += 1
                step(f"{len(watch.rounds)} rounds")
    except KeyboardInterrupt:
        watch.glance()
    if not watch.rounds:
        remedy = "send the server a request, or give a --prompt"
        raise UserError(f"nothing was decoded in {seconds:g} s: {remedy}")


OWN_END = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::")
"""Hosts of a URL that mean this machine, at any listening address."""


def own_run(
    owned: ExitStack, configuration: Configuration, prompts: Sequence[Prompt], seed: int
) -> tuple[Evidence, RunWatch]:
    check_stack(configuration)
    if running := announcements():
        note(
            f"another of your coordinators is running on this machine (pid {running[0].pid}) and "
            f"would disturb this profile: watch it with --connect {running[0].address}"
        )
    settings, layout = configuration.settings, layout_of(configuration.settings)
    supervisor = owned.enter_context(Supervisor())
    with spinner() as say:
        say("starting")
        stack = begin_stack(supervisor, configuration, layout=layout, measures=True)()
        state = wait_until_ready(supervisor, stack, say)
    connection = Connection(owned.enter_context(stack.connect()), state, stack)
    watch = RunWatch(owned.enter_context(stack.connect()), _samplers(state))
    workload = Workload(connection, settings, seed)
    with progress_bar(len(prompts) + workload.soundings + 1, "replies") as step:
        workload.warm_up(prompts[0])
        step("warmed up")
        with _watched(watch):
            workload.run(prompts, watch, step)
        status = connection.client.status()
        soundings = workload.sound(prompts, step)
    tree, ahead = settings.tree, ahead_of(settings.draft)
    evidence = _evidence(
        watch,
        status,
        soundings=soundings,
        tree=Tree(tree.policy, tree.gamma, tree.depth, tree.width),
        adapts=not tree.insist,
        ahead=watch.went_ahead if ahead is None else ahead,
        own_device=not set(layout.target.cores) & set(layout.draft.cores),
        workload=_workload_words(settings, len(prompts), seed, drafts=workload.drafts),
    )
    return evidence, watch


def _evidence(watch: RunWatch, status: Reported, **fields: Any) -> Evidence:
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
    tree, heat = settings.tree, settings.sampling.temperature
    shape = f"policy {tree.policy}, {tree.gamma}/{tree.depth}/{tree.width}"
    how = shape if drafts else "no draft"
    return f"{counted(prompts, 'prompt')}, temperature {heat:g}, seed {seed}, {how}"


def attached(
    owned: ExitStack,
    configuration: Configuration,
    address: str,
    prompts: Sequence[Prompt],
    seconds: float,
    seed: int,
) -> tuple[Evidence, RunWatch]:
    """Profile a running coordinator: with some prompts of ours, or with what others decode
    meanwhile."""
    if named := names_models(configuration):
        raise UserError(f"{named} has no effect with --connect: leave one of the two out")
    address = _behind(address)
    client = owned.enter_context(find_coordinator(configuration, address))
    state = client.status()
    watch = RunWatch(
        owned.enter_context(find_coordinator(configuration, address)), _samplers(state)
    )
    settings = configuration.settings
    if prompts:
        workload = Workload(Connection(client, state), settings, seed)
        with progress_bar(len(prompts), "replies") as step, _watched(watch):
            workload.run(prompts, watch, step)
        words = f"{counted(len(prompts), 'prompt')} on a running server"
    else:
        with progress_bar(int(seconds), "s") as step, _watched(watch):
            watch_others(watch, seconds, step)
        words = "a watched server"
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
        ahead=watch.went_ahead,
        own_device=not _share_cores(watch),
        workload=words,
    )
    return evidence, watch


def _behind(address: str) -> str:
    """The coordinator's address behind the URL of a server of this user on this machine; an address
    is unchanged."""
    if not speaks_http(address):
        return address
    wanted = _listener(address)
    for one in announcements():
        if one.url and _listener(one.url) == wanted:
            return one.address
    raise UserError(f"none of your servers here serves {address}: name its coordinator's address")


def _listener(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port of a URL; all names of this machine are one. `UserError` if it is not a
    URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UserError(f"{url!r} is not an address: write http://HOST:PORT for a server") from None
    host = "localhost" if parts.hostname in OWN_END else parts.hostname
    return parts.scheme, host, port or {"http": 80, "https": 443}.get(parts.scheme)


@contextmanager
def _watched(watch: RunWatch) -> Iterator[None]:
    watch.begin()
    yield
    watch.end()
    if not watch.rounds:
        raise UserError("no reply had a second token: use longer ones, or allow more tokens")


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


def _share_cores(watch: RunWatch) -> bool:
    targets, drafts = (
        [set(worker.cores) for worker in watch.workers if role in worker.roles]
        for role in ("target", "draft")
    )
    return any(target & draft for target in targets for draft in drafts)
