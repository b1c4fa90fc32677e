"""The journal of a coordinator: what a later one needs to continue its requests.

A request with a ticket is written when it is accepted, and every token before it is sent, in one
transaction for all sessions that have committed tokens. Written records outlive the process. A
thread flushes them to disk several times a second; if the machine fails, the tokens since then are
decoded again, identically. Ended replies are only on disk, for some minutes, for clients that
reconnect. When the disk fails, the journal ends, which is reported; the service continues."""

import logging
import sqlite3
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from dovetail.protocol.errors import DecodeError, ProtocolError
from dovetail.protocol.files import refusal
from dovetail.protocol.messages import NOTHING_TOLD, Finished, JournalState, Submit
from dovetail.runtime.costs.rounds import Average
from dovetail.runtime.fleet.outbox import OBJECT_BYTES
from dovetail.runtime.journal.database import Database, Row
from dovetail.runtime.journal.entries import (
    Ended,
    Entry,
    coordinated,
    coordinators,
    rebuilt,
    stored_size,
)
from dovetail.runtime.session.actions import Emit
from dovetail.runtime.session.request import Request
from dovetail.runtime.session.session import Session

log = logging.getLogger("dovetail.coordinator")

KEEP_S = 600.0
MOST_BYTES = 256 << 20  # limit of replies on disk, and in memory; the oldest idle ones are dropped
FORGET_EVERY_S = 5.0  # interval at which all replies, perhaps thousands, are checked
READ_AT_ONCE = 256  # replies that are read before the oldest are dropped
COORDINATORS = 0  # the number of the pseudo-reply whose only record is about coordinators

Aside = Callable[[Callable[[], None]], object]  # runs a function in a thread


def _at_once(work: Callable[[], None]) -> None:
    work()


def open_journal(folder: Path, *, keep_s: float, most: int) -> "Journal":
    journal = Journal(Database(folder), keep_s=keep_s, most=most)
    if journal.found:
        log.info("the journal in %s has %d requests to continue", folder, journal.found)
    return journal


class Journal:
    """Entries by their tickets, and the records to write next."""

    def __init__(
        self,
        base: Database,
        *,
        keep_s: float = KEEP_S,
        most: int = MOST_BYTES,
        now_s: Callable[[], float] = time.time,
        aside: Aside = _at_once,
    ) -> None:
        """`keep_s`: how long an idle reply is kept. `most`: limit in bytes of all replies on disk,
        and of those in memory. `aside`: syncs to disk in the background."""
        self._base, self._keep_s, self._most, self._now_s = base, keep_s, most, now_s
        self.aside = aside
        self._entries: dict[str, Entry] = {}  # entries of replies that have not ended
        self._ended: dict[str, Ended] = {}  # ended replies; a ticket is either here or above
        self._epochs: set[int] = set()
        self.sessions = 0  # the highest number of a session of any coordinator
        self._replies = COORDINATORS  # the highest number of a reply on disk
        self._stored = 0  # bytes on disk, approximately
        self._rows: list[Row] = []
        self._deleted: list[int] = []
        self._dirty, self._syncing = False, False
        self._write_us, self._sync_ms = Average(), Average()
        self.failed = ""  # why writing has stopped; empty: it has not
        self._failed_s = 0.0
        self._forgot_s = now_s()
        self._attempt(self._read)
        self.found = len(self._entries)  # requests that an earlier coordinator has not ended

    def begin(self, epoch: int) -> None:
        """Start writing, for the coordinator of this epoch."""
        self._epochs.add(epoch)
        self._note_coordinators()
        for entry in self._entries.values():
            self._note(entry, entry.left(entry.left_s or self._now_s()))
        self.write()

    def _read(self) -> None:
        for reply, records in self._base.read():
            self._replies = max(self._replies, reply)
            try:
                if reply == COORDINATORS:
                    self._epochs, sessions = coordinators(records[0])
                    self.sessions = max(self.sessions, sessions)
                else:
                    self._take(rebuilt(reply, records))
            except DecodeError as error:
                log.error("a reply of the journal in %s is dropped: %s", self._base.folder, error)
                self._deleted.append(reply)
                self._base.damaged = True
            if reply % READ_AT_ONCE == 0:
                self._forget(self._now_s())
        self._forget(self._now_s())
        if self._base.damaged:  # numbers of sessions may have been reused
            self._epochs.clear()

    def _take(self, entry: Entry) -> None:
        """Add an entry that was read."""
        if entry.left_s is None:
            entry.left(self._now_s())
        self._entries[entry.ticket] = entry
        self._stored += entry.stored
        self.sessions = max(self.sessions, *entry.sessions, 0)
        self._settle(entry)

    # -- queries -----------------------------------------------------------------------------------

    def of_session(self, epoch: int | None, number: int) -> Entry | None:
        """Return the entry of an earlier coordinator's session."""
        known = self._known().items() if epoch in self._epochs else ()
        ticket = next((ticket for ticket, one in known if number in one.sessions), None)
        return None if ticket is None else self._find(ticket)

    def find(self, ticket: str, owner: str) -> Entry | None:
        """Return the owner's entry of this ticket, for reading."""
        entry = self._find(ticket)
        return entry if entry is not None and entry.owner == owner else None

    def _find(self, ticket: str) -> Entry | None:
        if ticket in self._ended:
            self.write()
        if (ended := self._ended.get(ticket)) is None:
            return self._entries.get(ticket)
        records: list[bytes] = []
        self._attempt(lambda: records.extend(self._base.find(ended.reply)))
        try:
            return rebuilt(ended.reply, records)
        except DecodeError as error:
            log.error("a reply of the journal in %s is dropped: %s", self._base.folder, error)
            self._drop(ticket)
            return None

    @property
    def stopped_s(self) -> float:
        """For how many seconds nothing has been written; 0 if writing works."""
        return max(0.0, self._now_s() - self._failed_s) if self.failed else 0.0

    def _known(self) -> dict[str, Entry | Ended]:
        return {**self._entries, **self._ended}

    def holds(self, ticket: str) -> bool:
        """Return whether this ticket is known, for any owner."""
        return ticket in self._entries or ticket in self._ended

    def state(self) -> JournalState:
        """Return its figures, for `status`."""
        return JournalState(
            folder=str(self._base.folder)[-512:],
            bytes=self._base.size,
            replies=len(self._entries) + len(self._ended),
            write_us=self._write_us.value if self._write_us.known else None,
            sync_ms=self._sync_ms.value if self._sync_ms.known else None,
            failed=self.failed[:512],
        )

    # -- changes -----------------------------------------------------------------------------------

    def accept(
        self,
        submit: Submit,
        request: Request,
        key: str,
        vocabulary: str,
        begun: Entry | None = None,
    ) -> None:
        """Add an accepted request, tokenized with a vocabulary of this digest. A known one is
        unchanged; one that was dropped while it waited is restored from `begun`."""
        if self.holds(submit.ticket):
            return
        self._replies += 1
        if begun is not None:
            begun.reply, begun.rows, begun.stored = self._replies, 0, 0
            self._entries[submit.ticket] = begun
            for record in begun.snapshot():
                self._note(begun, record)
            return
        read: dict[str, object] = {"tokens": request.prompt, "text": None, "turns": None}
        read |= {"seed": request.seed, "end": request.end, "vocabulary": vocabulary}
        read["told"] = NOTHING_TOLD
        plain = submit.model_copy(update=read)
        entry = self._entries[submit.ticket] = Entry(plain, key, reply=self._replies)
        try:
            self._note(entry, entry.begun())
        except ProtocolError as error:
            log.warning("a request is too long for the journal: %s", error)
            del self._entries[submit.ticket]

    def serves(
        self, ticket: str, session: int, fingerprint: str, load_s: float, tokens: int
    ) -> None:
        """Note the session that continues a request after this many tokens, and its target."""
        if (entry := self._find(ticket)) is None:
            return
        self._ended.pop(ticket, None)
        self._entries[ticket] = entry
        self._note(entry, entry.serves(session, fingerprint, load_s, tokens))
        self.sessions = max(self.sessions, session)

    def committed(self, ticket: str, emits: Iterable[Emit], session: Session) -> None:
        """Note tokens that a session has committed, and their target if it has changed."""
        if (entry := self._entries.get(ticket)) is None:
            return
        if entry.fingerprint != session.fingerprint:
            about = session.number, session.fingerprint, entry.load_s, len(entry.tokens)
            self._note(entry, entry.serves(*about))
        for emit in emits:
            if emit.tokens:
                margins = session.margins[len(entry.tokens) :][: len(emit.tokens)]
                self._note(entry, entry.committed(emit, margins))

    def ended(self, ticket: str, finished: Finished) -> None:
        """Record the end of a request. A cancelled one may be continued."""
        if (entry := self._entries.get(ticket)) is None:
            return
        if finished.result.finish_reason == "cancelled":
            self._note(entry, entry.left(self._now_s()))
        else:
            self._note(entry, entry.ended(finished, self._now_s()))
            self._settle(entry)

    def left(self, ticket: str) -> None:
        """Note that a request is no longer running, if it has not ended."""
        entry = self._entries.get(ticket)
        if entry is not None and entry.left_s is None:
            self._note(entry, entry.left(self._now_s()))

    def _settle(self, entry: Entry) -> None:
        """Keep an ended entry on disk only, unless the disk has failed."""
        if entry.finished is not None and not self.failed:
            del self._entries[entry.ticket]
            self._ended[entry.ticket] = Ended.of(entry)

    def _note(self, entry: Entry, record: bytes) -> None:
        if not self.failed:
            self._rows.append((entry.reply, entry.rows, record))
            entry.rows += 1
            entry.stored += stored_size(record)
            self._stored += stored_size(record)

    def _note_coordinators(self) -> None:
        self._rows.append((COORDINATORS, 0, coordinated(self._epochs, self.sessions)))

    # -- the disk ----------------------------------------------------------------------------------

    def write(self) -> None:
        """Write the waiting records."""
        if (self._rows or self._deleted) and not self.failed:
            began_ns = time.perf_counter_ns()
            self._attempt(lambda: self._base.write(self._rows, self._deleted))
            self._write_us.add((time.perf_counter_ns() - began_ns) / 1e3)
            self._dirty = True
        self._rows, self._deleted = [], []

    def tick(self) -> None:
        """Flush written records to disk, and drop old replies."""
        now_s = self._now_s()
        if abs(now_s - self._forgot_s) >= FORGET_EVERY_S or self._stored > self._most:
            self._forgot_s = now_s
            self._forget(now_s)
            self.write()
        if self._dirty and not self._syncing and not self.failed:
            self._dirty, self._syncing = False, True
            self.aside(self._sync)

    def _sync(self) -> None:
        """Flush to disk, in a thread."""
        began_ns = time.perf_counter_ns()
        self._attempt(self._base.sync)
        self._sync_ms.add((time.perf_counter_ns() - began_ns) / 1e6)
        self._syncing = False

    @property
    def size(self) -> int:
        """Roughly the bytes that the journal takes in memory."""
        entries = sum(one.size for one in self._entries.values())
        unwritten = sum(len(record) for _, _, record in self._rows)
        return entries + OBJECT_BYTES * len(self._ended) + unwritten

    def give_up(self, size: int) -> None:
        """Drop idle replies in memory, oldest first, until `size` bytes are free."""
        for ticket, one in self._idle():
            if size <= 0:
                break
            if isinstance(one, Entry):
                size -= one.size
                self._drop(ticket)

    def _idle(self) -> list[tuple[str, Entry | Ended]]:
        """Return the replies that are not running, oldest first."""
        kept = [item for item in self._known().items() if item[1].left_s is not None]
        return sorted(kept, key=lambda item: item[1].left_s or 0.0)

    def _forget(self, now_s: float) -> None:
        for ticket, one in self._idle():
            if self._stored <= self._most and now_s - (one.left_s or 0.0) <= self._keep_s:
                break
            self._drop(ticket)
        if self._deleted:
            self._note_coordinators()
        self.give_up(self.size - self._most)

    def _drop(self, ticket: str) -> None:
        gone = self._entries.pop(ticket, None) or self._ended.pop(ticket)
        self._stored -= gone.stored
        self._deleted.append(gone.reply)

    def _attempt(self, work: Callable[[], object]) -> None:
        """Use the disk; if it fails, the journal ends, but the service continues."""
        try:
            work()
        except (OSError, sqlite3.Error) as error:
            self.failed = refusal(error) if isinstance(error, OSError) else str(error)
            self._failed_s = self._now_s()
            lost = {reply for reply, _, _ in self._rows}
            self._ended = {name: one for name, one in self._ended.items() if one.reply not in lost}
            log.error(
                "the journal in %s has stopped: %s; requests are served, but end with this "
                "coordinator",
                self._base.folder,
                self.failed,
            )

    def close(self, *, remove: bool = False) -> None:
        """Write the waiting records, and release the folder; `remove`: delete its files, too."""
        self.write()
        self._base.close(remove=remove)
