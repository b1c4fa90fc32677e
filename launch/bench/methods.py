"""Methods that a benchmark compares: their settings, the processes that decode for them, and the
prompts.

Every method has a stack of processes of its own on the same cores as every other, unless it names
one that it shares: methods that differ in nothing but what travels with a request - the tree,
drafting ahead - need no second one. Knows nothing of how the turns are taken, nor of what comes of
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.launch.bench.assisted import ASSISTED
from dovetail.launch.bench.llama.kinds import read_config, type_of
from dovetail.launch.bench.llama.peer import LLAMA, SERVER, LlamaOptions, read_option
from dovetail.launch.bench.llama.served import OWN, ServerOptions
from dovetail.launch.bench.llama.served import read_option as read_server_option
from dovetail.launch.console.terminal import counted
from dovetail.launch.files.prompts import Prompt, read_prompts
from dovetail.launch.settings.configure import Configuration, parse_setting, read_file
from dovetail.launch.settings.embedded import with_target
from dovetail.protocol.errors import UserError
from dovetail.protocol.policies import POLICIES
from dovetail.protocol.settings import DRAFT_KINDS, HEAD_KINDS
from dovetail.workers.models.checkpoints.gguf.view import files_of, mix_of

NONE = "none"
PEERS = (ASSISTED, LLAMA, SERVER)
"""Other engines."""


@dataclass(frozen=True)
class Method:
    """One way to decode: the name it was given on the command line, and the settings that this
    means."""

    name: str
    configuration: Configuration
    threads: int | None = None
    """The threads of a peer, which is measured with several numbers of them; none: a method of
    ours."""
    shares: str = ""
    """Methods that say the same share a stack of processes; those that say nothing have one of
    their own."""
    llama: LlamaOptions | None = None
    """The options of llama.cpp, if the method is that."""
    server: ServerOptions | None = None
    """The options of llama-server, if the method is that."""

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
        return self.llama is None and self.server is None

    @property
    def weights(self) -> str:
        """Return what it computes with, as its engine calls it."""
        weights = self.configuration.settings.target.weights
        if self.ours:
            return weights
        if self.server is not None:
            return mix_of(Path(self.configuration.settings.target.model)).partition(" ")[0]
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


def read_methods(base: Configuration, texts: Sequence[str]) -> list[Method]:
    """The methods, `none` first; `UserError` for one that is none, or that is named twice."""
    texts = (NONE, *(text for text in texts if text != NONE)) if texts else (NONE, "auto")
    if len(set(texts)) < len(texts):
        raise UserError("a --method is named twice: give each once, and --repeat for more runs")
    return [read_method(base, text) for text in texts]


def beside_llama_server(base: Configuration) -> tuple[str, ...]:
    """Return what is compared where llama-server is named and no method is: our target alone and
    with its draft, llama-server with the same GGUF file alone, and where our draft is a GGUF file,
    too, with that."""
    drafted = bool(files_of(Path(base.settings.draft.model)))
    return (NONE, "auto", SERVER, *([f"{SERVER},draft={OWN}"] if drafted else []))


def tree_of(policy: str) -> dict[str, object]:
    """The settings of a tree that is compared with others by its policy: as it is, but for that
    which adapts itself."""
    return {"tree.policy": policy, "tree.insist": not POLICIES[policy].sizes_itself}


def read_method(base: Configuration, text: str) -> Method:
    """The method that "HEAD,SETTING=VALUE,..." names, over the settings of the whole run; a policy
    is that of their draft's tree."""
    head, *settings = text.split(",")
    origin = f"--method {text}"
    if head in PEERS:
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
            f"--method {head!r} is not a method: name none, a kind of draft (small, dovetail, "
            "...), a tree policy (goodput, dynamic, ...), the folder of a draft, a settings file "
            f"(.toml), {', '.join(PEERS[:-1])} or {PEERS[-1]}"
        )
    values = {}
    options = LlamaOptions() if head == LLAMA else None
    server = ServerOptions() if head == SERVER else None
    for setting in settings:
        if options is not None and (told := read_option(options, setting)) is not None:
            options = told
            continue
        if server is not None and (asked := read_server_option(server, setting)) is not None:
            server = asked
            continue
        name, equals, value = setting.partition("=")
        if not equals:
            raise UserError(
                f"--method {text}: {setting!r} is not a setting: write NAME=VALUE, such as "
                "tree.gamma=6"
            )
        values[name] = parse_setting(name, value, origin)
    return Method(
        text,
        configuration.over(origin, values),
        1 if head in PEERS else None,
        llama=options,
        server=server,
    )


def read_prompt_set(path: Path, limit: int | None) -> PromptSet:
    """The first prompts of a file, under the file's name."""
    return PromptSet(path.stem, tuple(read_prompts(path)[:limit]))
