"""Methods that a benchmark compares: their settings, the processes that decode for them, and the
prompts.

Every method has a stack of processes of its own on the same cores as every other, unless it names
one that it shares: methods that differ in nothing but what travels with a request - the tree,
drafting ahead - need no second one. Knows nothing of how the turns are taken, nor of what comes of
it.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Protocol

from dovetail.launch.bench.assisted import ASSISTED, Peer
from dovetail.launch.bench.assisted import check as check_peer
from dovetail.launch.bench.llama.kinds import read_config, type_of
from dovetail.launch.bench.llama.peer import (
    LLAMA,
    LlamaOptions,
    LlamaPeer,
    Preparation,
    python_for,
    read_option,
)
from dovetail.launch.bench.llama.peer import check as check_llama
from dovetail.launch.commands.worker import thread_count
from dovetail.launch.console.terminal import counted, spinner
from dovetail.launch.files.prompts import Prompt, read_prompts
from dovetail.launch.machine.cores import CoreLayout
from dovetail.launch.processes.connection import Connection, ahead_of
from dovetail.launch.processes.supervise import (
    Supervisor,
    check_stack,
    layout_of,
    start_stack,
    wait_until_ready,
)
from dovetail.launch.settings.configure import Configuration, parse_setting, read_file
from dovetail.launch.settings.embedded import with_draft, with_target
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Finished, RoundRecord
from dovetail.protocol.settings import DRAFT_KINDS, HEAD_KINDS, POLICIES, Sampling

NONE = "none"
MODEL_SUFFIXES = (".json", ".safetensors", ".bin")


@dataclass(frozen=True)
class Method:
    """One way to decode: the name it was given on the command line, and the settings that this
    means."""

    name: str
    configuration: Configuration
    threads: int | None = None
    """Of a peer, which is measured with several numbers of them; none: a method of ours."""
    shares: str = ""
    """Methods that say the same share a stack of processes; those that say nothing have one of
    their own."""
    llama: LlamaOptions | None = None
    """Of llama.cpp; none: it is not."""

    @property
    def ours(self) -> bool:
        return self.threads is None

    @property
    def drafts(self) -> bool:
        return self.configuration.settings.draft.kind != NONE

    @property
    def exact(self) -> bool:
        """Return whether a token that differs from that of `none` is a fault, as it is unless
        another engine computes with types of its own."""
        return self.llama is None

    @property
    def weights(self) -> str:
        """What it computes with, as its engine calls it."""
        weights = self.configuration.settings.target.weights
        if self.ours:
            return weights
        if self.llama is not None:
            return type_of(
                weights,
                read_config(
                    Path(with_target(self.configuration.settings.target).model).expanduser()
                ),
            )
        return "bf16" if weights == "bf16" else "fp32"

    @property
    def label(self) -> str:
        """Tells a peer with so many threads from the same with others."""
        return (
            self.name
            if self.threads is None
            else f"{self.name} with {counted(self.threads, 'thread')}"
        )


@dataclass(frozen=True)
class PromptSet:
    name: str
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Task:
    """One prompt as it is measured: cut to fit the context, and the reply cut where it begins to
    loop."""

    prompt: Prompt
    turn: str
    max_tokens: int
    reference: Finished

    @property
    def shortened(self) -> bool:
        return self.turn != self.prompt.turns[0]


@dataclass(frozen=True)
class Run:
    """One timed reply; the time to the first token is that to the first `together` tokens."""

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
    """What decodes for a method."""

    @property
    def method(self) -> Method:
        """Whose replies these are."""

    def decode(self, task: Task, temperature: float, seed: int) -> Run:
        """One timed reply."""

    def peak_rss_mb(self) -> float:
        """The most memory that its processes ever held, summed, in 10^6 bytes."""

    def identity(self) -> str:
        """Return an identity of the models and the engine, which differs for others of the same
        name."""


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
        drafted = (
            [digest_of(with_draft(self.method.configuration.settings.draft).model)]
            if self.method.drafts
            else []
        )
        targets = (
            worker.fingerprint
            for worker in self.connection.state.workers
            if "target" in worker.roles
        )
        return " + ".join(filter(None, (*targets, *drafted)))


@dataclass(frozen=True)
class Theirs:
    """A peer with so many threads."""

    method: Method
    peer: Peer | LlamaPeer

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
    """Return a digest of a model's folder, or the name of a model that is no folder."""
    folder = Path(model).expanduser()
    if not model or not folder.is_dir():
        return model
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in MODEL_SUFFIXES):
        with path.open("rb") as file:
            digest.update(
                f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\0".encode()
            )
    return digest.hexdigest()[:16]


def sampling_of(method: Method, temperature: float, max_tokens: int) -> Sampling:
    """How a method samples a reply of at most so many tokens."""
    sampling = method.configuration.settings.sampling
    return sampling.model_copy(
        update={"temperature": temperature, "min_tokens": min(sampling.min_tokens, max_tokens)}
    )


def read_methods(base: Configuration, texts: Sequence[str]) -> list[Method]:
    """The methods, `none` first; `UserError` for one that is none, or that is named twice."""
    texts = (NONE, *(text for text in texts if text != NONE)) if texts else (NONE, "auto")
    if len(set(texts)) < len(texts):
        raise UserError("a --method is named twice: give each once, and --repeat for more runs")
    return [read_method(base, text) for text in texts]


def tree_of(policy: str) -> dict[str, object]:
    """The settings of a tree that is compared with others by its policy: as it is, but for that
    which adapts itself."""
    return {"tree.policy": policy, "tree.insist": policy != "goodput"}


def read_method(base: Configuration, text: str) -> Method:
    """The method that "HEAD,SETTING=VALUE,..." names, over the settings of the whole run; a policy
    is that of their draft's tree."""
    head, *settings = text.split(",")
    origin = f"--method {text}"
    if head in (ASSISTED, LLAMA):
        configuration = base.over(origin, {})
    elif head in POLICIES:
        if base.settings.draft.kind == NONE:
            raise UserError(
                f"--method {head} is the draft of the settings with that tree policy, and they "
                "have none: leave --draft none out"
            )
        configuration = base.over(origin, tree_of(head))
    elif head in DRAFT_KINDS:
        configuration = base.over(
            origin,
            {
                "draft.kind": head,
                **({"draft.model": ""} if head in ("ngram", "substitute", *HEAD_KINDS) else {}),
            },
        )
    elif head.endswith(".toml"):
        configuration = base.over(origin, read_file(Path(head)))
    elif "/" in head or Path(head).is_dir():
        configuration = base.over(origin, {"draft.kind": "auto", "draft.model": head})
    else:
        raise UserError(
            f"--method {head!r} is no method: name none, a kind of draft (small, dovetail, "
            "...), a tree policy (goodput, dynamic, ...), the folder of a draft, "
            f"a settings file (.toml), {ASSISTED} or {LLAMA}"
        )
    values = {}
    options = LlamaOptions() if head == LLAMA else None
    for setting in settings:
        if options is not None and (told := read_option(options, setting)) is not None:
            options = told
            continue
        name, equals, value = setting.partition("=")
        if not equals:
            raise UserError(
                f"--method {text}: {setting!r} is no setting: write NAME=VALUE, such as "
                "tree.gamma=6"
            )
        values[name] = parse_setting(name, value, origin)
    return Method(
        text,
        configuration.over(origin, values),
        1 if head in (ASSISTED, LLAMA) else None,
        llama=options,
    )


def read_prompt_set(path: Path, limit: int | None) -> PromptSet:
    """The first prompts of a file, under the file's name."""
    return PromptSet(path.stem, tuple(read_prompts(path)[:limit]))


def check_methods(methods: Sequence[Method], layout: CoreLayout) -> None:
    """`UserError` for the first method that cannot be started, as far as its settings and a look at
    its models tell."""
    for method in methods:
        settings = method.configuration.settings
        if method.llama is not None:
            check_llama(settings, method.llama, sorted({*layout.target.cores, *layout.draft.cores}))
        if not method.ours:
            check_peer(settings, method.name.partition(",")[0])
            continue
        check_stack(method.configuration)
        thread_count("target", settings.target, layout.target)


@contextmanager
def contenders(
    methods: Sequence[Method], *, llama_python: Path | None = None
) -> Iterator[dict[str, Contender]]:
    """Start the processes of each method on the same cores, and yield them by the methods' labels
    once all are ready; the first method is `none`.

    All methods are looked at before a process is started. `llama_python`: the interpreter that has
    llama.cpp, where it is not ours.
    """
    layout = layout_of(methods[0].configuration.settings)
    check_methods(methods, layout)
    python = (
        python_for(llama_python) if any(method.llama is not None for method in methods) else None
    )
    with ExitStack() as owned:
        supervisor = owned.enter_context(Supervisor())
        preparation = Preparation(supervisor, python) if python is not None else None
        found: dict[str, Contender] = {}
        shared: dict[str, Connection] = {}
        with spinner() as say:
            for method in methods:
                say(f"starting {method.name}")
                if not method.ours:
                    peer = owned.enter_context(
                        closing(_peer(supervisor, preparation, method, layout))
                    )
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


def _peer(
    supervisor: Supervisor, preparation: Preparation | None, method: Method, layout: CoreLayout
) -> Peer | LlamaPeer:
    if method.llama is None:
        return Peer(supervisor, method.configuration, layout)
    assert preparation is not None
    return LlamaPeer(preparation, method.configuration, layout, method.llama)


def founder(methods: Sequence[Method], of: Method) -> Method:
    """The method whose settings the processes of `of` are started with: where several share them,
    the first of these that drafts, with room for drafting ahead where one of them wants it.
    `ValueError` where they would need different processes.
    """
    sharing = (
        [method for method in methods if method.shares == of.shares and method.drafts]
        if of.shares
        else []
    )
    if not sharing:
        return of
    first = sharing[0]
    if any(_processes(method) != _processes(first) for method in sharing):
        raise ValueError(
            f"{', '.join(method.name for method in sharing)} cannot share processes: their "
            "models differ, or what they are loaded as"
        )
    waits = all(method.configuration.settings.draft.ahead is False for method in sharing)
    return (
        first
        if waits
        else replace(
            first,
            configuration=first.configuration.over("shared processes", {"draft.ahead": "auto"}),
        )
    )


def _processes(method: Method) -> tuple[object, ...]:
    """What the processes are started with, but for what a request can say as well."""
    settings = method.configuration.settings
    return (
        settings.target,
        settings.draft.model_copy(update={"ahead": "auto"}),
        settings.coordinator,
    )


def _start(
    owned: ExitStack,
    supervisor: Supervisor,
    method: Method,
    layout: CoreLayout,
    say: Callable[[str], None],
) -> Connection:
    """A stack of processes that is ready."""
    stack = start_stack(
        supervisor, method.configuration, layout=layout, prefix=f"{method.name}: ", anew=True
    )
    state = wait_until_ready(supervisor, stack, lambda text: say(f"{method.name}: {text}"))
    return Connection(owned.enter_context(stack.connect()), state, stack)
