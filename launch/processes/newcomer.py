"""The process of a worker that will outlive us: ours until it is in place."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from dovetail.launch.console.terminal import note
from dovetail.launch.files.directory import remove_unused_logs, runtime_directory
from dovetail.launch.processes.supervise import GRACE_S, Child, Unwinding


class Newcomer(Unwinding):
    """A worker's process that ends with this block, unless it `stays`. Signals are handled once the
    process is ours."""

    def __init__(self, arguments: Sequence[str], name: str) -> None:
        super().__init__()
        self._arguments, self._name, self._stays = arguments, name, False
        self._path = runtime_directory() / f"worker-{name.replace(os.sep, '_')}-{os.getpid()}.log"
        self._child: Child | None = None

    def start(self) -> Child:
        """Start the worker in a new session, out of reach of Ctrl-C and the end of the terminal."""
        remove_unused_logs(self._path.parent)
        log = self._path.open("a+b")
        fcntl.flock(log, fcntl.LOCK_EX)  # held for as long as the worker has the file open
        self._busy = True
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dovetail.launch.cli", *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
        self._child = Child(f"{self._name} worker", process, log)
        self._unblock()
        return self._child

    def stays(self) -> None:
        self._stays = True

    def __exit__(self, *_: object) -> None:
        """End the worker if it does not stay. Nothing interrupts this: it takes `GRACE_S` at
        most."""
        self._busy = True
        try:
            if self._child is not None:
                self._part_with(self._child)
        finally:
            super().__exit__()

    def _part_with(self, child: Child) -> None:
        child.log.close()
        if self._stays:
            child.process.returncode = (
                0  # from here on it is not our child: no wait, no ResourceWarning
            )
            note(f"the output of {self._name} goes to {self._path}")
            return
        child.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(GRACE_S)
        if not child.ended:
            child.process.kill()
            child.process.wait()
        self._path.unlink(missing_ok=True)
