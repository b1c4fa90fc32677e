"""The answer to Status: peers, running sessions, and faults."""

import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dovetail.protocol.memory import process_load
from dovetail.protocol.messages import (
    MAX_DECISIONS,
    MAX_FAULTS,
    MAX_PAIRS,
    MAX_SESSIONS,
    Fault,
    KeyWaits,
    ProcessState,
    Reported,
    Role,
    Totals,
)
from dovetail.protocol.messages.status import Lack
from dovetail.runtime.control.pairs import MAX_WORDS
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.engine.shared import Shared, WaitingRequest
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.session.state import State

WORKER_ROLES: tuple[Role, ...] = ("target", "draft")
DRAINED = (
    "the {role} worker was drained by an operator and is not restarted: `dovetail swap "
    "--role {role}` starts another one"
)
MAX_REASONS = MAX_PROCESSES = 64
LABEL = 8  # hexadecimal digits of a key's digest that name it in metrics


class Status:
    """Keeps the data that only `status` reports, and answers Status."""

    def __init__(
        self,
        shared: Shared,
        attempt: Callable[[RunningRequest, Callable[[], object]], None],
        lacks: Callable[[WaitingRequest], Lack],
    ) -> None:
        """`attempt` runs a function about one session, whose errors end only that session; `lacks`
        returns what a queued request waits for."""
        self._hub, self._service, self._running = shared.hub, shared.service, shared.running
        self._registry, self._placement = shared.registry, shared.placement
        self._failing, self._moving, self._changes = shared.failing, shared.moving, shared.changes
        self._tally, self._dropped, self._now_ns = shared.tally, shared.dropped, shared.now_ns
        self._queue, self._journal = shared.queue, shared.journal
        self._attempt, self._lacks, self._began_ns = attempt, lacks, shared.now_ns()
        self._lost_drafts: dict[str, tuple[str, int]] = {}
        """Lost drafts by name that no other has replaced: why and when."""
        self._decisions: deque[str] = deque(maxlen=MAX_DECISIONS)

    def decided(self, words: str) -> None:
        """Keep a decision about speculation."""
        self._decisions.append(words[:MAX_WORDS])

    def draft_lost(self, draft: Worker, why: str) -> None:
        """Note that a draft that served sessions has gone."""
        self._lost_drafts[draft.name] = why, self._now_ns()

    def draft_there(self) -> None:
        """Note that there is a draft again."""
        self._lost_drafts.clear()

    def _unplayed(self) -> tuple[Role, ...]:
        """Return the roles without a worker since an operator drained the last one, from our
        records and the supervisor's report."""
        return tuple(
            role
            for role in WORKER_ROLES
            if role in {*self._service.drained, *self._service.supervised.drained}
            and not any(worker.plays(role) for worker in self._registry.workers.values())
        )

    def _faults(self, now_ns: int) -> tuple[Fault, ...]:
        """Return the faulty parts, from our records and from the supervisor's report, which has
        precedence."""
        told_s = (now_ns - self._service.supervised_ns) / 1e9
        told = [
            fault.model_copy(
                update={
                    "since_s": fault.since_s + told_s,
                    "retry_s": None if fault.retry_s is None else max(0.0, fault.retry_s - told_s),
                }
            )
            for fault in self._service.supervised.faults
        ]
        lost = self._lost_drafts.items() if self._registry.pick("draft") is None else ()
        ours = [
            Fault(part=f"{name} worker"[-MAX_WORDS:], why=why, since_s=(now_ns - at_ns) / 1e9)
            for name, (why, at_ns) in lost
        ]
        ours += self._failing.faults(now_ns)
        if self._journal is not None and self._journal.failed:
            why = f"it has stopped: {self._journal.failed}, and restart the coordinator; "
            why += f"its folder is {self._journal.state().folder}"
            ours.append(Fault(part="journal", why=why[:MAX_WORDS], since_s=self._journal.stopped_s))
        known = {fault.part for fault in told}
        return tuple([*told, *(fault for fault in ours if fault.part not in known)][:MAX_FAULTS])

    def report(self) -> Reported:
        """Return the answer to Status."""
        now_ns = self._now_ns()
        faults = self._faults(now_ns)
        reasons = [self._service.given_up] if self._service.given_up else []
        silent = [worker for worker in self._registry.workers.values() if worker.silent]
        reasons += [
            f"{worker.whereabouts} has not responded for {worker.liveness.silent_ns / 1e9:.0f} s"[
                -MAX_WORDS:
            ]
            for worker in silent
        ]
        if self._registry.pick("target") is None and not any(
            worker.plays("target") for worker in silent
        ):
            reasons.append("no target worker is registered")
        if self._lost_drafts and self._registry.pick("draft") is None:
            reasons.append("a draft worker was lost: sessions decode with the target alone")
        loading = self._registry.loading(now_ns)
        reasons += [fault.words[:MAX_WORDS] for fault in faults]
        reasons += [words[:MAX_WORDS] for words in self._moving.words()]
        degraded = bool(reasons)
        drained = self._unplayed()
        reasons += [DRAINED.format(role=role) for role in drained]
        reasons += [state.words[:MAX_WORDS] for state in loading]
        reasons += [self._changes.words[:MAX_WORDS]] if self._changes.under_way else []
        reasons += [medley[:MAX_WORDS]] if (medley := self._registry.medley()) else []
        offs: dict[int, list[str | None]] = {}
        """By id() of a pair: for each of its sessions why it does not draft, or None."""
        for running in [*self._running.values()]:
            if running.loss is not None:
                continue  # it is not being decoded, as reported above
            self._attempt(
                running,
                lambda one=running.controller: offs.setdefault(id(one.pair), []).append(one.off),  # type: ignore[misc]
            )
        pairs = [pair.state(offs.get(id(pair), ())) for pair in self._placement.pairs]
        reasons += [pair.undrafted for pair in pairs if pair.undrafted]
        return Reported(
            epoch=self._service.epoch,
            address=self._hub.address,
            pid=os.getpid(),
            uptime_s=(now_ns - self._began_ns) / 1e9,
            workers=tuple(w.state(now_ns) for w in self._registry.workers.values()),
            sessions=len(self._running),
            finished=self._tally.ended["stop"] + self._tally.ended["length"],
            failed=self._tally.ended["error"],
            cancelled=self._tally.ended["cancelled"],
            rounds=self._tally.rounds,
            tau=self._tally.tau,
            stale=self._dropped.stale,
            refused=self._dropped.refused + self._hub.refused(),
            degraded=degraded,
            reasons=tuple(reasons[:MAX_REASONS]),
            faults=faults,
            loading=loading,
            processes=self._processes(),
            pairs=tuple(pairs[:MAX_PAIRS]),
            decisions=tuple(self._decisions),
            totals=self._totals(),
            drained=drained,
            journal=self._journal.state() if self._journal is not None else None,
        )

    def _processes(self) -> tuple[ProcessState, ...]:
        """Return this process and those of HTTP APIs, with their load if they run here."""
        here, found = socket.gethostname(), list[ProcessState]()
        clients = [one.hello for one in self._registry.clients.values()]
        https = [("http", one.host, one.pid) for one in clients if one.name.startswith("http-")]
        for name, host, pid in [("coordinator", here, os.getpid()), *https][:MAX_PROCESSES]:
            fields: dict[str, Any] = {"name": name, "host": host, "pid": pid}
            if host == here:
                with suppress(OSError):  # it has just ended
                    fields["cpu_s"], rss_bytes = process_load(pid)
                    fields["rss_mb"] = rss_bytes / 1e6
            found.append(ProcessState.model_validate(fields))
        return tuple(found)

    def _totals(self) -> Totals:
        targets = [
            worker
            for worker in self._registry.workers.values()
            if worker.plays("target") and not worker.standby
        ]
        room = sum(target.limits.sessions for target in targets)
        return self._tally.totals(
            draft_failures=self._failing.count,
            opening=sum(
                running.session.state is State.OPENING and not running.session.tokens
                for running in self._running.values()
            ),
            waiting=sum(running.loss is not None for running in self._running.values()),
            kept=sum(len(target.shelf) for target in targets),
            occupied=min(1.0, sum(target.sessions for target in targets) / max(1, room)),
            queue=[
                KeyWaits(
                    key=label_of(own.key),
                    length=own.length,
                    longest_s=own.longest_s,
                    lacks=self._lacks(own.first),
                )
                for own in self._queue.keys(self._now_ns())[:MAX_SESSIONS]
            ],
            queued=len(self._queue),
        )


def label_of(key: str) -> str:
    """Return the label of an API key in metrics: the beginning of its digest, which does not reveal
    the key; empty for requests without a key."""
    return key.rpartition("/")[2][:LABEL]
