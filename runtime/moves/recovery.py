"""Recovery of sessions whose target was lost: the targets on which they may continue, and how long
they wait.

A session that has sent tokens to its client continues on a target of the same fingerprint, or, if
the user allows it, of the same vocabulary; one that has sent nothing continues on any target of the
same vocabulary. Pure: decisions only."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dovetail.protocol.errors import RequestError
from dovetail.runtime.engine.running import Loss, RunningRequest
from dovetail.runtime.fleet.peers import Worker

MARGIN_S = 30.0
LOADS = 2.0  # seconds to wait for a restarted target, plus this multiple of its loading time


@dataclass(frozen=True)
class Recovery:
    """The settings coordinator.recovery_s and coordinator.move."""

    recovery_s: float | Literal["auto"] = "auto"
    move: Literal["same", "any"] = "same"

    def suits(self, running: RunningRequest, target: Worker) -> bool:
        """Return whether a session may continue on this target."""
        if (
            not target.reads_as(running.target)
            or running.session.request.capacity > target.limits.context
        ):
            return False
        return (
            self.move == "any"
            or running.session.unheard
            or target.hello.fingerprint == running.target.hello.fingerprint
        )

    def patience_s(self, running: RunningRequest) -> float:
        """Return how long a session that lost its target waits for another one."""
        return (
            MARGIN_S + LOADS * running.target.hello.load_s
            if self.recovery_s == "auto"
            else self.recovery_s
        )

    def lost(self, running: RunningRequest, why: str, now_ns: int) -> None:
        """Note that its target has gone, and whether the target was computing it."""
        if running.sent and running.awaited() is running.target:
            running.losses.append(running.target.process)
        running.loss = Loss(
            now_ns,
            f"the target worker {running.target.whereabouts} {why} after "
            f"{len(running.session.tokens)} tokens",
        )

    def end_of(
        self, running: RunningRequest, others: Iterable[Worker], now_ns: int
    ) -> RequestError | None:
        """Return why a waiting session must stop waiting, if it must. `others`: the workers."""
        assert running.loss is not None
        if running.trial:
            return RequestError("worker_lost", running.loss.words)
        if running.doomed:
            text = (
                f"{running.loss.words}, and {len(running.losses)} in a row were lost without a "
                "token in between: find out why targets end while reading this request"
            )
            return RequestError("worker_lost", text)
        if now_ns - running.loss.since_ns < self.patience_s(running) * 1e9:
            return None
        waited = f"{self.patience_s(running):.3g} s"
        if self.move == "same" and any(
            other.plays("target") and other.reads_as(running.target) for other in others
        ):
            text = (
                f"and within {waited} none of its fingerprint was free: start one, or let requests "
                "continue on others with coordinator.move = 'any'"
            )
        else:
            text = f"and within {waited} no other was free: start one and send the request again"
        return RequestError("worker_lost", f"{running.loss.words}, {text}")

    def words(self, running: RunningRequest, now_ns: int) -> str:
        """Return the words of `status` for a waiting session."""
        assert running.loss is not None
        left_s = max(0.0, self.patience_s(running) - (now_ns - running.loss.since_ns) / 1e9)
        return (
            f"session {running.session.number} waits for a target, for {left_s:.0f} s at most: "
            f"{running.loss.words}"
        )
