"""The command `dovetail http`: what its user can do wrong."""

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dovetail.launch.cli import run
from dovetail.launch.commands.http import shown, url_of
from dovetail.launch.settings.http_keys import LOOK_EVERY_S, KeyFile, is_here_only, read_keys
from dovetail.protocol.errors import SettingsError
from dovetail.protocol.settings import HttpSettings
from support.web import backend


def test_a_port_in_use_is_named_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["http", "--connect=ipc:///tmp/nobody/there", f"--http.port={port}"]) == 2
    assert re.search(rf"127\.0\.0\.1 port {port} .*--http\.port", capsys.readouterr().err)


def test_a_host_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["http", "--connect=ipc:///tmp/nobody/there", "--http.host=no.such.host.invalid"]) == 2
    )
    assert "http.host" in capsys.readouterr().err


def test_beyond_this_machine_a_key_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["http", "--connect=ipc:///tmp/nobody/there", "--http.host=0.0.0.0", "--http.port=0"])
        == 2
    )
    assert "api_key_file" in capsys.readouterr().err


def test_without_an_address_the_only_coordinator_is_looked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run(["http"]) == 2
    assert "run `dovetail coordinator`, or use --connect" in (capsys.readouterr().err)


def test_keys_are_read_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("\n0123456789abcdef\n fedcba9876543210 \n", encoding="utf-8")
    path.chmod(0o600)
    assert read_keys(HttpSettings(host="0.0.0.0", api_key_file=str(path))) == (
        "0123456789abcdef",
        "fedcba9876543210",
    )


def test_keys_are_read_again_when_their_file_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, now_s = tmp_path / "keys", 0.0
    path.write_text("0123456789abcdef\n", encoding="utf-8")
    path.chmod(0o600)
    keys = KeyFile(HttpSettings(api_key_file=str(path)), now_s=lambda: now_s)
    both = ["0123456789abcdef", "fedcba9876543210"]
    path.write_text("\n".join(both), encoding="utf-8")
    assert [*keys] == both[:1]
    now_s += LOOK_EVERY_S
    assert [*keys] == both
    path.chmod(0o644)
    now_s += LOOK_EVERY_S
    assert [*keys] == both
    now_s += LOOK_EVERY_S
    assert len(keys) == 2
    (told,) = caplog.messages
    assert "can be read by others: chmod 600" in told
    assert told.endswith("until then the previous keys are valid")
    path.write_text(both[1], encoding="utf-8")
    path.chmod(0o600)
    now_s += LOOK_EVERY_S
    assert [*keys] == both[1:]


@pytest.mark.parametrize("put", [lambda path: path.write_bytes(b"\0" * 40), os.mkfifo])
def test_keys_go_on_holding_when_their_file_becomes_something_else(
    put: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, now_s = tmp_path / "keys", 0.0
    path.write_text("0123456789abcdef\n", encoding="utf-8")
    path.chmod(0o600)
    keys = KeyFile(HttpSettings(api_key_file=str(path)), now_s=lambda: now_s)
    path.unlink()
    put(path)
    path.chmod(0o600)
    now_s += LOOK_EVERY_S
    assert [*keys] == ["0123456789abcdef"]
    (told,) = caplog.messages
    assert "is not UTF-8 text" in told or "is not a regular file" in told
    assert told.endswith("until then the previous keys are valid")


@pytest.mark.parametrize(
    ("content", "mode", "complaint"),
    [
        ("0123456789abcdef", 0o644, "chmod"),
        ("short", 0o600, "line 1, has 5 characters: .* 16"),
        ("", 0o600, "line 1, holds no key"),
        ("0123456789abcdef\n\n# the key of Alice", 0o600, "line 3, has more than one key"),
        ("0123456789abcdef weight=2", 0o600, "line 1, has more than one key"),
        ("#0123456789abcdef", 0o600, "line 1, has more than one key"),
        ("\u00e40123456789abcdef", 0o600, "not ASCII"),
        (None, 0, "cannot be read: .* openssl rand"),
    ],
)
def test_a_file_of_keys_that_is_none_is_refused(
    tmp_path: Path, content: str | None, mode: int, complaint: str
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content, encoding="utf-8")
        path.chmod(mode)
    with pytest.raises(SettingsError, match=complaint):
        read_keys(HttpSettings(api_key_file=str(path)))


@pytest.mark.parametrize("there", [False, True])
def test_what_mends_a_file_of_keys_can_be_typed_as_it_stands(tmp_path: Path, there: bool) -> None:
    path = tmp_path / "my keys $HOME"
    if there:
        path.write_text("0123456789abcdef", encoding="utf-8")
        path.chmod(0o644)
    with pytest.raises(SettingsError) as refused:
        read_keys(HttpSettings(api_key_file=str(path)))
    assert shlex.quote(str(path)) in str(refused.value)


def test_addresses_of_this_machine_alone_are_known() -> None:
    assert [
        is_here_only(host)
        for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::", "10.1.2.3")
    ] == [True, True, True, False, False, False]


def limited(files: int) -> tuple[str, ...]:
    """A command line that may have so many open files, and no more."""
    return (
        "bash",
        "-c",
        f'ulimit -n {files}; exec "$@"',
        "bash",
        sys.executable,
        "-P",
        "-m",
        "dovetail.launch.cli",
    )


def test_more_connections_than_files_are_lowered_and_told_where_nobody_asked_for_them(
    start: Callable[..., "subprocess.Popen[str]"],
) -> None:
    with backend() as house, contextlib.ExitStack() as opened:
        process = start("http", f"--connect={house.address}", "--http.port=0", command=limited(64))
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().strip()
        said = process.stderr.readline()
        assert "http.connections is 16, not 4096: this process may have 64 open files" in said
        place = urlsplit(url)
        held = [
            opened.enter_context(socket.create_connection((place.hostname, place.port)))
            for _ in range(17)
        ]
        assert b" 503 " in held[-1].recv(4096)
        held[0].sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b" 200 " in held[0].recv(4096)


@pytest.mark.parametrize(
    ("files", "flags", "words"),
    [
        (
            64,
            ("--http.connections=100",),
            "needs 148 open files, and this process may have 64: lower it to at most 16, or raise "
            "the limit with `ulimit -n",
        ),
        (
            40,
            (),
            "dovetail needs 64 open files, and may have 40: raise the limit with `ulimit -n",
        ),
    ],
)
def test_more_connections_than_files_are_refused_where_they_were_asked_for_or_none_is_left(
    start: Callable[..., "subprocess.Popen[str]"], files: int, flags: tuple[str, ...], words: str
) -> None:
    process = start(
        "http", "--connect=ipc:///tmp/nobody/there", "--http.port=0", *flags, command=limited(files)
    )
    said, complaint = process.communicate()
    assert (process.returncode, said, complaint.count("\n")) == (2, "", 1), complaint
    assert words in complaint


def test_the_url_has_the_real_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert url_of("127.0.0.1", listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("dashboard", "keyed", "expected"),
    [
        ("auto", False, "full"),
        ("auto", True, "anonymous"),
        ("full", True, "full"),
        ("anonymous", False, "anonymous"),
    ],
)
def test_the_dashboard_shows_texts_by_itself_only_where_no_key_is_set(
    dashboard: Any, keyed: bool, expected: str
) -> None:
    assert shown(HttpSettings(dashboard=dashboard), keyed=keyed) == expected
