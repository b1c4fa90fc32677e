"""`dovetail keygen` as its users have it: keys are made, added, replaced and withdrawn while a
coordinator runs."""

import json
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.protocol import keys
from dovetail.protocol.links import open_link
from dovetail.runtime.client import Client
from support.patience import PATIENCE_S
from support.wires import until

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def folder(invoke: Run, tmp_path: Path) -> Path:
    assert invoke("keygen", "--out", str(tmp_path / "keys")).returncode == 0
    return tmp_path / "keys"


def test_what_it_writes_is_for_its_owner_alone_and_no_secret_is_said(
    invoke: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "keys"
    said = [
        invoke("keygen", "--out", str(folder)),
        invoke("keygen", "--out", str(folder), "--name", "box", "--role", "draft"),
    ]
    said += [
        invoke("keygen", "--out", str(folder), option, "box") for option in ("--rotate", "--revoke")
    ]
    assert [done.returncode for done in said] == [0] * 4
    assert "need not be restarted" in said[2].stdout
    assert said[3].stdout == "box is refused from now on\n"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    secrets = [keys.load_own_key(folder, name).secret for name in ("coordinator", *keys.ROLES)]
    assert not any(secret in done.stdout + done.stderr for secret in secrets for done in said)


def test_whoever_has_no_operators_key_is_told_so_before_anything_is_asked(
    invoke: Run, start: Start, folder: Path, tmp_path: Path
) -> None:
    address, desk = listening(start, folder), tmp_path / "desk"
    desk.mkdir(mode=0o700)
    for name in ("client.key", "coordinator.pub"):
        shutil.copy2(folder / name, desk)
    refused = invoke("drain", "draft", "--connect", address, "--keys", str(desk))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert (
        "holds no operator.key; copy it from where `dovetail keygen` made it, or make it there "
        "with --name operator --role operator" in refused.stderr
    )
    assert (
        "there is no worker 'draft'"
        in invoke("drain", "draft", "--connect", address, "--keys", str(folder)).stderr
    )


def test_after_rotating_the_coordinator_its_peers_need_the_new_public_key(
    invoke: Run, folder: Path
) -> None:
    said = invoke("keygen", "--out", str(folder), "--rotate", "coordinator").stdout
    assert (
        "which uses the old key until then, and copy coordinator.pub to the machine of every peer"
        in said
    )


def test_a_worker_whose_key_is_revoked_is_told_and_ends_with_the_reason(
    invoke: Run, start: Start, folder: Path, tmp_path: Path
) -> None:
    coordinator = start("coordinator", "--listen", "tcp://127.0.0.1:*", "--keys", str(folder))
    assert coordinator.stdout is not None
    address, machine = str(coordinator.stdout.readline().strip()), tmp_path / "machine"
    machine.mkdir(mode=0o700)
    for name in ("draft.key", "coordinator.pub"):
        shutil.copy2(folder / name, machine)
    worker = start(
        "worker",
        "--role=draft",
        "--draft=ngram",
        f"--connect={address}",
        f"--keys={machine}",
        "--reconnect-s=2",
    )
    with Client(open_link(address, keys=folder, role="client")) as client:
        until(lambda: bool(client.status().workers), worker.poll)
    assert invoke("keygen", "--out", str(folder), "--revoke", "draft").returncode == 0
    assert worker.wait(PATIENCE_S) == 1
    assert worker.stderr is not None
    said = worker.stderr.read()
    assert (
        "the coordinator no longer allows the key of this worker; reconnecting for up to 2 s"
        in said
    )
    assert said.splitlines()[-1].startswith(
        f"dovetail: the coordinator at {address} refuses the key 'draft': allow its public key "
        "there"
    )
    coordinator.terminate()
    assert coordinator.stderr is not None
    assert (
        "connection refused: 127.0.0.1 shows the key 'draft', which is no longer allowed"
        in coordinator.stderr.read()
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "holds keys already"),
        (("--rotate", "nobody"), "has no key named 'nobody'"),
        (("--revoke", "coordinator"), "cannot be revoked"),
        (("--name", "../evil", "--role", "draft"), "cannot name a key"),
        (("--name", "box"), "a key needs roles"),
        (("--name", "box"), "given with --role"),
        (("--role", "draft"), "--name"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(
    invoke: Run, folder: Path, arguments: tuple[str, ...], words: str
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = invoke("keygen", "--out", str(folder), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_no_secret_stands_in_a_command_line_or_an_environment(start: Start, folder: Path) -> None:
    process = start("coordinator", "--listen", "tcp://127.0.0.1:*", "--keys", str(folder))
    assert process.stdout is not None
    process.stdout.readline()
    told = b"".join(
        Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("cmdline", "environ")
    )
    for name in ("coordinator", *keys.ROLES):
        assert json.loads((folder / f"{name}.key").read_text())["secret"].encode() not in told


def listening(start: Start, folder: Path) -> str:
    """The address of a coordinator with these keys."""
    process = start("coordinator", "--listen", "tcp://127.0.0.1:*", "--keys", str(folder))
    assert process.stdout is not None
    return str(process.stdout.readline().strip())


def status(run: Run, address: str, folder: Path) -> int:
    return run("status", "--connect", address, "--keys", str(folder)).returncode
