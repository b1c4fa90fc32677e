"""The methods of a benchmark: their settings, processes and prompts. Methods that differ only in
fields of a request share their processes."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from dovetail.launch.console.terminal import counted
from dovetail.launch.files.prompts import Prompt, read_prompts
from dovetail.launch.machine.cores import CoreLayout
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import Configuration, parse_setting, read_file
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Result
from dovetail.protocol.settings import DRAFT_KINDS, HEAD_KINDS, Sampling, Settings
from dovetail.protocol.settings.tree import POLICIES
from dovetail.workers.models.checkpoints.gguf.view import files_of

CHECKOUT = Path(__file__).resolve().parents[2] / "tests"
NAMES = ("assisted", "llama.cpp", "llama-server")


@dataclass(frozen=True)
class PeerReply:
    """A reply of a peer. Its first `together` tokens are from the first round, which also computed
    the prompt."""

    result: Result
    together: int


class Peer(Protocol):
    """An engine in a separate process."""

    @property
    def identity(self) -> str:
        """The engine that decodes; the models come from the settings."""

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """The numbers of threads with which it is measured."""

    def decode(
        self, turns: Sequence[str], *, sampling: Sampling, max_tokens: int, seed: int, threads: int
    ) -> PeerReply:
        """Decode one reply to its end."""

    def peak_rss_mb(self) -> float:
        """Its peak memory, in 10^6 bytes."""

    def close(self) -> None:
        """End the connection; the process ends with its supervisor."""


@dataclass
class Room:
    """Resources that the peers of a run share."""

    supervisor: Supervisor
    programs: Mapping[str, Path | None]
    """Method -> its program or Python on the command line."""
    made: dict[str, Any] = field(default_factory=dict)  # what peers create once and share


class PeerKind(Protocol):
    """A kind of peer, named by a method."""

    @property
    def exact(self) -> bool:
        """Whether it computes the target's own tokens at temperature 0."""

    @property
    def defaults(self) -> Any:
        """Its default options, a dataclass."""

    def read_option(self, options: Any, text: str) -> Any:
        """Return the options with "NAME=VALUE" applied; None if the peer has no such option.
        `UserError` for an invalid value."""

    def weights(self, settings: Settings) -> str:
        """Return the type of weights it computes with, in the engine's own terms."""

    def check(self, settings: Settings, options: Any, cores: Sequence[int]) -> None:
        """Raise `UserError` for settings that the peer does not implement as we do."""

    def find(self, program: Path | None) -> None:
        """Raise `UserError` if a named or required program is missing."""

    def open(
        self, room: Room, configuration: Configuration, layout: CoreLayout, options: Any
    ) -> Peer:
        """Start its process and return when it is ready."""


@cache
def peers() -> Mapping[str, PeerKind]:
    """Return the kinds of peers by the names of their methods; empty outside a checkout."""
    if not (CHECKOUT / "peers").is_dir():
        return {}
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))
    paths = (os.environ.get("PYTHONPATH"), str(CHECKOUT))  # for their processes
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    kinds: Mapping[str, PeerKind] = import_module("peers.kinds").KINDS
    return kinds


NONE, AUTO = "none", "auto"
"""The methods of the target alone, and with the draft of the settings."""
SERVER, OWN = "llama-server", "own"
"""The peer that reads the target's GGUF file itself, and its setting for our draft's file."""


@dataclass(frozen=True)
class Method:
    """One way to decode: its name on the command line, and the settings that the name stands
    for."""

    name: str
    configuration: Configuration
    threads: int | None = None
    """A peer's number of threads, one of several; None: not a peer."""
    shares: str = ""
    """Methods with the same text share processes; those without one have their own."""
    peer: PeerKind | None = None  # the kind of the other engine; None: not a peer
    options: Any = None  # the options of the peer

    @property
    def head(self) -> str:
        return self.name.partition(",")[0]

    @property
    def ours(self) -> bool:
        return self.threads is None

    @property
    def drafts(self) -> bool:
        return self.configuration.settings.draft.kind != NONE

    @property
    def exact(self) -> bool:
        """True if a token that differs from `none` is an error; not for engines with other number
        types."""
        return self.peer is None or self.peer.exact

    @property
    def weights(self) -> str:
        """Return the type of weights it computes with, in the engine's own terms."""
        settings = self.configuration.settings
        return settings.target.weights if self.peer is None else self.peer.weights(settings)

    @property
    def label(self) -> str:
        """Distinguishes a peer by its number of threads."""
        if self.threads is None:
            return self.name
        return f"{self.name} with {counted(self.threads, 'thread')}"


@dataclass(frozen=True)
class PromptSet:
    name: str
    prompts: tuple[Prompt, ...]


def read_methods(base: Configuration, texts: Sequence[str]) -> list[Method]:
    """The methods, `none` first; `UserError` for an unknown or repeated one."""
    texts = (NONE, *(text for text in texts or own_methods(base) if text != NONE))
    if len(set(texts)) < len(texts):
        raise UserError("a --method is given twice: give each once, and use --repeat for more runs")
    return [read_method(base, text) for text in texts]


def own_methods(base: Configuration) -> tuple[str, ...]:
    """Return the methods of the settings: the target alone, and with its draft if there is one."""
    return (NONE,) if base.settings.draft.kind == NONE else (NONE, AUTO)


def beside_llama_server(base: Configuration) -> tuple[str, ...]:
    """Return the methods if only llama-server is named: our target alone and with its draft, and
    llama-server with the same GGUF file, also with our draft if that is a GGUF file."""
    drafted = bool(files_of(Path(base.settings.draft.model)))
    return (*own_methods(base), SERVER, *([f"{SERVER},draft={OWN}"] if drafted else []))


def tree_of(policy: str) -> dict[str, object]:
    """The settings of a tree that is compared with others by its policy: fixed, unless the policy
    adapts it."""
    return {"tree.policy": policy, "tree.insist": not POLICIES[policy].sizes_itself}


def read_method(base: Configuration, text: str) -> Method:
    """Return the method "HEAD,SETTING=VALUE,..." based on the settings of the whole run; a policy
    applies to their draft's tree."""
    head, *settings = text.split(",")
    origin = f"--method {text}"
    peer = peers().get(head) if head in NAMES else None
    if peer is not None:
        configuration = base.over(origin, {})
    elif head in NAMES:
        raise UserError(
            f"--method {head} is part of a checkout: run bench there, or measure its server with "
            "--url"
        )
    elif head == AUTO:
        configuration = base
    elif head in POLICIES:
        if base.settings.draft.kind == NONE:
            raise UserError(
                f"--method {head} is a tree policy and needs a draft: leave out --draft none"
            )
        configuration = base.over(origin, tree_of(head))
    elif head in DRAFT_KINDS:
        configuration = base.over(
            origin,
            {
                "draft.kind": head,
                **(
                    {"draft.model": ""}
                    if head in ("mtp", "ngram", "substitute", *HEAD_KINDS)
                    else {}
                ),
            },
        )
    elif head.endswith(".toml"):
        configuration = base.over(origin, read_file(Path(head)))
    elif "/" in head or Path(head).is_dir():
        configuration = base.over(origin, {"draft.kind": "auto", "draft.model": head})
    else:
        raise UserError(
            f"--method {head!r} is not a method: name none, a kind of draft (small, dovetail, "
            "...), a tree policy (goodput, dynamic, ...), the folder of a draft, a settings file "
            f"(.toml), {', '.join(NAMES[:-1])} or {NAMES[-1]}"
        )
    values = {}
    options = peer and peer.defaults
    for setting in settings:
        if peer is not None and (read := peer.read_option(options, setting)) is not None:
            options = read
            continue
        name, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"--method {text}: {setting!r} is not NAME=VALUE, such as tree.gamma=6")
        values[name] = parse_setting(name, value, origin)
    return Method(
        text,
        configuration.over(origin, values),
        None if peer is None else 1,
        peer=peer,
        options=options,
    )


def read_prompt_set(path: Path, limit: int | None) -> PromptSet:
    return PromptSet(path.stem, tuple(read_prompts(path)[:limit]))
