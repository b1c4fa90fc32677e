"""Kernels before Linux 5.0, and containers whose filter refuses the calls that came later: a filter
hides these from everything that a command starts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from support.cases import everyday
from support.patience import PATIENCE_S
from support.served import ready, streamed

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]

HIDING = """
import ctypes, errno, os, platform, struct, sys
FIRST = 424  # pidfd_send_signal, of Linux 5.1: all later calls have this number or a higher one
POLICIES = {"x86_64": (237, 238, 256, 279), "aarch64": (235, 237, 238, 239)}[platform.machine()]
said = 0x50000 | getattr(errno, sys.argv[1])
steps = [(0x20, 0, 0, 0), (0x35, 0, 1, FIRST), (0x06, 0, 0, said)]
for number in POLICIES:
    steps += [(0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | errno.EPERM)]
steps.append((0x06, 0, 0, 0x7FFF0000))
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
prctl = ctypes.CDLL(None).prctl
assert prctl(38, 1, 0, 0, 0) == 0 and prctl(22, 2, program, 0, 0) == 0
os.execv(sys.argv[2], sys.argv[2:])
"""
COMMAND = (sys.executable, "-P", "-m", "dovetail.launch.cli")
ANSWERS = ("ENOSYS", "EPERM")


def hiding(answer: str) -> tuple[str, ...]:
    """The beginning of a command line from which the calls that Linux 5.1 and later brought are
    hidden with this error, and memory policies with EPERM."""
    return (sys.executable, "-P", "-c", HIDING, answer)


@pytest.mark.parametrize("answer", everyday(ANSWERS, "EPERM"))
def test_a_service_replaces_killed_workers_swaps_them_and_takes_stopped_ones_along(
    start: Start, run: Run, answer: str
) -> None:
    server = start("serve", "--http.port=0", "--json", command=(*hiding(answer), *COMMAND))
    facts = ready(server)
    workers = json.loads(run("status", "--json").stdout)["workers"]
    text = streamed(facts["url"])

    def kill() -> None:
        for worker in workers:
            os.kill(worker["pid"], signal.SIGKILL)

    def swap() -> None:
        for flags in (("--role=draft", "--draft=ngram"), ("--role=target",)):
            done = run("swap", *flags, "--json", command_prefix=hiding(answer))
            assert done.returncode == 0, done.stderr

    for change in (kill, swap):
        assert streamed(facts["url"], change) == text
    children = psutil.Process(server.pid).children(recursive=True)
    for child in children:
        child.suspend()
    server.kill()
    server.wait()
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert not alive


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"]).returncode != 0, reason="no namespaces here"
)
def test_weights_that_end_a_process_on_a_cpu_without_avx_are_refused(
    run: Run, tmp_path: Path
) -> None:
    """torch multiplies int8 by AVX without asking for it."""
    cpu = Path("/proc/cpuinfo").read_text().replace(" avx ", " ")
    (tmp_path / "cpuinfo").write_text(cpu)
    script = f'mount --bind {tmp_path / "cpuinfo"} /proc/cpuinfo && exec "$@"'
    done = run(
        *("generate", "A", "--weights", "int8-per-tensor", "--draft", "none"),
        command_prefix=("unshare", "-rm", "sh", "-c", script, "sh"),
    )
    assert done.returncode == 2
    assert "an illegal instruction without AVX" in done.stderr.splitlines()[-1]
    assert "use weights fp32" in done.stderr.splitlines()[-1]
