"""A script that ends the children of a killed supervisor if they ignore the kernel's SIGTERM
(`child.py`) for some seconds (its argument), and removes their socket folders. With `apart` it is a
grandchild of the supervisor, since Ray kills the children of its processes. Needs no packages."""

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
CHILD, FOLDER = b"child", b"folder"
APART = "apart"
LOOK_S = 0.02  # interval at which the children of a lost supervisor are polled


def main() -> None:
    """Read lines `child PID` and `folder PATH` from stdin until it is closed; then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # a signal to the whole group is for the others: this process ends with its supervisor
        signal.signal(number, signal.SIG_IGN)
    if APART in sys.argv and (apart := os.fork()):
        os.waitpid(apart, 0)
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_NAME, b"dovetail:warden", 0, 0, 0)
    # it may be stopped (SIGSTOP) when its supervisor ends
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    children: dict[int, int] = {}
    folders: list[str] = []
    for line in sys.stdin.buffer:
        kind, _, value = line.rstrip(b"\n").partition(b" ")
        if kind == FOLDER:
            folders.append(os.fsdecode(value))
        elif kind == CHILD:
            children = {**_alive(children), **_watched(int(value))}
    left = _alive(children)
    for child in left:
        _signal(child, signal.SIGCONT)  # a stopped process handles SIGTERM only after SIGCONT
    end_s = time.monotonic() + float(sys.argv[1])
    while left and time.monotonic() < end_s:
        time.sleep(LOOK_S)
        left = _alive(left)
    for child in left:
        _signal(child, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _watched(pid: int) -> dict[int, int]:
    """A process and a descriptor of its folder in /proc, which never refers to a later process with
    the same pid; empty if it has already ended. pidfd_open(2) is newer than Linux 4.18."""
    try:
        return {pid: os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY)}
    except FileNotFoundError:
        return {}


def _alive(children: dict[int, int]) -> dict[int, int]:
    """Return the running children; close the descriptors of the others."""
    ended = {pid: folder for pid, folder in children.items() if _has_ended(folder)}
    for folder in ended.values():
        os.close(folder)
    return {pid: folder for pid, folder in children.items() if pid not in ended}


def _has_ended(folder: int) -> bool:
    try:
        with open(f"/proc/self/fd/{folder}/stat", "rb") as stat:  # noqa: PTH123 - pathlib takes time to import
            return stat.read().rpartition(b") ")[2][:1] in b"ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _signal(child: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)


if __name__ == "__main__":
    main()
