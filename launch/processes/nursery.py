"""A script that imports the modules in its arguments once, and forks workers. Its standard input is
a socket, on which it reports the end of the imports. A packet without descriptors names another
module; any other packet is a worker's command as JSON, with descriptors for its standard input and
error, and is answered with the pid of the worker, a child of our parent. If importing has started
threads, which a fork would lack, the command is executed as a new process."""

import gc
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dovetail.launch.processes.child import end_with, name_process

MAX_BYTES = 1 << 16  # bytes of a worker's command
READY = b"ready"
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
"""Environment variables for the number of threads of a library."""
COMMAND = "dovetail.launch.cli"  # the module that commands run in
MODULES = (
    "dovetail.launch.commands.worker",
    "dovetail.workers.loop",
    "dovetail.workers.serving.loading",
    "dovetail.workers.serving.open_target",
    "dovetail.workers.drafters.registry",
    "dovetail.workers.drafters.model",
)
"""Modules that every worker with a model imports."""
PROVING = "dovetail.workers.models.parity.oracle"
"""The module that a worker also imports, with transformers, to prove a model."""


def thread_environment(threads: int) -> dict[str, str]:
    """Return the environment for torch's threads: their number, and sleeping between operations,
    since spinning threads would take the cores of our kernels and of the other worker."""
    return {**dict.fromkeys(THREAD_VARIABLES, str(threads)), "OMP_WAIT_POLICY": "PASSIVE"}


def main() -> None:
    """Import, and fork until our parent has closed its end."""
    parent = int(sys.argv[-1].removeprefix("--parent="))
    end_with(parent)
    name_process("nursery")
    os.environ.update(thread_environment(1))
    talk = socket.socket(fileno=os.dup(0))
    import_at_once(sys.argv[1:-1])
    talk.send(READY)
    while True:
        said, descriptors, _, _ = socket.recv_fds(talk, MAX_BYTES, 2)
        if not said:
            os._exit(0)
        if not descriptors:
            import_at_once([said.decode()])
            continue
        threads = count_threads()
        pid = _grandchild()
        if not pid:
            talk.close()
            return become([*json.loads(said), sys.argv[-1]], *descriptors, execute=threads > 1)
        for descriptor in descriptors:
            os.close(descriptor)
        talk.send(str(pid).encode())


def count_threads() -> int:
    """Return the number of threads of this process, including those of libraries."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def import_at_once(modules: Sequence[str]) -> None:
    """Import modules without garbage collection, and freeze their objects, so that no later
    collection visits them."""
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()


def _grandchild() -> int:
    """Fork twice, so that the process, in a new session, becomes a child of our subreaper; then
    return its pid here, and 0 there."""
    read, write = os.pipe()
    between = os.fork()
    if between:
        os.close(write)
        os.waitpid(between, 0)
        pid = int(os.read(read, 20))
        os.close(read)
        return pid
    between = os.getpid()
    if os.fork():
        os._exit(0)
    os.setsid()  # before its pid is known, which may be used to end its whole group
    os.write(write, str(os.getpid()).encode())
    os.close(read)
    os.close(write)
    while os.getppid() == between:
        time.sleep(0.001)
    return 0


def become(arguments: Sequence[str], stdin: int, stderr: int, *, execute: bool) -> None:
    """Run a command in this process, which was forked for it, with these descriptors instead of the
    inherited ones; `execute`: as a new program."""
    for number, descriptor in ((0, stdin), (2, stderr)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if execute:
        os.execv(sys.executable, [sys.executable, "-P", "-m", COMMAND, *arguments])
    sys.argv = ["dovetail", *arguments]
    importlib.import_module(COMMAND).main()


if __name__ == "__main__":
    main()
