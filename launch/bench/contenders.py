"""The processes that decode for the methods of a benchmark, started when they are needed."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Protocol

from dovetail.launch.bench.methods import NAMES, Method, Peer, Room
from dovetail.launch.console.terminal import spinner
from dovetail.launch.files.prompts import Prompt
from dovetail.launch.machine.cores import CoreLayout
from dovetail.launch.processes.connection import Connection, ahead_of
from dovetail.launch.processes.stack import begin_stack, check_stack, layout_of, wait_until_ready
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.processes.worker import thread_count
from dovetail.launch.settings.models import with_draft
from dovetail.protocol.messages import Finished, RoundRecord
from dovetail.protocol.settings import Sampling
from dovetail.workers.models.checkpoints.gguf.view import files_of

MODEL_SUFFIXES = (".json", ".safetensors", ".bin")


@dataclass(frozen=True)
class Task:
    """A prompt for measurement: cut to fit the context; its reply ends where it begins to loop."""

    prompt: Prompt
    turn: str
    max_tokens: int
    reference: Finished

    @property
    def shortened(self) -> bool:
        return self.turn != self.prompt.turns[0]


@dataclass(frozen=True)
class Run:
    """One timed reply; its first `together` tokens arrived at once."""

    task: Task
    finished: Finished
    together: int = 1

    @property
    def decode_s(self) -> float:
        return self.finished.result.wall_s - self.finished.result.time_to_first_token_s

    @property
    def decoded_tokens(self) -> int:
        return self.finished.result.completion_tokens - self.together


class Contender(Protocol):
    """Processes that decode for a method."""

    @property
    def method(self) -> Method:
        """The method whose replies these are."""

    def decode(self, task: Task, temperature: float, seed: int) -> Run:
        """One timed reply."""

    def peak_rss_mb(self) -> float:
        """The most memory that its processes ever held, summed, in 10^6 bytes."""

    def identity(self) -> str:
        """Return an identity of models and engine, to distinguish others of the same name."""


@dataclass(frozen=True)
class Ours:
    """A stack of our processes."""

    method: Method
    connection: Connection

    def decode(
        self,
        task: Task,
        temperature: float,
        seed: int,
        record: Callable[[RoundRecord], None] | None = None,
    ) -> Run:
        settings = self.method.configuration.settings
        finished = self.connection.decode(
            [task.turn],
            sampling=sampling_of(self.method, temperature, task.max_tokens),
            tree=settings.tree,
            max_tokens=task.max_tokens,
            seed=seed,
            speculate=self.method.drafts,
            ahead=ahead_of(settings.draft),
            record=record,
        )
        return Run(task, finished)

    def peak_rss_mb(self) -> float:
        return self.connection.peak_rss_mb()

    def identity(self) -> str:
        workers = self.connection.state.workers
        parts = [worker.fingerprint for worker in workers if "target" in worker.roles]
        if self.method.drafts:
            parts.append(digest_of(with_draft(self.method.configuration.settings.draft).model))
        return " + ".join(filter(None, parts))


@dataclass(frozen=True)
class Theirs:
    """A peer with this many threads."""

    method: Method
    peer: Peer

    def decode(self, task: Task, temperature: float, seed: int) -> Run:
        threads = self.method.threads
        assert threads is not None
        sampling = sampling_of(self.method, temperature, task.max_tokens)
        reply = self.peer.decode(
            [task.turn], sampling=sampling, max_tokens=task.max_tokens, seed=seed, threads=threads
        )
        return Run(
            task, Finished(epoch=0, request=0, result=reply.result, margins=()), reply.together
        )

    def peak_rss_mb(self) -> float:
        return self.peer.peak_rss_mb()

    def identity(self) -> str:
        return self.peer.identity


@cache
def digest_of(model: str) -> str:
    """Return a digest of a model's folder, or a model's name if it is not a folder."""
    folder = Path(model).expanduser()
    if not model or not folder.is_dir():
        return model
    digest = hashlib.sha256()
    own = (path for path in folder.iterdir() if path.suffix in MODEL_SUFFIXES)
    for path in [*sorted(own), *files_of(folder)]:
        with path.open("rb") as file:
            digest.update(
                f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\0".encode()
            )
    return digest.hexdigest()[:16]


def sampling_of(method: Method, temperature: float, max_tokens: int) -> Sampling:
    sampling = method.configuration.settings.sampling
    return sampling.model_copy(
        update={"temperature": temperature, "min_tokens": min(sampling.min_tokens, max_tokens)}
    )


def check_methods(methods: Sequence[Method], layout: CoreLayout) -> None:
    """Raise `UserError` for the first method that its settings or model files rule out."""
    for method in methods:
        settings = method.configuration.settings
        cores = sorted({*layout.target.cores, *layout.draft.cores})
        if method.peer is not None:
            method.peer.check(settings, method.options, cores)
            continue
        check_stack(method.configuration)
        thread_count("target", settings.target, layout.target)


@contextmanager
def contenders(
    methods: Sequence[Method], programs: Mapping[str, Path | None] | None = None
) -> Iterator[dict[str, Contender]]:
    """Start the processes of each method on the same cores, and yield them by label once all are
    ready. All methods are checked first. `programs`: method of a peer -> its program, or the Python
    with its package; without an entry it is searched for."""
    programs = programs or dict.fromkeys(NAMES)
    layout = layout_of(methods[0].configuration.settings)
    check_methods(methods, layout)
    for method in methods:
        if method.peer is not None:
            method.peer.find(programs[method.head])
    with ExitStack() as owned:
        supervisor = owned.enter_context(Supervisor())
        room = Room(supervisor, programs)
        found: dict[str, Contender] = {}
        shared: dict[str, Connection] = {}
        with spinner() as say:
            for method in methods:
                say(f"starting {method.name}")
                if method.peer is not None:
                    opened = method.peer.open(room, method.configuration, layout, method.options)
                    peer = owned.enter_context(closing(opened))
                    variants = [replace(method, threads=threads) for threads in peer.thread_counts]
                    found.update({variant.label: Theirs(variant, peer) for variant in variants})
                    continue
                connection = shared.get(method.shares) or _start(
                    owned, supervisor, founder(methods, method), layout, say
                )
                if method.shares:
                    shared[method.shares] = connection
                found[method.label] = Ours(method, connection)
        yield found


def founder(methods: Sequence[Method], of: Method) -> Method:
    """Return the method with which shared processes start: the first that drafts, with room for
    drafting ahead if any method does. `ValueError` if they need different processes."""
    sharing = [one for one in methods if of.shares and one.shares == of.shares and one.drafts]
    if not sharing:
        return of
    first = sharing[0]
    if any(_processes(method) != _processes(first) for method in sharing):
        raise ValueError(f"{', '.join(one.name for one in sharing)}: their models differ")
    if all(method.configuration.settings.draft.ahead is False for method in sharing):
        return first
    configuration = first.configuration.over("shared processes", {"draft.ahead": "auto"})
    return replace(first, configuration=configuration)


def _processes(method: Method) -> tuple[object, ...]:
    """Return the settings of the processes, without those that can be part of a request."""
    settings = method.configuration.settings
    draft = settings.draft.model_copy(update={"ahead": "auto"})
    return settings.target, draft, settings.coordinator


def _start(
    owned: ExitStack,
    supervisor: Supervisor,
    method: Method,
    layout: CoreLayout,
    say: Callable[[str], None],
) -> Connection:
    stack = begin_stack(
        supervisor, method.configuration, layout=layout, prefix=f"{method.name}: ", measures=True
    )()
    state = wait_until_ready(supervisor, stack, lambda text: say(f"{method.name}: {text}"))
    return Connection(owned.enter_context(stack.connect()), state, stack)
