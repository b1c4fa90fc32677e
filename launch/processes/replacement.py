"""Replaces workers by a new one, role by role."""

import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dovetail.launch.console.terminal import Intervals, counted, loading_text, note, spinner
from dovetail.launch.files.directory import remove_unused_logs, runtime_directory
from dovetail.launch.processes.connection import all_serving, describe, shorten_model
from dovetail.launch.processes.stack import POLL_S, Played
from dovetail.launch.processes.supervise import GRACE_S, Child, Unwinding
from dovetail.protocol.errors import DovetailError, RequestError, UserError
from dovetail.protocol.messages import Dismissed, Role, Swapped, WorkerState
from dovetail.runtime.client import Client

PARTS = ("checkpoint", "weights", "kernels", "split", "prefill", "cache")
"""The names of the parts of a fingerprint."""
OTHERS = ("target.", "memory.")  # settings that may change any part except the first


class Change:
    """A new worker of one role or both, which replaces the present ones."""

    def __init__(
        self,
        client: Client,
        role: Played,
        name: str,
        old: Mapping[Role, WorkerState | None],
        expected: "Expected",
        *,
        beside: bool,
    ) -> None:
        """`expected`: the fingerprint of the target. `beside`: no worker leaves."""
        self._client, self._old, self._expected, self._beside = client, old, expected, beside
        self._names: dict[Role, str] = {
            part: f"{name}-{part}" if role == "unified" else name for part in old
        }
        self.newcomers: dict[Role, WorkerState] = {}
        self._placed = False
        self.words: list[str] = []  # the outcome in words

    def wait(self, child: Child | None) -> None:
        for part, name in self._names.items():
            self.newcomers[part] = wait_until_here(self._client, name, child, self._old[part])
        if (target := self.newcomers.get("target")) is not None:
            self._expected.check(target)

    def make(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part, newcomer in self.newcomers.items():
            before = self._client.status().workers
            old = self._there(part, before)
            done = wait_for(
                self._client,
                self._client.swap(
                    newcomer.worker_epoch, old.worker_epoch if old is not None else None
                ),
            )
            self._placed = True
            found[part] = {**summary_of(newcomer, old), **figures(done)}
            place = "serves with the others" if self._beside else "is in place"
            place = f"has replaced {where(old)}" if old is not None else place
            self.words.append(
                f"{where(newcomer)} {place}, {describe(part, newcomer)}: {told(done)}"
            )
            if old is None:
                self._let_go_latecomers(part, before)
        return found

    def is_begun(self, *, interrupted: bool) -> bool:
        """True if it has sessions, or may have some after an interruption; then we must not end
        it."""
        return self._placed or (
            interrupted
            and any(is_in_place(self._client, newcomer) for newcomer in self.newcomers.values())
        )

    def _there(self, part: Role, workers: Sequence[WorkerState]) -> WorkerState | None:
        """Return the leaving worker, if it is still registered. It may have left with the other
        role of its process, been lost, or just returned under its name."""
        old = self._old[part]
        if self._beside:
            return None
        if old is None:
            return leaver(workers, part, None)
        found = [worker for worker in workers if worker.worker_epoch == old.worker_epoch]
        found += [
            worker
            for worker in all_serving(workers, part)
            if (worker.name, worker.host) == (old.name, old.host)
        ]
        return next(iter(found), None)

    def _let_go_latecomers(self, part: Role, before: Sequence[WorkerState]) -> None:
        """Drain workers that registered in this role while the newcomer was tested, unless no
        worker should leave."""
        known = {worker.worker_epoch for worker in (*before, *self.newcomers.values())}
        for late in [] if self._beside else all_serving(self._client.status().workers, part):
            if late.worker_epoch not in known:
                gone = wait_for(self._client, self._client.dismiss(late.worker_epoch, last=False))
                self.words.append(
                    f"{where(late)} registered in the meantime and was drained: {told(gone)}"
                )


def serving(workers: Sequence[WorkerState], role: Role) -> WorkerState | None:
    return next(iter(all_serving(workers, role)), None)


def summary_of(newcomer: WorkerState, old: WorkerState | None) -> dict[str, Any]:
    nobody = {"moved": 0, "stayed": 0, "longest_pause_s": 0.0}
    worker = {"worker": newcomer.name, "pid": newcomer.pid, "model": newcomer.model}
    return {**worker, "replaced": old.name if old else None, **nobody}


@dataclass(frozen=True)
class Expected:
    """The fingerprint that a replacing target must have."""

    fingerprint: str  # the other target's fingerprint; empty if unknown
    asked: Collection[str]  # the dotted names of the settings given for the new one

    def check(self, newcomer: WorkerState) -> None:
        """Raise `UserError` for a target that computes other bytes unless that was requested."""
        pairs = zip(
            PARTS, self.fingerprint.split("/"), newcomer.fingerprint.split("/"), strict=False
        )
        differ = {name: f"{has} instead of {had}" for name, had, has in pairs if had != has}
        allowed = ("target.model",) if "checkpoint" in differ else OTHERS
        if differ and self.fingerprint and not any(name.startswith(allowed) for name in self.asked):
            words = ", ".join(f"{name} {how}" for name, how in differ.items())
            raise UserError(
                f"{newcomer.name} with {shorten_model(newcomer.model)} would compute other bytes "
                f"than the target that it replaces: {words}; name the intended model with --target "
                "MODEL"
            )


def leaver(workers: Sequence[WorkerState], role: Role, replaced: str | None) -> WorkerState | None:
    """Return the worker to replace: the named one, or the only one of the role; None if there is
    none."""
    serving = all_serving(workers, role)
    if replaced is not None:
        return named(serving, replaced)
    if len(serving) > 1:
        choices = ", ".join(map(where, serving))
        text = f"there are {len(serving)} {role} workers, {choices}"
        raise UserError(f"{text}: choose with --replace, or --beside for none")
    return serving[0] if serving else None


def restarted(client: Client, role: Role) -> WorkerState | None:
    """Wait while `dovetail serve` restarts the lost worker of a role; None if it does not."""
    parts, told = (f"{role} worker", "unified worker"), False
    with spinner() as say:
        while (back := serving((state := client.status()).workers, role)) is None:
            fault = next((one for one in state.faults if one.restarts and one.part in parts), None)
            if fault is None:
                return None
            if not told:
                told = True
                note(f"waiting for `dovetail serve`, which restarts the {fault.part}")
            say(f"waiting for the {fault.part}" + loading_text(state.loading))
            time.sleep(POLL_S)
    return back


def wait_until_here(
    client: Client, name: str, child: Child | None, old: WorkerState | None
) -> WorkerState:
    """Wait for the worker on standby to register; raise its error if its process ends first."""
    intervals = Intervals()
    with spinner(lines=True) as say:
        if child is not None:
            say(f"starting {name}")
        while True:
            state = client.status()
            if loading := [told for told in state.loading if told.name == name]:
                say(f"loading {name}" + loading_text(loading))
            if not sys.stderr.isatty():
                intervals.tell(loading)
            for worker in state.workers:
                ours = child is None or (worker.pid, worker.host) == (child.pid, child.host)
                if worker.standby and worker.name == name and ours:
                    return worker
            if child is not None and child.ended:
                failure = child.failure()
                raise type(failure)(f"{failure}{f'; {old.name} stays' if old is not None else ''}")
            time.sleep(POLL_S)


def is_in_place(client: Client, newcomer: WorkerState) -> bool:
    """True if it has sessions, or may have: then the change continues without us, and we must not
    end it."""
    for worker in client.status().workers:
        if worker.worker_epoch == newcomer.worker_epoch and not worker.standby:
            note(f"{newcomer.name} is in place and stays; `dovetail status` shows the change")
            return True
    return False


def where(worker: WorkerState) -> str:
    return f"{worker.name} (pid {worker.pid} on {worker.host})"


def named(workers: Sequence[WorkerState], name: str) -> WorkerState:
    """The worker of this name or pid; `UserError` names the choices if there is none, or
    several."""
    found = [worker for worker in workers if worker.name == name] or [
        worker for worker in workers if re.fullmatch("[0-9]+", name) and worker.pid == int(name)
    ]
    if len(found) == 1:
        return found[0]
    choices = ", ".join(map(where, found or workers))
    if found:
        raise UserError(f"{len(found)} workers are called {name!r}: choose by pid from {choices}")
    there = f"choose one of {choices}" if workers else "none is registered"
    raise UserError(f"there is no worker {name!r}: {there}")


def wait_for(client: Client, request: int) -> Swapped | Dismissed:
    """Wait for the end of a change of workers; raise a refusal or failure."""
    try:
        return client.changed(request, note)
    except RequestError as error:
        raise DovetailError(str(error)) from None


def figures(done: Swapped | Dismissed) -> dict[str, float]:
    return {"moved": done.moved, "stayed": done.stayed, "longest_pause_s": done.longest_pause_s}


def told(done: Swapped | Dismissed) -> str:
    """Describe the outcome for the sessions."""
    if not (done.moved or done.stayed):
        return "no session had to move"
    return (
        f"{counted(done.moved, 'session')} moved, {done.stayed} ended where they were, the longest "
        f"pause between tokens was {1e3 * done.longest_pause_s:.0f} ms"
    )


class Newcomer(Unwinding):
    """A worker's process that ends with this block, unless it `stays`. Signals are handled only
    once the process is ours."""

    def __init__(self, arguments: Sequence[str], name: str) -> None:
        super().__init__()
        self._arguments, self._name, self._stays = arguments, name, False
        self._path = runtime_directory() / f"worker-{name.replace(os.sep, '_')}-{os.getpid()}.log"
        self._child: Child | None = None

    def start(self) -> Child:
        """Start the worker in a new session, out of reach of Ctrl-C and the end of the terminal."""
        remove_unused_logs(self._path.parent)
        log = self._path.open("a+b")
        fcntl.flock(log, fcntl.LOCK_EX)  # held for as long as the worker has the file open
        self._busy = True
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dovetail.launch.cli", *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
        self._child = Child(f"{self._name} worker", process, log)
        self._unblock()
        return self._child

    def stays(self) -> None:
        self._stays = True

    def __exit__(self, *_: object) -> None:
        """End the worker if it does not stay. Nothing interrupts this: it takes `GRACE_S` at
        most."""
        self._busy = True
        try:
            if self._child is not None:
                self._part_with(self._child)
        finally:
            super().__exit__()

    def _part_with(self, child: Child) -> None:
        child.log.close()
        if self._stays:
            child.process.returncode = 0  # it is no longer our child: no ResourceWarning
            note(f"the output of {self._name} goes to {self._path}")
            return
        child.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(GRACE_S)
        if not child.ended:
            child.process.kill()
            child.process.wait()
        self._path.unlink(missing_ok=True)
