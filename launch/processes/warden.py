"""A process that outlives its supervisor by some seconds, and ends what that has left behind.

The kernel tells a supervisor's children of its death with SIGTERM (`child.py`), which a process
that is stopped, or hangs outside of Python, does not heed. The supervisor names each of its
children here when it starts it; when it is gone they have some seconds to end by themselves, and
are then killed, and the folders of their sockets removed. Run as a script with that grace in
seconds, without the packages that are installed: it is started beside everything else and needs
none of them. Told `apart` too, it is a grandchild of the supervisor, and a process that only waits
for it is the child: Ray kills the children of a process of its own that it ends, and knows no
others.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
CHILD, FOLDER = b"child", b"folder"
APART = "apart"


def main() -> None:
    """Heed the words on stdin, `child PID` and `folder PATH`, a line each, until it is closed; then
    see to what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            number, signal.SIG_IGN
        )  # whoever ends all of us at once means the others: this one ends with its supervisor
    if APART in sys.argv and (apart := os.fork()):
        os.waitpid(apart, 0)
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_NAME, b"dovetail:warden", 0, 0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)  # it may be stopped when its supervisor goes
    children: list[int] = []
    folders: list[str] = []
    for line in sys.stdin.buffer:
        kind, _, value = line.rstrip(b"\n").partition(b" ")
        if kind == FOLDER:
            folders.append(os.fsdecode(value))
        elif kind == CHILD:
            children = [*_alive(children, 0.0), *_watched(int(value))]
    left = _alive(children, 0.0)
    for child in left:
        _signal(child, signal.SIGCONT)  # one that is stopped heeds SIGTERM then
    end_s = time.monotonic() + float(sys.argv[1])
    while left and (wait_s := end_s - time.monotonic()) > 0:
        left = _alive(left, wait_s)
    for child in left:
        _signal(child, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _watched(pid: int) -> list[int]:
    """A descriptor of this process, which no other one that is given its number later has; none if
    it has ended already."""
    try:
        return [os.pidfd_open(pid)]
    except ProcessLookupError:
        return []


def _alive(children: list[int], wait_s: float) -> list[int]:
    """Wait until a child ends, at most `wait_s`; close those that have ended and return the
    others."""
    poll = select.poll()
    for child in children:
        poll.register(child, select.POLLIN)
    ended = {child for child, _ in poll.poll(1e3 * wait_s)}
    for child in ended:
        os.close(child)
    return [child for child in children if child not in ended]


def _signal(child: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(child, number)


if __name__ == "__main__":
    main()
