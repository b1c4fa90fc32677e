"""Signals of a supervised process: it ends on request or when its supervisor ends, and dumps its
stacks on SIGUSR1."""

import contextlib
import ctypes
import errno
import faulthandler
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from dovetail.protocol.errors import UserError

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 15, 22, 38
SECCOMP_MODE_FILTER, SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = 2, 0x50000, 0x7FFF0000
CLONE3 = 435  # the number of the system call, on every architecture
PROGRAM = "dovetail"
MORE_FILES = "raise the limit with `ulimit -n 4096` (LimitNOFILE=4096 in a unit of systemd)"
LEAST_FILES = 64  # open files of any of our processes, with some margin
SLICE_S, SHARE, LONGEST_PAUSE_S = 0.005, 0.25, 1.0
"""CPU seconds between the pauses of a paced process, its share of the quota, and the longest pause
in seconds: native code is not interrupted, and the pause after a long call is limited to this."""
_part = 0.0  # the share of a quota that this process may use; 0: it is not paced
LET_GO = 3
"""Exit code of a worker that was drained, replaced or dismissed: it must not be restarted."""


def check_files() -> None:
    """`UserError` if this process may not have `LEAST_FILES` open; its soft limit is raised to
    that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST_FILES:
        text = f"dovetail needs {LEAST_FILES} open files, and may have {hard}: {MORE_FILES}"
        raise UserError(text)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_FILES, hard))


def end_with(parent: int) -> None:
    """Make the kernel end this process when its parent ends, even by SIGKILL; exit at once if it
    has already ended."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(0)


def _prctl(option: int, *arguments: int) -> None:
    numbers = map(ctypes.c_ulong, (*arguments, 0, 0, 0, 0)[:4])
    if LIBC.prctl(option, *numbers) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{os.strerror(error)}: prctl({option})")


def let_threads_start() -> None:
    """Make clone3(2) return ENOSYS in this process and its children where it returns EPERM, as in
    containers with an engine that predates it: glibc falls back to clone(2) only after ENOSYS."""
    if LIBC.syscall(CLONE3, None, 0) == 0 or ctypes.get_errno() != errno.EPERM:
        return
    steps = (  # struct sock_filter of linux/filter.h; of two errors the newer filter's counts
        (0x20, 0, 0, 0),  # load the system call number
        (0x15, 0, 1, CLONE3),  # another call: skip a step
        (0x06, 0, 0, SECCOMP_RET_ERRNO | errno.ENOSYS),
        (0x06, 0, 0, SECCOMP_RET_ALLOW),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))


def end_when_told() -> None:
    """On SIGTERM, and SIGHUP unless that is ignored (nohup), this process unwinds, closes its
    resources and exits with 0."""

    def leave(_signal: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(0)

    def hang_up(_signal: int, _frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hang_up)


def handle_signals(parent: int | None) -> None:
    """End with the process that started this one, if any, and on SIGTERM; write the stacks of all
    threads to stderr on SIGUSR1."""
    if parent is not None:
        end_with(parent)
    end_when_told()
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def name_process(role: str, model: str = "") -> None:
    """Set the command line of this process to `dovetail ROLE MODEL`, cut to the length of the
    original one, and its name to the first 15 bytes of `dovetail:ROLE`, the kernel's limit."""
    LIBC.prctl(PR_SET_NAME, f"{PROGRAM}:{role}".encode(), 0, 0, 0)
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    title = " ".join(filter(None, (PROGRAM, role, model))).encode()[: end - begin - 1]
    whole = title.decode(errors="ignore").encode()  # do not cut within a character
    ctypes.memmove(begin, whole.ljust(end - begin, b"\0"), end - begin)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """End this process as soon as `sys.exit` leaves the block, without the interpreter's clean-up
    after torch, which takes a second."""
    try:
        yield
    except SystemExit as told:
        sys.stderr.flush()
        os._exit(told.code if isinstance(told.code, int) else 0)


def pace(quota: float | None) -> None:
    """Leave most of a CPU quota below 1 to the other processes of our control group until
    `pace(None)`, and report it: the kernel stops all of them, at any priority, when it is spent."""
    global _part
    _part = SHARE if quota is not None and quota < 1.0 else 0.0
    if quota is None or not _part:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        return
    from dovetail.launch.console.terminal import note  # imports pydantic

    note(
        f"this worker uses about {SHARE:.0%} of the CPU quota of {quota:g} until sessions move to "
        "it: streams need the rest"
    )
    used_s, resumed_s = time.process_time(), time.monotonic()

    def pause(*_: object) -> None:
        nonlocal used_s, resumed_s
        if (share := _part * quota) > 0.0:  # else the signal was sent before pacing ended
            used, passed_s = time.process_time() - used_s, time.monotonic() - resumed_s
            time.sleep(min(max(0.0, used / share - passed_s), LONGEST_PAUSE_S))
            used_s, resumed_s = time.process_time(), time.monotonic()

    signal.signal(signal.SIGPROF, pause)
    signal.setitimer(signal.ITIMER_PROF, SLICE_S, SLICE_S)


def pace_less() -> None:
    """Raise the share of a paced process to one and a half times `SHARE`."""
    global _part
    _part = min(1.5 * SHARE, 1.5 * _part)


def end_undisturbed() -> None:
    """Ignore further signals to end: this process is already cleaning up."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def claim_stdout() -> TextIO:
    """Yield stdout for our parent only; other output (such as of ONEDNN_VERBOSE) then goes to
    stderr."""
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return said
