"""The process of a worker that is to stay: ours until it is in place."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dovetail.launch.console.terminal import note
from dovetail.launch.files.directory import remove_unused_logs, runtime_directory
from dovetail.launch.processes.supervise import GRACE_S, Child


class Newcomer:
    """A worker's process that ends with this block, unless it `stays`."""

    def __init__(self, arguments: Sequence[str], name: str) -> None:
        self._arguments, self._name, self._stays = arguments, name, False

    def __enter__(self) -> "Newcomer":
        """Start the worker in a session of its own, which neither Ctrl-C nor the end of the
        terminal reaches."""
        folder = runtime_directory()
        remove_unused_logs(folder)
        self._path = folder / f"worker-{self._name.replace(os.sep, '_')}-{os.getpid()}.log"
        log = self._path.open("a+b")
        fcntl.flock(log, fcntl.LOCK_EX)  # held for as long as the worker has the file open
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dovetail.launch.cli", *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
        self.child = Child(f"{self._name} worker", process, log)
        self._former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        return self

    def stays(self) -> None:
        self._stays = True

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._former)
        self.child.log.close()
        if self._stays:
            note(f"the output of {self._name} goes to {self._path}")
            self.child.process.returncode = (
                0  # it is nobody's child from here on: not waited for, and not complained of
            )
            return
        self.child.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.child.process.wait(GRACE_S)
        if not self.child.ended:
            self.child.process.kill()
            self.child.process.wait()
        Path(self._path).unlink(missing_ok=True)
