"""Commands of ours, started with what is hostile: how each ended, what it said, and how long and
how much memory that took.

A process that has imported torch and transformers forks for each of them, so that a hundred take
little more than one; what the imports take is measured once, and is part of what is said. Run as a
program, this is that process: it reads a JSON line for each command and answers with one.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import IO

LIMIT_S = 600.0
"""A command that has not ended by then, even on a busy machine, is ended, and has not refused what
it was given; how soon one refuses is judged by its processor time."""
LOOK_EVERY_S = 0.002
SETTLED_S = 0.5
"""Within so long after it has said that it is loaded a coordinator that does not want a worker has
turned it away."""
SERVES = " is loaded, "
"""The words of a worker that serves; then it has seen enough, and is told to end."""


@dataclass(frozen=True)
class Ended:
    """The way in which a command ended."""

    code: int
    """Its exit code; negative: the signal that ended it."""
    said: str
    """The text on stderr."""
    cpu_s: float
    """Processor time without the imports, which are made once for all."""
    grown_mib: float
    """The most memory beyond what there was before it began."""

    @property
    def complaint(self) -> str:
        """The line that says what is wrong, the last one; empty if there is none, or several, or a
        traceback."""
        lines = self.said.splitlines() or [""]
        ours = [line for line in lines if line.startswith("dovetail: ")]
        return lines[-1] if ours == [lines[-1]] and "Traceback" not in self.said else ""

    @property
    def serves(self) -> bool:
        return SERVES in self.said and not self.complaint


class Starter:
    """The process that forks."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, *arguments: str) -> Ended:
        """Run a command line of dovetail to its end, or until it serves."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))


@contextmanager
def starting() -> Iterator[Starter]:
    """A process that forks, until the end of the block."""
    with subprocess.Popen(
        [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Starter(process)
        process.stdin.close()


def main() -> None:
    """Import, and fork for each line of stdin."""
    import dovetail.launch.commands.worker
    import dovetail.workers.draft
    import dovetail.workers.target  # noqa: F401
    from dovetail.workers.models import transformers

    for name in transformers.MODULES:  # each is imported when it is first used
        getattr(transformers, name)
    for line in sys.stdin:
        with tempfile.TemporaryFile() as log:
            print(json.dumps(asdict(_fork(json.loads(line), log))), flush=True)


def _fork(arguments: Sequence[str], log: IO[bytes]) -> Ended:
    child = os.fork()
    if child == 0:
        _become(arguments, log)
    code = _wait(child, log)
    *said, figures = _read(log).split("\0")
    cpu_s, grown_mib = map(float, figures.split()) if said else (0.0, 0.0)
    return Ended(code, (said or [figures])[0].rstrip("\n"), cpu_s, grown_mib)


def _become(arguments: Sequence[str], log: IO[bytes]) -> None:
    """Be the command; after all that it says on stderr come the figures of what it took."""
    from dovetail.launch import cli

    null = os.open(os.devnull, os.O_RDWR)
    for number, file in enumerate((null, null, log.fileno())):
        os.dup2(file, number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115 - they end with the process
    began_s, began_mib, code = time.process_time(), _peak_mib(), 1
    try:
        code = cli.run(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    sys.stderr.write(f"\0{time.process_time() - began_s} {_peak_mib() - began_mib}")
    sys.stderr.flush()
    os._exit(code)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _wait(child: int, log: IO[bytes]) -> int:
    """The exit code of a child, which is told to end when it serves, and made to when it takes too
    long."""
    deadline, told = time.monotonic() + LIMIT_S, False
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if not told and SERVES in _read(log):
            time.sleep(SETTLED_S)
            told = True
            os.kill(child, signal.SIGTERM)
        time.sleep(LOOK_EVERY_S)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _read(log: IO[bytes]) -> str:
    return os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")


if __name__ == "__main__":
    main()
