"""The methods of a benchmark: their settings, processes and prompts. Methods that differ only in
fields of a request share their processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.launch.bench.peers import NAMES, PeerKind, peers
from dovetail.launch.console.terminal import counted
from dovetail.launch.files.prompts import Prompt, read_prompts
from dovetail.launch.settings.configure import Configuration, parse_setting, read_file
from dovetail.protocol.errors import UserError
from dovetail.protocol.policies import POLICIES
from dovetail.protocol.settings import DRAFT_KINDS, HEAD_KINDS
from dovetail.workers.models.checkpoints.gguf.view import files_of

NONE = "none"
SERVER, OWN = "llama-server", "own"
"""The peer that reads the target's GGUF file itself, and its setting for our draft's file."""


@dataclass(frozen=True)
class Method:
    """One way to decode: its name on the command line, and the settings that the name stands
    for."""

    name: str
    configuration: Configuration
    threads: int | None = None
    """A peer's threads, of which several numbers are measured; None: a method of ours."""
    shares: str = ""
    """Methods with the same text share processes; those with an empty one have their own."""
    peer: PeerKind | None = None  # the kind of the other engine; None: a method of ours
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
        """True if a token that differs from that of `none` is an error: not for other engines with
        other number types."""
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
    """The methods, `none` first; `UserError` for one that is unknown, or named twice."""
    texts = (NONE, *(text for text in texts if text != NONE)) if texts else (NONE, "auto")
    if len(set(texts)) < len(texts):
        raise UserError("a --method is named twice: give each once, and --repeat for more runs")
    return [read_method(base, text) for text in texts]


def beside_llama_server(base: Configuration) -> tuple[str, ...]:
    """Return the methods if only llama-server is named: our target alone and with its draft, and
    llama-server with the same GGUF file, also with our draft if that is a GGUF file."""
    drafted = bool(files_of(Path(base.settings.draft.model)))
    return (NONE, "auto", SERVER, *([f"{SERVER},draft={OWN}"] if drafted else []))


def tree_of(policy: str) -> dict[str, object]:
    """The settings of a tree that is compared with others by its policy: as it is, but for that
    which adapts itself."""
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
    elif head in POLICIES:
        if base.settings.draft.kind == NONE:
            raise UserError(
                f"--method {head} is a tree policy and needs a draft: leave --draft none out"
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
