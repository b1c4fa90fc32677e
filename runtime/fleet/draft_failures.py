"""Reports of drafts that could not carry out a command; their sessions continue without them. A
draft counts as failing until a request that began after its last failure completes with it. Workers
are identified by their addresses; times are arguments."""

from dataclasses import dataclass

from dovetail.protocol.messages import DraftFailure, Fault
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.fleet.peers import Worker

MAX_WORDS = 512  # most characters of a failure's text, which comes from a worker


@dataclass
class _Failing:
    """The failures of one draft."""

    name: str
    words: str
    began_ns: int  # time of its first failure
    last_ns: int
    count: int = 1

    def fault(self, now_ns: int) -> Fault:
        often = "" if self.count == 1 else f" ({self.count} failures so far)"
        return Fault(
            part=f"{self.name} worker"[-MAX_WORDS:],
            why=self.words[: MAX_WORDS - len(often)] + often,
            since_s=(now_ns - self.began_ns) / 1e9,
        )


class FailingDrafts:
    """The registered drafts that fail."""

    def __init__(self) -> None:
        self.count = 0  # failures of all drafts
        self._failing: dict[bytes, _Failing] = {}

    def failed(self, draft: Worker, running: RunningRequest | None, why: str, now_ns: int) -> None:
        """Record a draft's failure, and, if it is the first there, in its session."""
        where = (
            "while drafting ahead"
            if running is None
            else f"in round {running.session.round} of session {running.session.number}"
        )
        self.count += 1
        if (known := self._failing.get(draft.peer)) is not None:
            known.count, known.last_ns = known.count + 1, now_ns
        else:
            self._failing[draft.peer] = _Failing(draft.name, f"{why}, {where}", now_ns, now_ns)
        if running is not None:
            note_failure(running, draft, why, now_ns)

    def drafted(self, running: RunningRequest, rounds: int) -> None:
        """Note that a session has ended with its draft, after this many rounds with a proposal."""
        if running.draft is None or not rounds or running.draft_failure is not None:
            return
        known = self._failing.get(running.draft.peer)
        if known is not None and running.session.accounts.began_ns >= known.last_ns:
            del self._failing[running.draft.peer]

    def forget(self, worker: Worker) -> None:
        """Forget a worker that is no longer registered."""
        self._failing.pop(worker.peer, None)

    def faults(self, now_ns: int) -> list[Fault]:
        """Return the reports of failing drafts."""
        return [failing.fault(now_ns) for failing in self._failing.values()]


def note_failure(running: RunningRequest, draft: Worker, why: str, now_ns: int) -> None:
    """Add the first failure of its draft to a session's result."""
    if running.draft_failure is None:
        running.draft_failure = DraftFailure(
            draft=draft.name[:MAX_WORDS],
            error=why[:MAX_WORDS],
            round=running.session.round,
            after_s=max(0, now_ns - running.session.accounts.began_ns) / 1e9,
        )
