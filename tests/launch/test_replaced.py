"""A newcomer has the settings that the worker whose place it takes was started with, by the
kernel's account, and is ended if its command is interrupted."""

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.launch.commands.swap import as_before
from dovetail.launch.processes.newcomer import Newcomer
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.processes.worker_settings import read_command, settings_of
from dovetail.launch.settings.configure import configure
from dovetail.protocol.messages import Role, WorkerState

Start = Callable[..., "subprocess.Popen[str]"]


def state(role: Role, pid: int, host: str = "") -> WorkerState:
    nothing = {
        "threads": 1,
        "worker_epoch": pid,
        "sessions": 0,
        "busy_share": 0.0,
        "rss_mb": 0.0,
        "stale": 0,
        "model": "",
        "device": "",
        "fingerprint": "",
    }
    unknown = dict.fromkeys(("round_trip_us", "clock_offset_us", "clock_bound_us"))
    return WorkerState.model_validate(
        {
            "name": role,
            "roles": (role,),
            "host": host or socket.gethostname(),
            "pid": pid,
            **nothing,
            **unknown,
        }
    )


def test_settings_are_read_as_the_worker_read_them(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "settings.toml").write_text('[target]\nweights = "half"\ninflate = "64MiB"\n')
    line = [
        "python",
        "-P",
        "-m",
        "dovetail.launch.cli",
        "worker",
        "--role=target",
        "--config",
        "settings.toml",
        "--target",
        "model",
        "--weights=int8",
    ]
    found = read_command(
        [*line, "--connect=ipc:///nowhere"], {"DOVETAIL_TARGET__THREADS": "3"}, tmp_path
    )
    assert found == {
        "target.weights": "int8",
        "target.inflate": "64MiB",
        "target.threads": 3,
        "target.model": str(tmp_path / "model"),
    }


def test_settings_of_a_worker_that_was_forked_are_its_own() -> None:
    kinds = ("ngram", "substitute")
    commands = {
        kind: ["worker", "--role=draft", f"--draft.kind={kind}", "--connect=-"] for kind in kinds
    }
    with Supervisor() as supervisor:
        forked = supervisor.start_forked(supervisor.start_nursery([]), commands)
        for kind, child in forked.items():
            while (found := settings_of(state("draft", child.process.pid))) is None:
                assert not child.ended, child.last_words()
            assert found == {"draft.kind": kind}


def test_what_is_no_worker_of_this_machine_has_no_settings_here(tmp_path: Path) -> None:
    assert read_command(["python", "serve"], {}, tmp_path) is None
    assert read_command(["dovetail", "worker", "--role=king"], {}, tmp_path) is None
    assert (
        read_command(["dovetail", "worker", "--role=target", "--config=gone.toml"], {}, tmp_path)
        is None
    )
    assert settings_of(state("target", os.getpid())) is None
    assert settings_of(state("target", os.getpid(), "elsewhere")) is None


def test_a_newcomer_is_as_the_worker_that_leaves_but_for_what_is_said(
    start: Start, tmp_path: Path
) -> None:
    worker = start(
        "worker",
        "--role=target",
        f"--connect=ipc://{tmp_path}/nobody",
        "--target=OWNER/NAME",
        "--weights=half",
        "--target.numa=off",
    )
    old = state("target", worker.pid)
    after, known = as_before(
        configure(flags={"target.weights": "int8"}), "target", old, [old], elsewhere=False
    )
    target = after.settings.target
    assert (known, target.model, target.weights, target.numa) == (True, "OWNER/NAME", "int8", "off")
    after, known = as_before(
        configure(flags={"target.model": "OTHER/ONE"}), "target", old, [old], elsewhere=False
    )
    target = after.settings.target
    assert (known, target.model, target.weights, target.numa) == (True, "OTHER/ONE", "fp32", "auto")
    after, known = as_before(configure(), "target", old, [old], elsewhere=True)
    target = after.settings.target
    assert (known, target.model, target.weights, target.numa) == (False, "", "half", "auto")
    after, _ = as_before(
        configure(flags={"draft.kind": "substitute"}), "draft", None, [old], elsewhere=False
    )
    assert (after.settings.target.model, after.settings.target.weights) == ("OWNER/NAME", "fp32")


def test_whose_model_cannot_be_known_has_none_of_it() -> None:
    elsewhere = state("target", 1, "elsewhere")
    after, known = as_before(configure(), "target", elsewhere, [elsewhere], elsewhere=False)
    assert (known, after.settings.target.model) == (False, "")


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_while_a_newcomer_starts_ends_it_too(
    number: signal.Signals,
    raised: type[BaseException],
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        """A process that is there, and not known to who started it, when the signal comes."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            begun.append(self)
            signal.raise_signal(number)

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(temporary))
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    flags = ("worker", "--role=draft", f"--connect=ipc://{temporary}/nobody")
    with pytest.raises(raised), Newcomer(flags, "draft") as newcomer:
        newcomer.start()
    assert begun[0].returncode == -signal.SIGTERM
    assert not [*temporary.rglob("worker-*.log")]
