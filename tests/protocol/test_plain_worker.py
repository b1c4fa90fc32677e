"""The wire as `protocol/README.md` describes it: a target, a draft and a client that import nothing
of dovetail work with its coordinator, over ipc and over tcp with keys."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dovetail.protocol.keys import generate_keys
from dovetail.protocol.messages import VERSION
from support import plain

PLAIN = Path(plain.__file__)


class Processes:
    """Processes that end with the stack, in an environment where nobody else looks for them."""

    def __init__(self, stack: ExitStack, place: Path) -> None:
        self._stack = stack
        self._environment = {**os.environ, "XDG_RUNTIME_DIR": str(place)}

    def start(self, *arguments: object) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)
        return process

    def ready(self, *arguments: object) -> str:
        """Start one; the first line that it prints."""
        process = self.start(*arguments)
        assert process.stdout is not None
        self._stack.callback(process.stdout.close)
        return process.stdout.readline().strip()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with ExitStack() as stack:
        yield Processes(stack, tmp_path)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_processes_that_know_the_wire_alone_decode_together(
    processes: Processes, tmp_path: Path, transport: str
) -> None:
    keys: list[object] = []
    listen = [f"--coordinator.listen=ipc://{tmp_path}/own/hub"]
    if transport == "tcp":
        generate_keys(tmp_path / "keys")
        keys = [tmp_path / "keys"]
        listen = ["--coordinator.listen=tcp://127.0.0.1:*", f"--coordinator.keys={keys[0]}"]
    address = processes.ready("-m", "dovetail.launch.cli", "coordinator", *listen)
    version = ".".join(map(str, VERSION))
    isolated = ("-I", PLAIN)
    assert processes.ready(*isolated, "target", address, version, *keys) == "ready"
    assert processes.ready(*isolated, "draft", address, version, *keys) == "ready"
    reply = json.loads(processes.ready(*isolated, "client", address, version, *keys))
    expected = [(plain.PROMPT[-1] + 1 + i) % plain.WORDS for i in range(plain.REPLY)]
    assert reply["tokens"] == expected
    assert reply["text"].split() == [f"w{token}" for token in expected]
    # two of three tokens of a round are the draft's: its third node is wrong
    assert reply["drafted"] >= plain.REPLY // 2


def test_another_version_is_refused_in_words(
    processes: Processes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    listen = f"--coordinator.listen=ipc://{tmp_path}/own/hub"
    address = processes.ready("-m", "dovetail.launch.cli", "coordinator", listen)
    client = processes.start("-I", PLAIN, "client", address, "0.1")
    with client:
        assert client.wait() == 1
    assert "speaks protocol 0.1, this coordinator" in capfd.readouterr().err


def test_the_plain_programs_import_nothing_of_dovetail() -> None:
    assert "import dovetail" not in PLAIN.read_text(encoding="utf-8")
    assert "from dovetail" not in PLAIN.read_text(encoding="utf-8")
