"""The journal of a coordinator: what a later one has to know to go on with its requests.

Whoever gives a request a ticket has it written down when it is accepted, and every token before its
client is told of it, in one write for all sessions that have committed something. What was written
outlives the process; a thread has the disk hold it some times a second, so that a machine that
fails loses less than that - which can be decoded again, to the same tokens.

Ended replies stay for some minutes, for clients that come back. Segments are begun anew by size and
by time; what still runs is carried over, and a segment is removed when nothing of it is wanted. A
disk that takes nothing more ends the journal, which is said, and nothing else.
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

from dovetail.protocol.errors import DecodeError, ProtocolError
from dovetail.protocol.files import refusal
from dovetail.protocol.messages import NOTHING_TOLD, Finished, JournalState, Submit
from dovetail.runtime.costs.averages import Average
from dovetail.runtime.journal.entries import EndedReply, Entries, Entry
from dovetail.runtime.journal.segments import Gap, Segments, packed
from dovetail.runtime.session.actions import Emit
from dovetail.runtime.session.request import Request
from dovetail.runtime.session.session import Session

log = logging.getLogger("dovetail.coordinator")

KEEP_S = 600.0
SEGMENT_BYTES = 16 << 20
MOST_BYTES = 256 << 20
"""Limit of all segments, and of all entries in memory; beyond it the oldest finished replies and
the oldest segments are dropped."""
REWRITTEN_BYTES = 1 << 20
"""Most bytes per second that are rewritten into new segments because old ones expire."""
FORGET_EVERY_S = 5.0
"""All ended replies are looked at so often, of which there may be thousands."""

Aside = Callable[[Callable[[], None]], None]
"""Does a piece of work in a thread."""


def _at_once(work: Callable[[], None]) -> None:
    work()


class Journal:
    """Entries by their tickets, and the records that are yet to be written."""

    def __init__(
        self,
        segments: Segments,
        *,
        keep_s: float = KEEP_S,
        most: int = MOST_BYTES,
        now_s: Callable[[], float] = time.time,
        aside: Aside = _at_once,
    ) -> None:
        """`keep_s`: how long a finished reply is kept. `most`: limit in bytes of all segments, and
        of all entries in memory. `aside`: runs disk writes in the background."""
        self._most = most
        self._segments, self._keep_s, self._now_s, self.aside = segments, keep_s, now_s, aside
        self._entries = Entries()
        self._closed_s = dict.fromkeys(segments.all, now_s())
        """By segment: when it was the newest for the last time."""
        self._unwritten: list[bytes] = []
        self._dirty, self._syncing = False, False
        self._begun_bytes = 0
        """Bytes with which the newest segment began."""
        self._write_us, self._sync_ms = Average(), Average()
        self.failed = ""
        """Why nothing is written any more; empty: it is."""
        self._failed_s = 0.0
        for number in segments.all:
            self._read(number)
            self._forget(now_s())
        self._nothing_runs()
        self.found = len(self._entries.of)
        """Requests that an earlier coordinator has not ended."""
        self._begun_s = self._forgot_s = now_s()

    def begin(self, epoch: int) -> None:
        """Write from now on, for the coordinator of this epoch."""
        self._entries.epochs.add(epoch)
        self._nothing_runs()
        self._closed_s |= dict.fromkeys(self._segments.all[-1:], self._now_s())
        self._attempt(self._begin_segment)

    def _nothing_runs(self) -> None:
        for entry in self._entries.of.values():
            if entry.left_s is None:
                entry.left(self._now_s())

    def _read(self, number: int) -> None:
        try:
            for part in self._segments.read(number):
                if isinstance(part, Gap):
                    log.error(
                        "%s is damaged at byte %d: %d bytes are not read; replies that had begun "
                        "in front of it go on from their last token there",
                        part.file,
                        part.offset,
                        part.size,
                    )
                    self._entries.doubt()
                else:
                    self._entries.apply(part)
        except DecodeError as error:
            log.error("a file of the journal is not read: %s", error)
        except OSError as error:
            log.error("segment %d of the journal cannot be read: %s", number, refusal(error))

    # -- what is known -----------------------------------------------------------------------------

    @property
    def sessions(self) -> int:
        """Return the highest number that a session of any coordinator has had."""
        return self._entries.sessions

    def of_session(self, epoch: int | None, number: int) -> Entry | None:
        """Return the entry of a session of a coordinator that has gone."""
        if epoch not in self._entries.epochs:
            return None
        return self._entries.of_session(number)

    def find(self, ticket: str, owner: str) -> Entry | None:
        """Return the owner's entry of this ticket."""
        entry = self._entries.find(ticket)
        return entry if entry is not None and entry.owner == owner else None

    @property
    def stopped_s(self) -> float:
        """Return for how many seconds nothing has been written; 0 while it is."""
        return max(0.0, self._now_s() - self._failed_s) if self.failed else 0.0

    def holds(self, ticket: str) -> bool:
        """Return whether this ticket is known, whoever's it is."""
        return ticket in self._entries

    def state(self) -> JournalState:
        """Return its figures, for `status`."""
        return JournalState(
            folder=str(self._segments.folder)[-512:],
            bytes=self._segments.size,
            replies=len(self._entries.of) + len(self._entries.ended),
            write_us=self._write_us.value if self._write_us.known else None,
            sync_ms=self._sync_ms.value if self._sync_ms.known else None,
            failed=self.failed[:512],
        )

    # -- what is noted -----------------------------------------------------------------------------

    def accept(
        self,
        submit: Submit,
        request: Request,
        key: str,
        vocabulary: str,
        begun: Entry | None = None,
    ) -> None:
        """Note a request that was accepted, as it was read with a vocabulary of this digest. One
        that is known is as it was; one that was forgotten while it waited is as `begun` has it."""
        if submit.ticket in self._entries:
            return
        if begun is not None:
            self._entries.of[submit.ticket] = begun
            for record in begun.snapshot():
                self._note(record)
            return
        read: dict[str, object] = {"tokens": request.prompt, "text": None, "turns": None}
        read |= {"seed": request.seed, "end": request.end, "vocabulary": vocabulary}
        read["told"] = NOTHING_TOLD
        plain = submit.model_copy(update=read)
        entry = self._entries.of[submit.ticket] = Entry(plain, key)
        try:
            self._note(entry.begun())
        except ProtocolError as error:
            log.warning("a request is too long for the journal: %s", error)
            del self._entries.of[submit.ticket]

    def serves(
        self, ticket: str, session: int, fingerprint: str, load_s: float, tokens: int
    ) -> None:
        """Note which session goes on with a request behind so many tokens, on which target."""
        if (entry := self._entries.open(ticket)) is not None:
            self._note(entry.serves(session, fingerprint, load_s, tokens))
            self._entries.sessions = max(self._entries.sessions, session)

    def committed(self, ticket: str, emits: Iterable[Emit], session: Session) -> None:
        """Note tokens that a session has committed, and on which target, if that has changed."""
        if (entry := self._entries.of.get(ticket)) is None:
            return
        if entry.fingerprint != session.fingerprint:
            about = session.number, session.fingerprint, entry.load_s, len(entry.tokens)
            self._note(entry.serves(*about))
        for emit in emits:
            if emit.tokens:
                margins = session.margins[len(entry.tokens) :][: len(emit.tokens)]
                self._note(entry.committed(emit, margins))

    def ended(self, ticket: str, finished: Finished) -> None:
        """Note how a request ended. One that was cancelled may be gone on with."""
        if (entry := self._entries.of.get(ticket)) is None:
            return
        if finished.result.finish_reason == "cancelled":
            self._note(entry.left(self._now_s()))
        else:
            self._note(entry.ended(finished, self._now_s()))
            self._entries.settle(entry)

    def left(self, ticket: str) -> None:
        """Note that a request runs no more, if it has not ended."""
        entry = self._entries.of.get(ticket)
        if entry is not None and entry.left_s is None:
            self._note(entry.left(self._now_s()))

    def _note(self, record: bytes) -> None:
        if not self.failed:
            self._unwritten.append(packed(record))

    # -- the disk ----------------------------------------------------------------------------------

    def write(self) -> None:
        """Write what was noted."""
        if not self._unwritten or self.failed:
            return
        noted, self._unwritten = b"".join(self._unwritten), []
        began_ns = time.perf_counter_ns()
        self._attempt(lambda: self._segments.append(noted))
        self._write_us.add((time.perf_counter_ns() - began_ns) / 1e3)
        self._dirty = True

    def tick(self) -> None:
        """Have the disk hold what was written, begin a segment if it is time to, and forget what is
        too old."""
        now_s = self._now_s()
        if abs(now_s - self._forgot_s) >= FORGET_EVERY_S:
            self._forgot_s = now_s
            self._forget(now_s)
        if self.failed:
            return
        begun = self._begun_bytes  # rewritten in every segment: wait until as many bytes are new
        large = self._segments.newest_size - begun > max(SEGMENT_BYTES, begun)
        old = now_s - self._begun_s > max(self._keep_s, begun / REWRITTEN_BYTES)
        if (large or old) and not self._syncing:
            self.write()
            self._closed_s[self._segments.all[-1]] = now_s
            self._begun_s = now_s
            self._attempt(self._begin_segment)
        self._remove_segments(now_s)
        if self._dirty and not self._syncing and not self.failed:
            self._dirty, self._syncing = False, True
            self.aside(self._sync)

    def _sync(self) -> None:
        """In a thread: have the disk hold what was written."""
        began_ns = time.perf_counter_ns()
        self._attempt(self._segments.sync)
        self._sync_ms.add((time.perf_counter_ns() - began_ns) / 1e6)
        self._syncing = False

    def _begin_segment(self) -> None:
        """Begin a segment with all that is not in the ones before, once these are removed."""
        entries = self._entries
        running = (entry.snapshot() for entry in entries.of.values())
        records = b"".join(map(packed, chain(entries.known(), *running)))
        self._segments.begin(records)
        self._begun_bytes, self._dirty = len(records), True

    @property
    def size(self) -> int:
        """Return approximately the bytes that the journal takes in memory."""
        return self._entries.size + sum(map(len, self._unwritten))

    def give_up(self, size: int) -> None:
        """Drop replies that are no longer running, oldest first, until `size` bytes are free."""
        for ticket, one in self._over():
            if size <= 0:
                break
            size -= one.size
            self._entries.forget(ticket)

    def _over(self) -> list[tuple[str, Entry | EndedReply]]:
        """Return the entries of replies that are no longer running, oldest first."""
        kept = ((ticket, one) for ticket, one in self._entries.kept() if one.left_s is not None)
        return sorted(kept, key=lambda item: item[1].left_s or 0.0)

    def _forget(self, now_s: float) -> None:
        for ticket, one in self._over():
            if now_s - (one.left_s or 0.0) <= self._keep_s:
                break
            self._entries.forget(ticket)
        self.give_up(self._entries.size - self._most)

    def _remove_segments(self, now_s: float) -> None:
        for number in self._segments.all[:-1]:
            if now_s - self._closed_s[number] <= self._keep_s and self._segments.size <= self._most:
                break
            self._attempt(partial(self._segments.remove, number))

    def _attempt(self, work: Callable[[], object]) -> None:
        """Do something with the disk; where that cannot be, the journal ends, and serving does
        not."""
        try:
            work()
        except OSError as error:
            self.failed, self._failed_s = refusal(error), self._now_s()
            self._unwritten = []
            log.error(
                "the journal in %s has stopped: %s; requests are served, and end with this "
                "coordinator",
                self._segments.folder,
                self.failed,
            )

    def close(self, *, remove: bool = False) -> None:
        """Write what was noted, and let the folder go; `remove`: and all that is in it."""
        self.write()
        self._segments.close(remove=remove)
