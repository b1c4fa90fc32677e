"""Our end of llama-server: the GGUF file of our target as it is, alone or with a draft model in a
GGUF file, on the cores of our target and our draft together."""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dovetail.launch.machine.cores import CoreLayout
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import Settings
from dovetail.workers.models.checkpoints.gguf.view import files_of, resolved
from peers.assisted import thread_counts_of
from peers.llama.peer import SERVER, Preparation, Talker, heard

OPTIONS = "draft=FILE.gguf or draft=own (that of our settings), max=N, threads=N, flash=on|off"
OWN = "own"
TRIAL = "Tell me a story about a small owl who is afraid of the dark."
"""The prompt of the replies by which flags are chosen."""
BUILD = "python tests/benchmarks build-llama --out FOLDER"


@dataclass(frozen=True)
class ServerOptions:
    """The options of `--method llama-server` beside settings."""

    draft: str = ""
    """The GGUF file of its draft model; `own`: that of our draft; empty: it decodes alone."""
    max: int = 0
    """Tokens that the draft model proposes at most; 0: what is fastest of a few numbers."""
    threads: int = 0
    flash: str = ""
    """Flash attention, on or off; empty: what is faster."""


def read_option(options: ServerOptions, text: str) -> ServerOptions | None:
    """The options with what "NAME=VALUE" says; None if it is no option of llama-server's,
    `UserError` if it is and the value is not possible."""
    name, _, value = text.partition("=")
    values: dict[str, Any] = {}
    if name in ("threads", "max") and value.isdigit() and int(value):
        values[name] = int(value)
    elif (name == "draft" and value) or (name == "flash" and value in ("on", "off")):
        values[name] = value
    if values:
        return replace(options, **values)
    if name in vars(options):
        raise UserError(f"--method {SERVER}: {text!r} is not possible: write {OPTIONS}")
    return None


def find_program(named: Path | None) -> Path:
    """Return llama-server: the one that is named, or that of the PATH; `UserError` says how to get
    one."""
    found = shutil.which(SERVER) if named is None else str(named.expanduser())
    if found is None:
        raise UserError(
            f"--method {SERVER}: there is no {SERVER} in the PATH: name one with "
            f"--llama-server PATH ({BUILD} builds it)"
        )
    if not Path(found).is_file() or not os.access(found, os.X_OK):
        raise UserError(
            f"--llama-server {found} is no program: name the file {SERVER} ({BUILD} builds it)"
        )
    return Path(found)


def check(settings: Settings, options: ServerOptions, cores: Sequence[int]) -> None:
    """`UserError` for a target or a draft that is in no GGUF file, and for more threads than there
    are cores."""
    if options.threads > len(cores):
        raise UserError(
            f"--method {SERVER}: threads={options.threads} are more than the {len(cores)} cores "
            "of our target and our draft: ask for no more"
        )
    if not files_of(Path(settings.target.model)):
        raise UserError(
            f"--method {SERVER} is given the GGUF file of the target, and "
            f"{settings.target.model or 'the embedded target'} is none that is here as it is: name "
            "a GGUF file, or leave the method out"
        )
    draft_of(settings, options)


def draft_of(settings: Settings, options: ServerOptions) -> str:
    """Return the GGUF file of llama-server's draft model; empty: it has none."""
    if not options.draft:
        return ""
    source = settings.draft.model if options.draft == OWN else resolved(options.draft)
    files = files_of(Path(source)) if source else []
    if not files:
        raise UserError(
            f"--method {SERVER},draft={options.draft}: {source or 'our draft'} is no GGUF file: "
            "name one that is here, or leave the option out"
        )
    return str(files[0])


class ServedPeer(Talker):
    """The process that has llama-server, and the pipe to it."""

    name = SERVER

    def __init__(
        self,
        preparation: Preparation,
        program: Path,
        configuration: Configuration,
        layout: CoreLayout,
        options: ServerOptions,
    ) -> None:
        """Returns when the fastest flags are known; what llama-server has to say if it cannot be
        started is raised."""
        settings = configuration.settings
        self.cores = tuple(sorted({*layout.target.cores, *layout.draft.cores}))
        _, folder, self.codec = preparation.read(configuration)
        self._peak_rss_bytes = 0
        count = len(self.cores)
        command = [
            *(sys.executable, "-P", "-m", "peers.llama.server"),
            *(str(program), str(files_of(folder)[0])),
            f"--draft={draft_of(settings, options)}",
            f"--cores={','.join(map(str, self.cores))}",
            f"--tried={','.join(map(str, thread_counts_of(count)))}",
            f"--threads={options.threads}",
            f"--flash={options.flash}",
            f"--drafted={options.max}",
            f"--trial={json.dumps(self.codec.encode_turns([TRIAL]))}",
        ]
        self._child = preparation.supervisor.start_command(
            f"{SERVER} process", command, reads=True, asks=True
        )
        self.identity = heard(self._child)["engine"]
        self.thread_counts = (options.threads or count,)

    def peak_rss_mb(self) -> float:
        return self._peak_rss_bytes / 1e6

    def _heard_of(self, told: Mapping[str, Any]) -> None:
        self._peak_rss_bytes = told["peak_rss_bytes"]
