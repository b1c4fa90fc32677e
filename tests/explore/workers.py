"""Scripted workers that drop what they have done already, as workers do, and what their work
takes."""

from dataclasses import dataclass

from dovetail.protocol.messages import (
    Command,
    Draft,
    Drafts,
    Event,
    Failed,
    Feed,
    Open,
    Read,
    ReadItem,
    Refeed,
    Verify,
    VerifyItem,
)
from explore.clock import MS
from support.scripted import ScriptedDraft, ScriptedTarget, ScriptedWorker


class CarefulTarget(ScriptedTarget):
    """Drops what it has done already, as workers do."""

    stale = 0

    def work(self, command: Command) -> list[Event]:
        if isinstance(command, Open) and command.session in self.logs:
            self.stale += 1
            return []
        if isinstance(command, Verify):
            items = tuple(item for item in command.items if not self._is_done(item))
            reads = tuple(item for item in command.reads if not was_read(self, item))
            self.stale += len(command.items) - len(items) + len(command.reads) - len(reads)
            if any(item.round > self.rounds[item.session] + 1 for item in items):
                return [self._refused(item) for item in items]  # the round before never arrived
            return super().work(command.model_copy(update={"items": items, "reads": reads}))
        if isinstance(command, Refeed) and command.session in self.begun:
            self.stale += 1
            return []
        if isinstance(command, Read) and was_read(self, command.item):
            self.stale += 1
            return []
        return super().work(command)

    def _is_done(self, item: VerifyItem) -> bool:
        return item.round <= self.rounds[item.session]

    def _refused(self, item: VerifyItem) -> Failed:
        about = {"session": item.session, "round": item.round}
        return Failed(epoch=self.epoch, **about, code="prefix", text="rounds are consecutive")


def was_read(worker: ScriptedWorker, item: ReadItem) -> bool:
    """Return whether a worker has read this chunk of a log, or has dropped the log."""
    return item.session not in worker.begun or item.start < worker.done[item.session]


class CarefulDraft(ScriptedDraft):
    """Drops what it has done already, as workers do."""

    stale = 0

    def work(self, command: Command) -> list[Event]:
        if self._is_done(command):
            self.stale += 1
            return []
        return super().work(command)

    def _is_done(self, command: Command) -> bool:
        match command:
            case Open():
                return command.session in self.logs
            case Read():
                return was_read(self, command.item)
            case Feed():
                return command.start < self.fed[command.session]
            case Draft():
                return command.round <= self.rounds[command.session]
        return False


@dataclass(frozen=True)
class Costs:
    """The time that the work of a process takes, in milliseconds."""

    open_ms: float = 3.0
    token_ms: float = 0.2  # the time of one token of a prompt that is read
    pass_ms: float = 4.0
    row_ms: float = 0.2
    draft_ms: float = 2.0

    def of(self, command: Command) -> int:
        """Nanoseconds."""
        match command:
            case Open():
                left = len(command.prompt) - command.kept
                return self.reading(left if command.read is None else min(left, command.read))
            case Refeed():
                left = command.prefix - command.start
                return self.reading(left if command.read is None else min(left, command.read))
            case Read():
                return self.reading(command.item.rows)
            case Verify():
                rows = sum(1 + len(item.tokens) for item in command.items)
                read = sum(item.rows for item in command.reads)
                return round(MS * (self.pass_ms + self.row_ms * rows + self.token_ms * read))
            case Draft():
                return round(MS * self.draft_ms)
            case Drafts():
                return round(MS * self.draft_ms * (1.0 + 0.2 * len(command.orders)))
        return MS // 10

    def reading(self, rows: int) -> int:
        """Nanoseconds of so many rows of a log."""
        return round(MS * (self.open_ms + self.token_ms * rows))
