"""A new worker takes over the noted settings of the one it replaces, and ends if its command is
interrupted."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dovetail.launch.commands.swap import as_before, settings_before
from dovetail.launch.files.directory import announced, note_worker, worker_notes
from dovetail.launch.processes.replacement import Expected, Newcomer
from dovetail.launch.processes.worker import (
    before_of,
    flags_of,
    last_before,
    noted_place,
    values_of,
)
from dovetail.launch.settings.configure import configure
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Role, WorkerState
from dovetail.protocol.settings import Settings
from support.golden import a_worker, representative


def state(role: Role, pid: int, host: str = "") -> WorkerState:
    worker: WorkerState = a_worker(role, pid, roles=(role,), host=host or socket.gethostname())
    return worker


def noted(
    role: Role, flags: Sequence[str], address: str = "ipc:///x", fingerprint: str = ""
) -> None:
    """Note that this process is a worker that was started with these flags."""
    note_worker(address, (role,), flags, fingerprint)


@pytest.fixture(autouse=True)
def runtime(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(temporary))


def test_a_note_has_the_settings_of_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "settings.toml").write_text('[target]\nweights = "half"\ncontext = 256\n')
    monkeypatch.chdir(tmp_path)
    given = configure(
        flags={"target.model": "model", "target.weights": "int8"},
        file=tmp_path / "settings.toml",
        environment={"DOVETAIL_TARGET__THREADS": "3"},
    )
    noted("target", flags_of(given, "0-1", ""))
    before = before_of(state("target", os.getpid()))
    assert before is not None
    assert noted_place(before) == ["--cores=0-1"]
    assert values_of(before) == {
        "target.weights": "int8",
        "target.context": 256,
        "target.threads": 3,
        "target.model": str(tmp_path / "model"),
        "coordinator.stuck_s": 10.0,
    }


def test_workers_on_other_machines_and_of_other_processes_have_no_note() -> None:
    assert before_of(state("target", os.getpid())) is None
    noted("target", [])
    assert before_of(state("target", os.getpid(), "elsewhere")) is None
    assert before_of(state("target", os.getppid())) is None


def test_workers_of_one_name_have_a_note_each_until_they_have_ended() -> None:
    """Two targets that are started by hand are both named target."""
    code = (
        "import sys; from dovetail.launch.files.directory import note_worker as note; "
        "note('ipc:///x', ('target',), sys.argv[1:], ''); print(flush=True); sys.stdin.read()"
    )
    with announced("ipc:///x"):
        noted("target", ["--target.weights=half"])
        for _ in range(2):
            command = [sys.executable, "-c", code, "--target.weights=int8"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
                assert other.stdout is not None
                other.stdout.readline()
                known = [before_of(state("target", pid)) for pid in (os.getpid(), other.pid)]
                assert [values_of(note)["target.weights"] for note in known if note] == [
                    "half",
                    "int8",
                ]
        assert len(worker_notes()) == 2


def test_the_last_worker_of_a_role_is_known_until_its_coordinator_has_gone() -> None:
    """The worker may be lost or drained."""
    with announced("ipc:///x"):
        noted("target", ["--target.weights=half"])
        found = last_before({"ipc:///x"}, "target")
        assert found is not None
        assert values_of(found) == {"target.weights": "half"}
        assert last_before({"ipc:///z"}, "target") is None
        noted("draft", ["--draft.kind=ngram"])
    assert last_before({"ipc:///x"}, "draft") is None


def merged(flags: dict[str, str], role: Role, *, elsewhere: bool = False) -> Settings:
    before, reads = (before_of(state(one, os.getpid())) for one in (role, "target"))
    return as_before(configure(flags=flags), role, before, reads, elsewhere=elsewhere).settings


def test_a_new_worker_has_the_settings_of_the_old_one_unless_others_are_given() -> None:
    """Also if another model is given."""
    flags = ["--target.model=OWNER/NAME", "--target.weights=half", "--target.numa=off"]
    noted("target", [*flags, "--target.context=512", "--memory.ram=8GB"])
    known = merged({"target.weights": "int8"}, "target")
    target = known.target
    assert (target.model, target.weights, target.numa) == ("OWNER/NAME", "int8", "off")
    assert (target.context, known.memory.ram) == (512, "8GB")
    target = merged({"target.model": "OTHER/ONE"}, "target").target
    assert (target.model, target.weights) == ("OTHER/ONE", "half")
    target = merged({}, "target", elsewhere=True).target
    assert (target.model, target.weights, target.numa) == ("OWNER/NAME", "half", "auto")
    target = merged({"draft.kind": "substitute"}, "draft").target
    assert (target.model, target.context) == ("OWNER/NAME", 512)


def test_a_draft_of_another_kind_does_not_inherit_settings_of_the_old_kind() -> None:
    flags = ["--draft.kind=substitute", "--draft.weights=int3", "--draft.device=cpu"]
    noted("draft", [*flags, "--draft.ahead=false"])
    same = merged({}, "draft").draft
    assert (same.kind, same.weights, same.device, same.ahead) == (
        "substitute",
        "int3",
        "cpu",
        False,
    )
    other = merged({"draft.kind": "ngram"}, "draft").draft
    assert (other.kind, other.weights, other.device, other.ahead) == ("ngram", "auto", "cpu", False)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_swap_without_known_settings_or_a_model_is_refused(role: Role) -> None:
    nobody = representative()["reported"].model_copy(update={"workers": ()})
    with pytest.raises(UserError, match=f"give the model with --{role} MODEL"):
        settings_before(configure(), role, None, nobody, {"ipc:///x"})


def test_a_head_whose_target_is_unknown_is_refused() -> None:
    with pytest.raises(UserError, match="give it with --target MODEL"):
        merged({"draft.kind": "dovetail"}, "draft")
    assert merged({"draft.kind": "ngram"}, "draft").target.model == ""


@pytest.mark.parametrize(
    ("fingerprint", "asked", "words"),
    [
        ("a/fp32/k/whole/local/fp32", (), ""),
        (
            "b/fp32/k/whole/local/fp32",
            (),
            "checkpoint b instead of a; name the intended model with --target MODEL",
        ),
        ("b/fp32/k/whole/local/fp32", ("target.threads",), "checkpoint b"),
        ("b/fp32/k/whole/local/fp32", ("target.model",), ""),
        ("a/int8/k/whole/local/half", (), "weights int8 instead of fp32, cache half instead of"),
        ("a/int8/k/whole/local/half", ("target.weights",), ""),
    ],
)
def test_a_target_of_another_fingerprint_is_refused_unless_it_was_asked_for(
    fingerprint: str, asked: Sequence[str], words: str
) -> None:
    newcomer = state("target", 1).model_copy(update={"fingerprint": fingerprint})
    expected = Expected("a/fp32/k/whole/local/fp32", asked)
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        expected.check(newcomer)


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
