"""The memory that is there, and the processes that were killed for want of it: by files as the
kernel shows them, and by a real control group where one can be made."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from dovetail.protocol import memory
from dovetail.protocol.memory import (
    count_kills,
    node_room,
    process_room,
    read_room,
    total_bytes,
    why_killed,
)
from support.sysfs import write

MIB = 1 << 20
MEMINFO = {
    "MemTotal": 16000,
    "MemFree": 1000,
    "MemAvailable": 9000,
    "Buffers": 100,
    "Cached": 7000,
    "SReclaimable": 400,
    "Shmem": 500,
    "SwapFree": 0,
}
V2, V1 = "0::/a/b\n", "4:memory:/a/b\n"


def machine(
    root: Path, groups: Mapping[str, str] | None = None, own: str = V2, **meminfo: int | None
) -> Path:
    """The files of a machine whose meminfo has these MiB (None: no such line), and of these control
    groups."""
    lines = (
        f"{name}: {mib * 1024:>12} kB"
        for name, mib in {**MEMINFO, **meminfo}.items()
        if mib is not None
    )
    write(root / "proc/meminfo", "\n".join(lines))
    write(root / "proc/vmstat", "oom_kill 0")
    write(root / "proc/self/cgroup", own)
    for path, text in (groups or {}).items():
        write(root / "sys/fs/cgroup" / path, text)
    return root


def v2(folder: str, limit: object, used: int, **stat: int) -> dict[str, str]:
    lines = "\n".join(f"{name} {size * MIB}" for name, size in stat.items())
    said = str(limit * MIB) if isinstance(limit, int) else str(limit)
    return {
        f"{folder}/memory.max": said,
        f"{folder}/memory.current": str(used * MIB),
        f"{folder}/memory.stat": lines,
    }


def v1(folder: str, limit: int, used: int, **stat: int) -> dict[str, str]:
    own = "\n".join(f"{name} {1}\ntotal_{name} {size * MIB}" for name, size in stat.items())
    names = {"limit_in_bytes": str(limit), "usage_in_bytes": str(used * MIB), "stat": own}
    return {f"memory/{folder}/memory.{name}": text for name, text in names.items()}


def test_without_control_groups_there_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    room = read_room(machine(tmp_path, SwapFree=5))
    assert room is not None
    assert (room.size, room.swap, room.bound) == (9000 * MIB, 5 * MIB, "available on this machine")
    assert total_bytes(tmp_path) == 16000 * MIB


def test_a_kernel_that_does_not_say_what_is_available_says_what_is_free_and_what_is_cached(
    tmp_path: Path,
) -> None:
    room = read_room(machine(tmp_path, MemAvailable=None))
    assert room is not None
    assert room.size == (1000 + 100 + 7000 + 400 - 500) * MIB


def test_where_nothing_is_said_nothing_is_known(tmp_path: Path) -> None:
    assert read_room(tmp_path) is None
    assert total_bytes(tmp_path) is None
    write(tmp_path / "proc/meminfo", "nonsense")
    assert read_room(tmp_path) is None


@pytest.mark.parametrize(
    ("own", "groups", "left"),
    [
        (V2, v2("a/b", 2000, 500), 1500),
        (V2, v2("a/b", "max", 500), 9000),
        (V2, {**v2("a/b", "max", 500), **v2("a", 3000, 600)}, 2400),
        (V2, {**v2("a/b", 8000, 500), **v2("a", 3000, 600)}, 2400),
        (
            V2,
            v2(
                "a/b",
                2000,
                1900,
                active_file=300,
                inactive_file=900,
                slab_reclaimable=100,
                shmem=50,
            ),
            1400,
        ),
        (V2, v2("a/b", 2000, 2500), 0),
        (V2, v2(".", 700, 100), 600),  # a container that sees its own group as the root
        ("0::/\n", {**v2(".", 700, 100), "memory.high": f"{500 * MIB}"}, 400),
        ("0::/\n", {**v2(".", 700, 100), "memory.high": "max"}, 600),
        (V2, {**v2("a/b", 2000, 500), **v2("a", "max", 600), "a/memory.high": f"{900 * MIB}"}, 300),
        (V2, {"a/b/memory.max": "x", "a/b/memory.stat": "nonsense here"}, 9000),
        (V2, v2("unified/a/b", 2000, 500), 1500),
        (V1, v1("a/b", 2000 * MIB, 500), 1500),
        (V1, v1("a/b", 0x7FFFFFFFFFFFF000, 500), 9000),
        (V1, v1("a/b", 2000 * MIB, 1900, active_file=300, inactive_file=900), 1300),
        (
            V1,
            {
                **v1("a/b", 0x7FFFFFFFFFFFF000, 500),
                "memory/a/b/memory.stat": f"hierarchical_memory_limit {900 * MIB}",
            },
            400,
        ),
        ("", v2("a/b", 2000, 500), 9000),
    ],
)
def test_a_control_group_leaves_its_limit_less_what_is_taken_for_good(
    tmp_path: Path, own: str, groups: Mapping[str, str], left: int
) -> None:
    room = read_room(machine(tmp_path, groups, own))
    assert room is not None
    assert room.size == left * MIB


def test_the_narrowest_bound_is_named(tmp_path: Path) -> None:
    room = read_room(machine(tmp_path, v2("a/b", 2000, 500)))
    assert room is not None
    assert room.bound == f"left of the 2.1 GB of the control group {tmp_path}/sys/fs/cgroup/a/b"


def test_a_node_has_what_is_free_there_and_what_can_be_read_again(tmp_path: Path) -> None:
    lines = {
        "MemTotal": 9000,
        "MemFree": 100,
        "Active(file)": 30,
        "Inactive(file)": 20,
        "SReclaimable": 5,
        "Shmem": 7,
    }
    write(
        tmp_path / "sys/devices/system/node/node1/meminfo",
        "\n".join(f"Node 1 {name}: {mib * 1024} kB" for name, mib in lines.items()),
    )
    room = node_room(1, tmp_path)
    assert room is not None
    assert (room.size, room.bound) == (155 * MIB, "available on memory node 1")
    assert node_room(0, tmp_path) is None


def test_a_limit_of_address_space_is_a_bound_for_each_process() -> None:
    code = (
        "import resource; from dovetail.protocol.memory import process_room; print(process_room());"
        f"resource.setrlimit(resource.RLIMIT_AS, ({900 * MIB}, {900 * MIB})); print(process_room())"
    )
    if (
        resource.getrlimit(resource.RLIMIT_AS)[0]
        == resource.RLIM_INFINITY
        == resource.getrlimit(resource.RLIMIT_DATA)[0]
    ):
        assert process_room() is None
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith(
        f"Room(size={900 * MIB}, bound='allowed to a process as address space (ulimit -v)', "
        "swap=0)\n"
    )


def test_here_there_is_some() -> None:
    room, total = read_room(), total_bytes()
    assert room is not None
    assert total is not None
    assert 0 < room.size <= total


def log_record(pid: int, at_us: int, words: str = "Memory cgroup out of memory") -> str:
    return (
        f"3,429,{at_us},-;{words}: Killed process {pid} (python) total-vm:90884kB, anon-rss:81536kB"
    )


@pytest.mark.parametrize(
    ("own", "file", "words"),
    [
        (V2, "sys/fs/cgroup/a/b/memory.events", "at the limit of 2.1 GB of the control group"),
        (V2, "sys/fs/cgroup/a/memory.events", "at the limit of the control group"),
        (
            V1,
            "sys/fs/cgroup/memory/a/b/memory.oom_control",
            "at the limit of 2.1 GB of the control group",
        ),
        ("", "proc/vmstat", "on this machine"),
    ],
)
def test_that_memory_ran_out_is_said_where_the_kernel_counts_one_kill_more(
    tmp_path: Path, own: str, file: str, words: str
) -> None:
    root = machine(tmp_path, {**v2("a/b", 2000, 500), **v1("a/b", 2000 * MIB, 500)}, own)
    write(root / file, "low 0\noom 3\noom_kill 3\noom_group_kill 0")
    before = count_kills(root)
    assert why_killed(5, before, root) == ""
    write(root / file, "low 0\noom 9\noom_kill 4\noom_group_kill 0")
    assert words in why_killed(5, before, root)
    assert why_killed(5, before, root).startswith("memory ran out")
    assert why_killed(5, count_kills(root), root) == ""


def test_the_kernels_log_says_which_process_it_was_and_when(tmp_path: Path) -> None:
    root = machine(tmp_path)
    before = count_kills(root)
    later = time.monotonic_ns() // 1000 + 1
    write(
        root / "dev/kmsg",
        "\n".join(
            ("6,1,5,-;booted", log_record(6, later), log_record(5, before.at_us - 1), "nonsense")
        ),
    )
    assert why_killed(5, before, root) == ""
    assert (
        why_killed(6, before, root) == "memory ran out: the kernel ended it, according to its log"
    )


def test_a_kill_is_not_put_down_to_memory_where_nothing_is_readable(tmp_path: Path) -> None:
    assert why_killed(5, count_kills(tmp_path), tmp_path) == ""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 80 MB of our own, where one can be made."""
    folder = Path("/sys/fs/cgroup/memory") / f"dovetail-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(80 * MIB), encoding="ascii")
    except OSError:
        folder.exists() and folder.rmdir()
        pytest.skip("needs the right to make a control group of memory (of the first kind)")
    yield folder
    folder.rmdir()


IN_GROUP = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from dovetail.launch.processes.supervise import Supervisor
with Supervisor() as supervisor:
    child = supervisor.start_command("target worker", [sys.executable, "-c", "x = []\\nwhile True: x.append(bytearray(1 << 20))"])
    child.process.wait()
    print(child.failure())
    supervisor.start_command("draft worker", [sys.executable, "-c", "import signal; signal.raise_signal(signal.SIGKILL)"]).process.wait()
    print(supervisor.children[-1].failure())
from dovetail.protocol.memory import read_room
print(read_room().bound)
"""  # noqa: E501


def test_in_a_real_control_group_a_process_that_takes_too_much_is_said_to_have_done_so(
    small_group: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", IN_GROUP, str(small_group)],
        capture_output=True,
        text=True,
        check=True,
    )
    taken, _, killed, told, room = done.stdout.splitlines()
    assert taken.startswith("the target worker was killed by SIGKILL (memory ran out: the kernel")
    assert killed == "the draft worker was killed by SIGKILL and left no message"
    assert told.strip().startswith(
        "the kernel's log (dmesg, journalctl -k) shows whether memory ran out"
    )
    assert room == f"left of the 0.0839 GB of the control group {small_group}"


def test_the_log_is_read_to_its_end_where_it_may_be_read() -> None:
    assert isinstance(memory._kernel_log(Path("/dev/kmsg")), str)
