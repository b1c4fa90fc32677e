"""Our end of llama.cpp: its file made from the target, its process started on the cores of our
target and our draft together, asked reply by reply.

Methods that differ in what the process is told share the file. While another method has its turn
the process sleeps. Above temperature 0 it draws by itself; at 0 it chooses as the target does, but
for its arithmetic: activations rounded to the type of the weights, a cache of 16-bit floats.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.launch.bench.methods import PeerReply
from dovetail.launch.machine.cores import CoreLayout
from dovetail.launch.processes.supervise import Child, Supervisor
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.models import with_target
from dovetail.protocol.errors import DovetailError, UserError
from dovetail.protocol.messages import VocabularyFacts
from dovetail.protocol.settings import Sampling, Settings, TargetSettings
from dovetail.runtime.text.tokenizer import TextCodec
from dovetail.workers.models.checkpoints.gguf.view import FILE
from peers.assisted import Engine, near_the_fastest, result_of, thread_counts_of
from peers.generated import Generated, Round
from peers.llama.kinds import read_config, type_of, uncut, unfit
from peers.llama.lines import Question
from peers.llama.start import INSTALL, command_of, find_python

LLAMA, SERVER = "llama.cpp", "llama-server"
LOOKED_UP = 10
"""Tokens that llama-cpp-python's prompt lookup proposes at a time, unless told otherwise: its own
default."""
OPTIONS = "threads=N, draft=lookup, lookup=N (tokens at a time), cache=f16|f32"


@dataclass(frozen=True)
class LlamaOptions:
    """The options of `--method llama.cpp` beside settings."""

    threads: int | None = None
    """The number of threads; None: the fastest of a few numbers."""
    draft: str = ""
    """`lookup`, the one draft that the package has."""
    lookup: int = LOOKED_UP
    cache: str = "f16"

    @property
    def proposed(self) -> int:
        """Tokens that its draft proposes at a time."""
        return self.lookup if self.draft else 0


def read_option(options: LlamaOptions, text: str) -> LlamaOptions | None:
    """The options with what "NAME=VALUE" says; None if it is no option of llama.cpp's, `UserError`
    if it is and the value is not possible."""
    name, _, value = text.partition("=")
    values: dict[str, Any] = {**vars(options)}
    if name in ("threads", "lookup") and value.isdigit() and int(value):
        values[name] = int(value)
    elif (name, value) in (("draft", "lookup"), ("cache", "f16"), ("cache", "f32")):
        values[name] = value
    elif name in values:
        raise UserError(
            f"--method {LLAMA}: {text!r} is not possible: write {OPTIONS}; of drafts "
            "llama-cpp-python has its prompt lookup alone"
        )
    else:
        return None
    return LlamaOptions(**values)


def check(settings: Settings, options: LlamaOptions, cores: Sequence[int]) -> None:
    """`UserError` for more threads than there are cores, and for a target that is not written as
    GGUF here, as far as a look at it tells."""
    if options.threads is not None and options.threads > len(cores):
        raise UserError(
            f"--method {LLAMA}: threads={options.threads} are more than the {len(cores)} cores "
            "of our target and our draft: ask for no more"
        )
    folder = Path(with_target(settings.target).model).expanduser()
    if (folder / "config.json").is_file():
        _check_kind(folder, settings.target)


def _check_kind(folder: Path, target: TargetSettings) -> None:
    if target.weights == FILE:
        raise UserError(
            f"--method {LLAMA} is given models in safetensors, and {folder.name} is a GGUF file: "
            f"take --method {SERVER}, which is given the very file"
        )
    config = read_config(folder)
    reason = unfit(config) or uncut(config, type_of(target.weights, config))
    if reason:
        raise UserError(
            f"--method {LLAMA} is given Llama models as GGUF, and {folder.name} has {reason}: "
            "leave the method out"
        )


def python_for(python: Path | None) -> Path:
    """The Python with llama.cpp; `UserError` says how to get one."""
    if python is not None and not python.is_file():
        raise UserError(
            f"--llama-python {python} {'is not a file' if python.exists() else 'is not there'}: "
            "name the Python that has llama-cpp-python"
        )
    found = find_python(python)
    if found is None:
        who = f"--llama-python {python}" if python is not None else "this Python"
        raise UserError(
            f"--method {LLAMA}: llama-cpp-python is not installed: {who} cannot import "
            f"llama_cpp and gguf. To get them: {INSTALL}"
        )
    return found


@dataclass(frozen=True)
class _Prepared:
    """A target as llama.cpp is given it; `folder`: its own."""

    folder: Path
    kind: str
    file: Path
    codec: TextCodec


@dataclass
class Preparation:
    """The files of one run, in a folder that goes with it; each is made once."""

    supervisor: Supervisor
    python: Path | None = None
    """The Python that has llama.cpp; None: no method needs it."""
    _made: dict[str, _Prepared] = field(default_factory=dict)

    def of(self, configuration: Configuration) -> _Prepared:
        """Return the files of a target; the GGUF itself is written by whoever is the first to load
        it."""
        key = configuration.settings.target.model_dump_json()
        if key not in self._made:
            self._made[key] = self._make(configuration)
        return self._made[key]

    def _make(self, configuration: Configuration) -> _Prepared:
        out, folder, codec = self.read(configuration)
        target = configuration.settings.target
        _check_kind(folder, target)
        kind = type_of(target.weights, read_config(folder))
        return _Prepared(folder, kind, out / f"{kind}.gguf", codec)

    def read(self, configuration: Configuration) -> tuple[Path, Path, TextCodec]:
        """Return a folder for files of a target, its own folder, and its tokenizer."""
        out = Path(tempfile.mkdtemp(prefix="dovetail-llama-"))
        self.supervisor.owns_folder(out)
        child = self.supervisor.start(
            f"{LLAMA}: reading the target",
            configuration.arguments("target"),
            module="peers.llama.prepare",
            reads=True,
        )
        told = heard(child)
        self.supervisor.end([child])
        folder = Path(told["folder"])
        codec = TextCodec(
            (folder / "tokenizer.json").read_bytes(),
            VocabularyFacts.model_validate_json(json.dumps(told["facts"])),
        )
        return out, folder, codec


class Talker(Engine):
    """A process that is asked line by line, and the pipe to it."""

    codec: TextCodec
    name: str
    """The name of its method."""

    def decode(
        self, turns: Sequence[str], *, sampling: Sampling, max_tokens: int, seed: int, threads: int
    ) -> PeerReply:
        codec = self.codec
        prompt = codec.encode_turns(turns)
        how = {
            "temp": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
        }
        told = self._asked(Question(prompt, max_tokens, codec.facts.end, how, seed, threads))
        generated = Generated(
            tuple(told["tokens"]), told["began_ns"], tuple(Round(*each) for each in told["rounds"])
        )
        self._heard_of(told)
        return PeerReply(
            result_of(generated, codec, prompt, seed, codec.facts.end),
            generated.rounds[0].committed,
        )

    def close(self) -> None:
        """The process ends with its supervisor."""

    def _heard_of(self, told: Mapping[str, Any]) -> None:
        """Hear what else a reply comes with."""

    def _asked(self, question: Question) -> Mapping[str, Any]:
        asks = self._child.process.stdin
        assert asks is not None
        try:
            asks.write(json.dumps(vars(question)).encode() + b"\n")
            asks.flush()
        except BrokenPipeError:
            self._child.process.wait()
            raise self._child.failure() from None
        told = heard(self._child)
        if "error" in told:
            raise DovetailError(f"{self.name}: {told['error']}")
        return told


class LlamaPeer(Talker):
    """The process of llama.cpp, and the pipe to it."""

    name = LLAMA

    def __init__(
        self,
        preparation: Preparation,
        configuration: Configuration,
        layout: CoreLayout,
        options: LlamaOptions,
    ) -> None:
        """Returns when the model is loaded; what the process has to say if it cannot be is
        raised."""
        self.cores = tuple(sorted({*layout.target.cores, *layout.draft.cores}))
        assert preparation.python is not None
        prepared = preparation.of(configuration)
        self.codec, cores = prepared.codec, ",".join(map(str, self.cores))
        more = (f"--cores={cores}", f"--cache={options.cache}", f"--lookup={options.proposed}")
        command = command_of(
            preparation.python,
            "peers.llama.generation",
            (str(prepared.folder), prepared.kind, str(prepared.file), *more),
        )
        self._child = preparation.supervisor.start_command(
            f"{LLAMA} process", command, reads=True, asks=True
        )
        self.identity = f"{heard(self._child)['engine']} {prepared.kind}, cache {options.cache}"
        tried = (
            (options.threads,) if options.threads is not None else thread_counts_of(len(self.cores))
        )
        self.thread_counts = near_the_fastest({threads: self._try(threads) for threads in tried})


def heard(child: Child) -> Mapping[str, Any]:
    """The next line that a process says; what it has to say if it ends instead."""
    assert child.process.stdout is not None
    line = child.process.stdout.readline()
    if not line:
        child.process.wait()
        raise child.failure()
    told: Mapping[str, Any] = json.loads(line)
    return told
