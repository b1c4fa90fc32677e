"""The coordinators that are announced and alive."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.launch.commands.swap import announced_keys
from dovetail.launch.files.directory import (
    Announcement,
    announced,
    announcements,
    history_path,
    only_announcement,
    profile_path,
    runtime_directory,
    writable_profile_path,
)
from dovetail.protocol.errors import UserError
from support.patience import PATIENCE_S

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_a_process_that_was_killed_but_not_reaped_is_not_alive() -> None:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE
    ) as process:
        started = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
        announcement = Announcement("ipc:///x", process.pid, started)
        assert announcement.alive
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{process.pid}").exists()
        assert not announcement.alive
    assert not announcement.alive


def test_this_process_is_announced_while_the_block_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with announced("ipc:///x", url="http://127.0.0.1:8000"):
        assert [(a.address, a.pid, a.url) for a in announcements()] == [
            ("ipc:///x", os.getpid(), "http://127.0.0.1:8000")
        ]
    assert announcements() == []


def test_logs_of_workers_that_have_ended_are_removed_by_the_next_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = runtime_directory()
    (folder / "worker-draft-2-1.log").touch()
    with (folder / "worker-draft-3-1.log").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with announced("ipc:///x"):
            pass
        assert [path.name for path in folder.iterdir()] == ["worker-draft-3-1.log"]


def test_of_several_coordinators_the_choices_name_what_is_served_over_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    pid = os.getpid()
    with announced("ipc:///x", url="http://127.0.0.1:8000"):
        (mine,) = (tmp_path / "dovetail").iterdir()
        text = mine.read_text().replace("ipc:///x", "ipc:///y").replace("http://127.0.0.1:8000", "")
        mine.with_name("coordinator-z.json").write_text(text)
        with pytest.raises(UserError, match="you have 2 coordinators running") as caught:
            only_announcement()
    assert str(caught.value).endswith(
        f"--connect ipc:///x (`dovetail serve`, pid {pid}, over HTTP http://127.0.0.1:8000); "
        f"--connect ipc:///y (pid {pid})"
    )


def test_the_keys_of_a_coordinator_that_is_named_are_its_own_whatever_else_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with announced("tcp://x:1", keys="/mine"):
        (mine,) = (tmp_path / "dovetail").iterdir()
        text = mine.read_text().replace("tcp://x:1", "tcp://y:1").replace("/mine", "/another")
        mine.with_name("coordinator-z.json").write_text(text)
        found = [announced_keys(address) for address in ("tcp://x:1", "tcp://y:1", "tcp://z:1")]
    assert found == ["/mine", "/another", ""]


def test_the_process_that_is_announced_is_named_for_what_it_is() -> None:
    """`serve` announces its own number, and not that of the coordinator that it has started."""
    served = Announcement("ipc:///x", 12, 0, url="http://127.0.0.1:8000")
    assert served.process == "`dovetail serve`, pid 12"
    assert Announcement("ipc:///x", 12, 0).process == "pid 12"


def test_the_profile_file_lies_in_the_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profile_path() == tmp_path / "dovetail" / "profile.json"
    assert writable_profile_path() == profile_path()
    assert profile_path().parent.is_dir()
    monkeypatch.setenv(
        "XDG_CACHE_HOME", "not/absolute"
    )  # as the XDG specification has it, such a one does not count
    assert profile_path() == Path.home() / ".cache" / "dovetail" / "profile.json"


def test_what_was_typed_is_kept_with_the_user_s_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_path() == tmp_path / "dovetail" / "chat_history"
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    assert history_path() == Path.home() / ".local" / "state" / "dovetail" / "chat_history"


def test_where_the_profile_file_cannot_be_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert writable_profile_path() is None


def test_a_user_without_a_home_has_no_profile_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert writable_profile_path() is None
    assert str(profile_path()) == "~/.cache/dovetail/profile.json"
    assert history_path() is None
    assert not list(tmp_path.iterdir())


def test_a_temporary_directory_whose_name_is_too_long_for_a_socket_ends_no_start(
    start: Callable[..., "subprocess.Popen[str]"], run: Run, temporary: Path
) -> None:
    """The socket is in a private folder elsewhere, where commands find it, and which goes with
    it."""
    long = temporary / ("job" * 40)
    long.mkdir()
    long.chmod(0o700)
    more = {"TMPDIR": str(long), "XDG_RUNTIME_DIR": str(long)}
    coordinator = start("coordinator", more=more)
    assert coordinator.stdout is not None
    address = coordinator.stdout.readline().strip()
    folder = Path(address.removeprefix("ipc://")).parent
    assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, os.geteuid())
    found = run("status", "--json", env={**os.environ, **more})
    assert json.loads(found.stdout)["address"] == address
    coordinator.terminate()
    assert coordinator.wait(PATIENCE_S) == 0
    assert not folder.exists()
