"""Processes of ours: none outlives its supervisor, whatever ends it, and nothing is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from gguf import GGMLQuantizationType as Type

from dovetail.launch.processes import supervise
from dovetail.launch.processes.stack import begin_stack
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import configure
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.errors import DovetailError, UserError
from support.cases import everyday
from support.gguf_files import tokens_of, write_gguf
from support.models import tiny_llama
from support.patience import PATIENCE_S

Start = Callable[..., subprocess.Popen[str]]


def start_coordinator(supervisor: Supervisor, cores: Sequence[int]) -> str:
    """Start a coordinator on these cores, and return its address."""
    return supervisor.await_address(supervisor.begin_coordinator(cores, "coordinator"))


PARENT = (
    sys.executable,
    "-P",
    "-c",
    """
import os, signal
from dovetail.launch.processes.supervise import Supervisor
cores = (min(os.sched_getaffinity(0)),)
with Supervisor() as supervisor:
    supervisor.await_address(supervisor.begin_coordinator(cores, "coordinator"))
    supervisor.await_address(supervisor.begin_coordinator(cores, "coordinator"))
    print(*(child.process.pid for child in supervisor.children), flush=True)
    signal.pause()
""",
)
ORPHANS = (
    sys.executable,
    "-P",
    "-c",
    """
import os, signal, sys
from dovetail.launch.processes import supervise
supervise.ORPHANED_S = 1.0
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
with supervise.Supervisor() as supervisor:
    address = supervisor.await_address(supervisor.begin_coordinator([min(os.sched_getaffinity(0))], "coordinator"))
    hung = supervisor.start_command("hung process", [sys.executable, "-c", deaf], reads=True)
    hung.process.stdout.readline()
    supervisor.start_command("process that starts", [sys.executable, "-c", "import time; time.sleep(600)"])
    print(address, *(child.process.pid for child in supervisor.children), flush=True)
    minder = None
    while True:
        supervisor.mind()
        if supervisor._warden.pid != minder:
            print(minder := supervisor._warden.pid, flush=True)
        signal.sigtimedwait([signal.SIGUSR1], 0.05)
""",  # noqa: E501
)
FORKING = (*PARENT[:-1], f"import sys; sys.argv[0] = 'dovetail'{PARENT[-1]}")
"""`PARENT` under the name of the command `dovetail`, which forks what it starts."""
FORKED = """
import sys, threading
import psutil
from dovetail.launch.processes.supervise import Supervisor
sys.argv[0] = "dovetail"
waiting = ["worker", "--role=draft", "--draft.kind=ngram", "--connect=-"]
with Supervisor() as supervisor:
    forked = supervisor.start("worker", waiting, asks=True)
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    other = supervisor.start("other worker", waiting, asks=True)
    for child in (forked, other):
        print(psutil.Process(child.process.pid).cmdline() == psutil.Process().cmdline())
        child.tell("", last=True)
        print(child.process.wait(), child.last_words())
with Supervisor() as supervisor:
    child = supervisor.start("wrong worker", ["worker", "--role=draft", "--draft.kind=odd"])
    print(child.process.wait(), "'odd'" in child.last_words()[-1])
print("left")
"""
WAITING = ("worker", "--role=draft", "--draft.kind=ngram", "--connect=-")
"""The command of a worker that waits for a line on its stdin."""
CORES = (min(os.sched_getaffinity(0)),)


@pytest.fixture(autouse=True)
def _left(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the processes of these tests leave their files in `temporary`."""
    monkeypatch.setenv("TMPDIR", str(temporary))


def assert_gone(pids: list[int]) -> None:
    """Check that processes have ended, and are no zombies of ours."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive


@pytest.mark.parametrize("before", ["", "m"])
def test_a_process_title_is_cut_to_the_length_of_the_command_line(before: str) -> None:
    """The environment, which follows in memory, is unchanged, and no character is cut in two."""
    script = (
        "import sys; from pathlib import Path; "
        "from dovetail.launch.processes.child import name_process; "
        "before = Path('/proc/self/environ').read_bytes(); "
        "name_process('target', sys.argv[1] + 9999 * '\u00fc'); "
        "assert Path('/proc/self/environ').read_bytes() == before; "
        "print(Path('/proc/self/comm').read_text(), Path('/proc/self/cmdline').read_text())"
    )
    command = [sys.executable, "-c", script, before]
    done = subprocess.run(command, capture_output=True, text=True)
    program, line = done.stdout.split("\n")[:2]
    name = line.strip(" \0").rstrip("\u00fc")
    assert (program, name) == ("dovetail:target", f"dovetail target {before}"), done


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_leaving_the_block_ends_everything_and_removes_what_was_left(
    temporary: Path, error: type[Exception] | None
) -> None:
    expected = pytest.raises(error) if error else contextlib.nullcontext()
    with expected, Supervisor() as supervisor:  # type: ignore[attr-defined]
        address = start_coordinator(supervisor, CORES)
        pids = [child.process.pid for child in supervisor.children]
        assert Path(address.removeprefix("ipc://")).exists()
        if error:
            raise error
    assert_gone(pids)
    assert [*temporary.iterdir()] == []


def test_what_a_killed_coordinator_left_is_removed(temporary: Path) -> None:
    with Supervisor() as supervisor:
        start_coordinator(supervisor, CORES)
        supervisor.children[0].process.kill()
        supervisor.children[0].process.wait()
        assert [*temporary.iterdir()] != []
        with pytest.raises(
            DovetailError, match="the coordinator was killed by SIGKILL and left no message"
        ):
            supervisor.check()
    assert [*temporary.iterdir()] == []


def test_a_child_has_as_long_to_end_as_it_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervise, "GRACE_S", 0.1)
    slow = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), "
        "sys.exit(0))); print('on', flush=True); signal.pause()"
    )
    (tmp_path / "slow.py").write_text(slow, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with Supervisor() as supervisor:
        child = supervisor.start("slow", [], module="slow", reads=True)
        while not child.heard():
            assert not child.ended
        supervisor.end([child], PATIENCE_S)
        assert child.process.returncode == 0


def test_a_child_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "GRACE_S", 0.2)
    with Supervisor() as supervisor:
        start_coordinator(supervisor, CORES)
        process = supervisor.children[0].process
        process.send_signal(signal.SIGSTOP)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("number", "code", "command"),
    [
        (signal.SIGTERM, 143, PARENT),
        (signal.SIGKILL, -signal.SIGKILL, FORKING),
        pytest.param(signal.SIGHUP, 129, FORKING, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, -signal.SIGINT, PARENT, marks=pytest.mark.slow),
    ],
)
def test_no_child_outlives_a_supervisor_that_a_signal_ends(
    start: Start, tmp_path: Path, number: signal.Signals, code: int, command: tuple[str, ...]
) -> None:
    """SIGKILL too: the kernel tells the children, and they clean up after themselves."""
    parent = start(command=command)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.send_signal(number)
    assert (
        parent.wait(PATIENCE_S) in (code, 1)
        if number == signal.SIGINT
        else parent.wait(PATIENCE_S) == code
    )
    assert_gone(pids)
    assert [*(tmp_path / "tmp").iterdir()] == []


@pytest.mark.parametrize(
    ("stopped", "bereft"), everyday([(False, False), (True, False), (False, True)], (False, True))
)
def test_no_child_outlives_a_supervisor_that_is_killed_whatever_it_does(
    start: Start, stopped: bool, bereft: bool
) -> None:
    """One that hears no signal, one that has not got to hear any; nor if whoever sees to it was
    stopped with all the others, or killed before them."""
    parent = start(command=ORPHANS)
    assert parent.stdout is not None
    address, *pids = parent.stdout.readline().split()
    children = psutil.Process(parent.pid).children()
    assert {int(pid) for pid in pids} <= {child.pid for child in children}
    minder = parent.stdout.readline().strip()
    if bereft:
        os.kill(int(minder), signal.SIGKILL)
        assert parent.stdout.readline().strip() != minder  # another one has been told everything
        children = psutil.Process(parent.pid).children()
    for child in children if stopped else ():
        child.suspend()
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    for child in alive:
        child.kill()
    assert not alive
    assert not Path(address.removeprefix("ipc://")).parent.exists()


def test_a_command_forks_what_it_starts_unless_it_has_threads_and_what_is_forked_ends_alone(
    start: Start,
) -> None:
    parent = start(command=(sys.executable, "-P", "-c", FORKED))
    said, words = parent.communicate()
    assert said.splitlines() == ["True", "0 []", "False", "0 []", "2 True", "left"], words


def test_what_is_forked_is_a_child_of_its_own_as_one_that_was_started() -> None:
    with Supervisor() as supervisor:
        nursery = supervisor.start_nursery(["json"])
        forked = supervisor.start_forked(nursery, {"one": WAITING, "other": WAITING})
        assert supervisor.children == [*forked.values()]
        assert nursery[0].ended
        one, other = (child.process for child in forked.values())
        assert {psutil.Process(process.pid).ppid() for process in (one, other)} == {os.getpid()}
        assert {os.getsid(process.pid) for process in (one, other)} == {one.pid, other.pid}
        with pytest.raises(subprocess.TimeoutExpired):
            one.wait(0.0)
        one.kill()
        assert one.wait(PATIENCE_S) == -signal.SIGKILL
        assert forked["one"].how_it_ended() == "was killed by SIGKILL"
        assert not forked["other"].ended
    assert other.returncode in (0, -signal.SIGTERM)
    assert_gone([one.pid, other.pid])


def test_what_cannot_be_imported_is_told_and_nothing_is_forked() -> None:
    with Supervisor() as supervisor:
        nursery = supervisor.start_nursery(["dovetail.launch.no_such_module"])
        with pytest.raises(DovetailError, match=r"No module named .dovetail.launch.no_such_module"):
            supervisor.start_forked(nursery, {"worker": WAITING})
        assert supervisor.children == [nursery[0]]


def place_of_libc(pid: int) -> str:
    """The address of libc in a process: a forked one has that of its parent."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return next((line.partition("-")[0] for line in maps if "libc.so" in line), "")


@pytest.mark.parametrize("threads", everyday([False, True], True))
def test_a_process_with_threads_is_not_forked_but_executed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: bool
) -> None:
    begin = "import threading; threading.Thread(target=threading.Event().wait).start()"
    (tmp_path / "imported_here.py").write_text(begin if threads else "", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with Supervisor() as supervisor:
        nursery = supervisor.start_nursery(["imported_here"])
        while not (own := place_of_libc(nursery[0].process.pid)):
            assert not nursery[0].ended
        (child,) = supervisor.start_forked(nursery, {"worker": WAITING}).values()
        while (place_of_libc(child.process.pid) == own) is threads:
            assert not child.ended
        child.tell("ipc:///nowhere/at/all", last=True)
        child.process.wait(PATIENCE_S)
        assert child.was_mistaken or child.process.returncode == 1
        assert "/nowhere/at/all" in child.last_words()[-1]


def test_the_folders_of_a_killed_supervisor_go_though_its_children_have_ended_before(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    subprocess.run(
        [sys.executable, "-I", "-S", supervise.warden.__file__, "1.0"],
        input=f"folder {folder}\n".encode(),
        check=True,
    )
    assert not folder.exists()


def test_a_worker_that_crashes_is_reported_with_its_last_words() -> None:
    with Supervisor() as supervisor:
        child = supervisor.start("odd worker", [], module="dovetail.launch.no_such_module")
        child.process.wait()
        with pytest.raises(
            DovetailError,
            match=r"the odd worker ended with exit code 1:\n.*No module named "
            r"dovetail.launch.no_such_module",
        ):
            supervisor.check()


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model.safetensors", "is not a complete safetensors file"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("config.json", "config.json"),
    ],
)
def test_a_damaged_target_is_told_before_that_it_has_no_draft(
    tmp_path: Path, file: str, words: str
) -> None:
    target = tiny_llama(tmp_path / "target")
    damaged = target / file
    if file == "tokenizer.json":
        damaged.unlink()
    else:
        os.truncate(damaged, damaged.stat().st_size // 2)
    configuration = configure(flags={"target.model": str(target)}, environment={})
    with Supervisor() as supervisor, pytest.raises(UserError, match=words) as refused:
        begin_stack(supervisor, configuration)()
    assert "no draft" not in str(refused.value)


def test_a_target_without_a_draft_is_not_started_with_the_embedded_one(tmp_path: Path) -> None:
    target = str(tiny_llama(tmp_path / "target"))
    configuration = configure(flags={"target.model": target}, environment={})
    with Supervisor() as supervisor, pytest.raises(UserError, match="--draft none"):
        begin_stack(supervisor, configuration)()


BEGUN = """
import sys
import click
from dovetail.launch import cli
from dovetail.launch.processes import forked
sys.argv[0] = "dovetail"
forked.run_nursery = lambda talk, modules, log: modules
forked.dismiss = lambda: None
cli.group.resolve_command(click.Context(cli.group), sys.argv[1:])
print(forked.begun())
"""
FORKED_FROM_IT = """
import os, signal, sys
import psutil
from dovetail.launch.processes import forked, nursery
from dovetail.launch.processes.supervise import Supervisor
sys.argv[0] = "dovetail"
nursery.MODULES = ("json",)
forked.begin_for([])
mine = {child.pid for child in psutil.Process().children()}
waiting = ["worker", "--role=draft", "--draft.kind=ngram", "--connect=-"]
with Supervisor() as supervisor:
    begun = supervisor.start_nursery(nursery.MODULES)
    print({begun[0].process.pid} == mine, forked.begun())
    (child,) = supervisor.start_forked(begun, {"worker": waiting}).values()
    print(begun[0].ended, psutil.Process(child.process.pid).ppid() == os.getpid())
    other = supervisor.start_nursery(nursery.MODULES)
    print(other[0].process.pid in mine)
"""
LOOKS_UP = """
import sys
from pathlib import Path
from dovetail.launch.processes import forked, nursery
from dovetail.launch.processes.stack import begin_workers
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import configure
sys.argv[0] = "dovetail"
nursery.MODULES = ("torch",)
forked.begin_for([])
settings = configure(flags={"draft.kind": "ngram"}, environment={}).settings
commands = {
    f"{role} worker": ["worker", f"--role={role}", "--draft.kind=ngram", "--connect=-"]
    for role in ("target", "draft")
}
with Supervisor() as supervisor:
    for name, child in begin_workers(supervisor, settings, commands)().items():
        print(name, "libtorch" in Path(f"/proc/{child.process.pid}/maps").read_text())
"""
PROVES = """
import sys
from pathlib import Path
from dovetail.launch.processes import forked, nursery
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import configure
flags, sys.argv = {"target.model": sys.argv[1]}, ["dovetail"]
nursery.MODULES, nursery.PROVING = ("json",), "torch"
forked.begin_for([])
configure(flags=flags, environment={})
waiting = ["worker", "--role=draft", "--draft.kind=ngram", "--connect=-"]
with Supervisor() as supervisor:
    begun = supervisor.start_nursery(nursery.MODULES)
    (child,) = supervisor.start_forked(begun, {"worker": waiting}).values()
    print("libtorch" in Path(f"/proc/{child.process.pid}/maps").read_text())
"""
LEFT = """
import sys
import psutil
from dovetail.launch.processes import forked
sys.argv[0] = "dovetail"
forked.begin_for([])
print(*(child.pid for child in psutil.Process().children()), flush=True)
print(forked.taken_bytes() > 0)
if sys.argv[1:]:
    forked.dismiss()
    print(*(child.pid for child in psutil.Process().children()), forked.taken_bytes())
"""


def python(program: str, *arguments: str, cores: int = 2, **environment: str) -> list[str]:
    """Run a program on so many cores, by name; return the words of each line that it prints."""
    told = f"import os\nos.sched_getaffinity = lambda _: set(range({cores}))\n{program}"
    command = [sys.executable, "-P", "-c", told, *arguments]
    given = {**os.environ, **environment}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=given)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("command", "begins"),
    everyday(
        [
            ("generate hello", True),
            ("chat", True),
            ("generate --max-tokens 4 hello", True),
            ("serve --http.port 0", True),
            ("serve --engine ray", False),
            ("generate hello --connect ipc:///tmp/hub", False),
            ("generate hello --connect=http://127.0.0.1:8000", False),
            ("chat --help", False),
            ("chat --help-all", False),
            ("status", False),
            ("worker --role target", False),
        ],
        ("generate hello", True),
        ("generate hello --connect ipc:///tmp/hub", False),
        ("chat --help", False),
        ("worker --role target", False),
    ),
)
def test_it_begins_for_commands_that_start_workers_of_their_own(
    command: str, begins: bool, tmp_path: Path
) -> None:
    assert python(BEGUN, *command.split(), XDG_RUNTIME_DIR=str(tmp_path)) == [str(begins)]


def test_one_core_does_one_thing_after_the_other(tmp_path: Path) -> None:
    assert python(BEGUN, "chat", cores=1, XDG_RUNTIME_DIR=str(tmp_path)) == ["False"]


def test_a_coordinator_that_runs_is_used_instead(tmp_path: Path) -> None:
    running = "from dovetail.launch.files.directory import announced\n"
    running += "".join(f"    {line}\n" for line in BEGUN.strip().splitlines())
    running = running.replace("    import sys", "with announced('ipc:///x'):\n    import sys")
    assert python(running, "generate", "hello", XDG_RUNTIME_DIR=str(tmp_path)) == ["False"]


def test_a_draft_that_looks_up_is_not_forked_from_it(tmp_path: Path) -> None:
    lines = python(LOOKS_UP, XDG_RUNTIME_DIR=str(tmp_path))
    assert lines == ["target worker True", "draft worker False"]


def test_it_imports_what_a_proof_takes_while_a_file_is_read_for_the_first_time(
    tmp_path: Path,
) -> None:
    file, folder = tmp_path / "model.gguf", DEMO_FOLDER / "target"
    write_gguf(folder, file, lambda *_: Type.Q8_0, **tokens_of(folder))
    places = {name: str(tmp_path) for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME")}
    assert python(PROVES, str(file), **places) == ["True"]
    assert python(PROVES, str(file), **places) == ["False"]


def test_a_supervisor_takes_it_over_once(tmp_path: Path) -> None:
    assert python(FORKED_FROM_IT, XDG_RUNTIME_DIR=str(tmp_path)) == [
        "True False",
        "True True",
        "False",
    ]


def test_it_ends_with_a_command_that_did_not_want_it(tmp_path: Path) -> None:
    pids, counts = python(LEFT, XDG_RUNTIME_DIR=str(tmp_path))
    processes = [psutil.Process(int(pid)) for pid in pids.split() if psutil.pid_exists(int(pid))]
    assert pids
    assert counts == "True"
    assert not psutil.wait_procs(processes, timeout=PATIENCE_S)[1]


def test_a_command_that_ends_waits_until_it_has_ended(tmp_path: Path) -> None:
    assert python(LEFT, "dismissed", XDG_RUNTIME_DIR=str(tmp_path))[2] == "0"
