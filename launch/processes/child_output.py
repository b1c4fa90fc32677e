"""Reads the stderr of processes, how they ended, and which of them are registered."""

import os
import signal
import time
from collections.abc import Iterable, Mapping

from dovetail.launch.processes.child import LET_GO
from dovetail.launch.processes.serving.site import Ending
from dovetail.launch.processes.supervise import Child
from dovetail.protocol.errors import printable
from dovetail.protocol.messages import WorkerState

LAST_WORDS_S = 0.3  # seconds that a stuck process has to dump its stacks
LOG_BYTES = 1 << 20
"""The file of a process's output is truncated after this many bytes have been read."""


def ending_of(child: Child) -> Ending:
    """Return how a process has ended: its last line with an exit code, but not with a signal that
    ended it at once."""
    code = child.process.returncode
    last = [] if code == -signal.SIGKILL else child.last_words()[-1:]
    last_line = printable(last[0].removeprefix("dovetail: ")) if last else ""
    return Ending(code, child.how_it_ended(), child.was_mistaken, code == LET_GO, last_line)


def let_speak_and_kill(child: Child) -> None:
    """Have a stuck process dump its stacks, if it can, and end it; its end is noticed as with any
    other."""
    child.process.send_signal(signal.SIGUSR1)
    time.sleep(LAST_WORDS_S)
    child.process.kill()
    child.process.wait()


def registered(ours: Mapping[str, tuple[str, int]], workers: Iterable[WorkerState]) -> set[str]:
    """Return which of our processes, given by machine and pid, are registered as workers; pids of
    other machines may be equal."""
    there = {(worker.host, worker.pid) for worker in workers}
    return {name for name, at in ours.items() if at in there}


class Ear:
    """Reads the stderr of a process line by line, also after it has ended."""

    def __init__(self, child: Child) -> None:
        self._log = os.dup(child.log.fileno())
        self._read, self._begun = 0, b""

    def listen(self) -> list[str]:
        """The complete lines since the last call; a long file is truncated."""
        said = os.pread(self._log, LOG_BYTES, self._read)
        self._read += len(said)
        if self._read > LOG_BYTES and self._read == os.fstat(self._log).st_size:
            os.ftruncate(self._log, 0)
            self._read = 0
        *lines, self._begun = (self._begun + said).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def close(self) -> None:
        os.close(self._log)
