"""Commands start fast, end with the right code, and never show a traceback."""

import errno
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.launch import cli
from dovetail.protocol.errors import LinkClosed, SettingsError

Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

HELP_LIMIT_S = 0.4
TOLD = """
import signal
from dovetail.launch.processes.child import end_when_told
end_when_told()
try:
    print("ready", flush=True)
    signal.pause()
finally:
    print("cleaned")
"""
HELP_OF_ALL = """
import contextlib, io, json, sys
from dovetail.launch.cli import COMMANDS, run
told = {}
for name in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = run([name, "-h"])
    told[name] = [said.getvalue().split()[0], code, "torch" in sys.modules]
print(json.dumps(told))
"""
"""Prints for each command how its help begins, its exit code, and whether torch is there
afterwards."""
WRONG = [("decode",), ("config", "show", "--tree.gama", "6")]


def one_line(process: subprocess.CompletedProcess[str]) -> str:
    """The only line on stderr."""
    lines = process.stderr.splitlines()
    assert len(lines) == 1, process.stderr
    assert lines[0].startswith("dovetail: ")
    assert process.stdout == ""
    return lines[0]


def test_help_takes_less_than_four_tenths_of_a_second(run: Run) -> None:
    """The time is that of the processor, which a busy machine does not lengthen."""

    def cost() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert statistics.median(cost() for _ in range(3)) < HELP_LIMIT_S


def test_help_imports_neither_pydantic_nor_torch() -> None:
    code = (
        "import sys; from dovetail.launch.cli import run; run(['--help']); "
        "sys.exit(bool({'pydantic', 'torch', 'zmq', 'rich'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-P", "-c", code], stdout=subprocess.DEVNULL).returncode
        == 0
    )


@pytest.mark.parametrize("name", ["generate", "chat", "serve"])
def test_a_command_that_starts_workers_imports_few_libraries(name: str) -> None:
    """A command's own imports delay its first word, since torch is imported after them."""
    program = (
        f"import sys; from dovetail.launch.commands import {name}; "
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    others = {
        name
        for name in {*done.stdout.split()} - sys.stdlib_module_names
        if not name.startswith(("_", "cython"))
    }
    assert others <= {
        *("annotated_types", "click", "dovetail", "msgpack", "psutil"),
        *("pydantic", "pydantic_core", "tokenizers", "typing_extensions", "typing_inspection"),
        "zmq",
    }


def test_every_command_has_help_without_torch() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", HELP_OF_ALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        name: ["Usage:", 0, False] for name in cli.COMMANDS
    }


def test_version_names_the_program(run: Run) -> None:
    assert run("--version").stdout.startswith("dovetail ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("decode",), "No such command 'decode'. `dovetail --help` lists them"),
        (("generate", "hello", "world"), "put quotes around the prompt"),
        (
            ("generate", "hello", "--target", "launch/demo/target", "--draft", "eagle"),
            "one that `dovetail train eagle` made for it",
        ),
        (("statsu",), "No such command 'statsu'. Did you mean 'status'?"),
        (("config", "export", "foo"), "No such command 'foo'. Choose one of compose, grafana, "),
        (("train", "smal"), "No such command 'smal'. Did you mean 'small'?"),
        (("config", "show", "--tree.gama", "6"), "--tree.gamma"),
        (("config", "show", "--tree.gamma", "many"), "'many'"),
        (("config", "show", "-c", "no/such.toml"), "no/such.toml"),
        (("generate", "hello", "--policy", "goodputt"), "there is no tree policy 'goodputt'"),
        (
            ("generate", "hello", "--sampling.acceptance", "rejection"),
            "set tree.policy to 'static', not 'goodput'",
        ),
        (
            ("generate", "hello", "--draft", "ngram", "--policy", "beam"),
            "set tree.policy to 'dynamic' or 'budget' or 'goodput', not 'beam'",
        ),
        (
            ("generate", "hello", "--target", "/no/such/model"),
            "the target model /no/such/model is not there",
        ),
        (("generate", "hello", "--prompts", "p.jsonl"), "leave out one of them"),
        (
            ("generate", "--prompts", "p.jsonl", "--connect", "http://host"),
            "does not work with the URL http://host: on the server's machine, leave out --connect",
        ),
        (("generate", "hello", "--connect", "http://host"), "http://host"),
        (
            ("generate", "hello", "--connect", "127.0.0.1:8200"),
            "write http://127.0.0.1:8200 for a server over HTTP; ipc://PATH or tcp://HOST:PORT",
        ),
        (("chat", "--connect", "host"), "write http://HOST:PORT for a server over HTTP"),
        (
            ("generate", "hello", "--connect", "ipc:///no/such/path/x", "--target", "m"),
            "--target.model",
        ),
        (("generate", ""), "empty"),
        (("status",), "dovetail serve"),
        (("worker", "--role", "draft", "--connect", "ipc:///x", "--cores", "9999"), "core 9999"),
        (("worker", "--role", "draft", "--connect", "ipc:///x", "--cores", "one"), "0,2-3"),
        (("coordinator", "--listen", "tcp://127.0.0.1:*"), "keygen"),
        (("bench", "--method", "magic"), "'magic'"),
        (("bench", "--method", "small,gamma"), "'gamma'"),
        (("bench", "--temperature", "nan"), "sampling.temperature"),
        (("worker", "--role", "draft", "--reconnect-s", "nan"), "'nan' is not a number"),
        (("selftest", "--draft", "none"), "--draft none"),
        (("keygen", "--rotate", "a", "--revoke", "b"), "--rotate"),
    ],
)
def test_a_mistake_is_one_line_that_names_it_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    arguments: tuple[str, ...],
    named: str,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", environment["XDG_RUNTIME_DIR"])
    assert cli.run(arguments) == 2
    said, complaint = capsys.readouterr()
    assert said == ""
    assert complaint.count("\n") == 1
    assert complaint.startswith("dovetail: ")
    assert named in complaint


@pytest.mark.parametrize("command", ["coordinator", "status"])
def test_too_few_open_files_are_one_line(run: Run, command: str) -> None:
    done = run(*command.split(), command_prefix=("prlimit", "--nofile=7"))
    assert "dovetail needs 64 open files, and may have 7: raise" in one_line(done)


@pytest.mark.parametrize("arguments", WRONG)
def test_a_mistake_in_a_process_of_its_own_is_one_line_too(
    run: Run, arguments: tuple[str, ...]
) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    one_line(done)


@pytest.mark.parametrize(
    ("error", "code"), [(SettingsError("x"), 2), (LinkClosed("x"), 1), (KeyboardInterrupt(), 130)]
)
def test_every_kind_of_error_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli.group, "main", fail)
    assert cli.run([]) == code


def test_an_error_of_the_system_that_nobody_expected_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/some/file")

    monkeypatch.setattr(cli.group, "main", fail)
    assert cli.run([]) == 1
    full = "No space left on device; free some space there, or choose another place"
    assert capsys.readouterr().err == f"dovetail: the system refused /some/file: {full}\n"
    monkeypatch.setattr(cli.group, "main", lambda *_, **__: Path("/dev/full").write_text("x"))
    assert cli.run([]) == 1
    assert capsys.readouterr().err == f"dovetail: the system refused write /dev/full: {full}\n"


def test_an_error_of_the_system_names_the_call_and_the_path_and_no_remedy_that_is_wrong(
    run: Run, environment: dict[str, str]
) -> None:
    done = run("status", env={**environment, "XDG_RUNTIME_DIR": "/proc/self"})
    refused = (
        f"dovetail: the system refused mkdir /proc/self/dovetail: {os.strerror(errno.ENOENT)}\n"
    )
    assert (done.returncode, done.stderr) == (1, refused)
    state = f"/{'n' * 300}"
    done = run("coordinator", env={**environment, "XDG_STATE_HOME": state})
    assert done.stderr.startswith(f"dovetail: the journal cannot be kept in {state}/dovetail/")


@pytest.mark.parametrize(
    ("line", "code", "complaint"),
    [
        (
            "config show >/dev/full",
            1,
            "dovetail: the system refused write <stdout>: No space left on device; free some "
            "space there, or choose another place\n",
        ),
        ("config show >/dev/full 2>&1", 1, ""),
        ("config show >&-", 0, ""),
        pytest.param("config show <&- 2>&-", 0, "", marks=pytest.mark.slow),
        pytest.param("config show --tree.gama 6 2>/dev/full", 2, "", marks=pytest.mark.slow),
        ("config show --tree.gama 6 2>&-", 2, ""),
        pytest.param(
            "generate <&-",
            2,
            "dovetail: the prompt is empty: write it as an argument, or pipe it in\n",
            marks=pytest.mark.slow,
        ),
        (
            "generate - <&-",
            2,
            "dovetail: the prompt is empty: write it as an argument, or pipe it in\n",
        ),
    ],
)
def test_a_standard_stream_that_is_full_or_closed_is_no_traceback(
    environment: dict[str, str], line: str, code: int, complaint: str
) -> None:
    command = f'"{sys.executable}" -P -m dovetail.launch.cli {line}'
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (code, complaint)


def test_a_reader_that_leaves_is_no_error(environment: dict[str, str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dovetail.launch.cli", "config", "show"],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=environment,
    )
    os.close(writer)
    assert done.stderr == b""


def test_a_coordinator_runs_on_a_machine_without_torch(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None\n"
    )
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), environment["PYTHONPATH"]))
    command = [sys.executable, "-P", "-m", "dovetail.launch.cli", "coordinator"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ipc://")
        process.terminate()
        _, complaints = process.communicate()
    assert process.returncode == 0
    assert "torch" not in complaints


def test_a_closed_terminal_unwinds_a_process_of_ours(start: Start) -> None:
    process = start(command=(sys.executable, "-P", "-c", TOLD))
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    output, _ = process.communicate()
    assert (process.returncode, output) == (0, "cleaned\n")


def test_under_nohup_a_closed_terminal_changes_nothing(start: Start, invoke: Run) -> None:
    process = start(
        "-P", "-m", "dovetail.launch.cli", "coordinator", command=("nohup", sys.executable)
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    process.send_signal(signal.SIGHUP)
    assert json.loads(invoke("status", "--json").stdout)["address"] == address
    process.terminate()
    process.communicate()
    assert process.returncode == 0


def test_a_coordinator_is_found_while_it_runs_and_leaves_nothing_behind(
    start: Start, invoke: Run, tmp_path: Path
) -> None:
    process = start("coordinator")
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    state = json.loads(invoke("status", "--json").stdout)
    assert (state["address"], state["pid"]) == (address, process.pid)
    assert state["degraded"]
    assert state["workers"] == []
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 0
    assert invoke("status").returncode == 2
    assert [*(tmp_path / "tmp").iterdir()] == [*(tmp_path / "run" / "dovetail").iterdir()] == []


def test_of_two_coordinators_one_has_to_be_chosen(start: Start, invoke: Run) -> None:
    addresses = []
    for _ in range(2):
        process = start("coordinator")
        assert process.stdout is not None
        addresses.append(process.stdout.readline().strip())
    done = invoke("status")
    assert done.returncode == 2
    assert all(f"--connect {address}" in one_line(done) for address in addresses)
    assert invoke("status", "--connect", addresses[1]).stdout.startswith(
        f"coordinator {addresses[1]}"
    )


def test_the_announcement_of_a_coordinator_that_was_killed_is_ignored_and_cleaned(
    start: Start, invoke: Run, tmp_path: Path
) -> None:
    process = start("coordinator")
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.wait()
    assert "no coordinator" in one_line(invoke("status"))
    assert [*(tmp_path / "run" / "dovetail").iterdir()] == []


def test_a_second_coordinator_on_a_path_is_refused(start: Start, run: Run, tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    listen = f"--listen=ipc://{private}/socket"
    process = start("coordinator", listen)
    assert process.stdout is not None
    process.stdout.readline()
    done = run("coordinator", listen)
    assert done.returncode == 2
    assert "another coordinator" in one_line(done)


def test_over_tcp_keys_are_made_and_what_to_type_elsewhere_is_said(
    start: Start, invoke: Run, tmp_path: Path
) -> None:
    keys = str(tmp_path / "keys")
    assert invoke("keygen", "--out", keys).returncode == 0
    process = start("coordinator", "--listen", "tcp://127.0.0.1:*", "--keys", keys)
    assert process.stdout is not None
    assert process.stderr is not None
    address = process.stdout.readline().strip()
    assert process.stderr.readline().startswith(
        f"  dovetail worker --role target --target MODEL --connect {address} --keys FOLDER"
    )
    assert (
        json.loads(invoke("status", "--connect", address, "--keys", keys, "--json").stdout)[
            "address"
        ]
        == address
    )
    assert json.loads(invoke("status", "--json").stdout)["address"] == address, (
        "found without --connect, with the keys that it was announced with"
    )
    for name in ("client", "operator"):  # an operator is a client, too
        assert invoke("keygen", "--out", keys, "--revoke", name).returncode == 0
    refused = invoke("status", "--connect", address, "--keys", keys)
    assert refused.returncode == 2
    assert (
        f"no client.key; make it with `dovetail keygen --out {keys} --name client --role client`"
        in one_line(refused)
    )
