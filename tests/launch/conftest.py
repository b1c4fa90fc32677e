"""The command line as users have it: real processes, in a runtime directory and a temporary
directory of their own; and within this process, where what it refuses or prints is looked at."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from dovetail.launch import cli
from support.patience import PATIENCE_S

# under nohup, or in the background of a script, these are ignored, and every process started here
# would inherit that
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

COMMAND = (sys.executable, "-P", "-m", "dovetail.launch.cli")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """An empty temporary directory; its path is short, since the path of a socket is at most 107
    bytes, and pytest's own folders take most of that."""
    with tempfile.TemporaryDirectory(prefix="dt-") as folder:
        yield Path(folder)


@pytest.fixture
def environment(tmp_path: Path, temporary: Path) -> dict[str, str]:
    """Variables of a user who has nothing running, and whose temporary directory (`tmp_path /
    "tmp"`) is empty."""
    (tmp_path / "run").mkdir()
    (tmp_path / "tmp").symlink_to(temporary, target_is_directory=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DOVETAIL_")}
    return {**kept, "XDG_RUNTIME_DIR": str(tmp_path / "run"), "TMPDIR": str(temporary)}


@pytest.fixture
def run(environment: dict[str, str]) -> Run:
    """Runs a command line to its end."""

    def run(
        *arguments: str, command_prefix: tuple[str, ...] = (), **options: object
    ) -> subprocess.CompletedProcess[str]:
        options = {"input": "", "env": environment, **options}
        return subprocess.run(
            [*command_prefix, *COMMAND, *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            **options,
        )

    return run


@pytest.fixture
def invoke(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line to its end as `run` does, in this process, which has imported already
    what a command imports. It is for commands that bind no cores, set no threads, and leave signals
    to others."""

    def invoke(
        *arguments: str, input: str = "", env: dict[str, str] = environment
    ) -> subprocess.CompletedProcess[str]:
        streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
        with monkeypatch.context() as patch:
            for name in os.environ.keys() - env.keys():
                patch.delenv(name)
            for name, value in env.items():
                patch.setenv(name, value)
            patch.setattr(tempfile, "tempdir", None)
            patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(input.encode()), "utf-8"))
            with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
                code = cli.run(arguments)
        said, complained = (
            stream.buffer.getvalue().decode()  # type: ignore[attr-defined]
            for stream in streams
        )
        return subprocess.CompletedProcess(arguments, code, said, complained)

    return invoke


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command line that stays, and ends it with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(
        *arguments: str, command: tuple[str, ...] = COMMAND, more: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            env={**environment, **(more or {})},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
