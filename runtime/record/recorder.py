"""Records sessions, each into a file, with all of its messages and events. Nothing waits for it:
events are stored, packed once the workers have their commands, and passed every quarter of a second
to a thread that writes them (`writer.py`). There are bounds on the size of a file, on the folder,
where the oldest files are removed, and on memory, if the disk is too slow. A recording beyond a
bound, or that cannot be written, ends with a note; its session is not affected. Unwritten entries
are lost when the process is killed. `recording.py` defines the entries, `session.py` the steps."""

import logging
import time
from collections.abc import Callable, Container, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from dovetail.protocol.arrays import Array
from dovetail.protocol.messages import (
    VERSION,
    Drafts,
    Failed,
    Finished,
    Hello,
    Message,
    Submit,
    Verified,
    VerifiedItem,
    Verify,
)
from dovetail.runtime.control.rounds import Plan
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.fleet.peers import ClientPeer, Worker
from dovetail.runtime.record import recording
from dovetail.runtime.record.writer import MAX_WAITING_BYTES, FileWriter
from dovetail.runtime.session.actions import Action, Ask, Emit, Finish, NextRound, Note, Score
from dovetail.runtime.session.draft_sync import DraftSync, Joining
from dovetail.runtime.session.request import Base
from dovetail.runtime.session.session import Session
from dovetail.runtime.telemetry.metrics import RoundTimes

MAX_WORDS = 4096  # most characters of an exception


def begun(session: Session, began: datetime) -> dict[str, Any]:
    """Return the first entry of a recording."""
    request = session.request
    wanted = {
        "prompt": request.packed,
        "key": request.key,
        "seed": request.seed,
        "sampling": request.sampling.model_dump(),
        "max_tokens": request.max_tokens,
        "tree": request.tree.model_dump(),
        "end": request.end,
        "vocabulary_size": request.vocabulary_size,
        "stop": request.stop,
        "record": request.record,
        "logprobs": request.logprobs,
        "scored": request.scored,
        "blocks": request.blocks,
        "constraint": request.constraint and request.constraint.model_dump(),
    }
    return {
        "type": "recording",
        "format": recording.FORMAT,
        "protocol": VERSION,
        "began": f"{began:%Y-%m-%d %H:%M:%S} UTC",
        "session": session.number,
        "epoch": session.epoch,
        "request": wanted,
        "fingerprint": session.fingerprint,
        "draft": None if session.draft_sync is None else _drafting(session.draft_sync),
        "target_base": _base(session.target_base),
        "tokens": tuple(session.tokens),
        "margins": tuple(session.margins),
        "logprobs": tuple(one.model_dump() for one in session.logprobs),
        "scores_told": session.scores_told,
    }


def _drafting(draft_sync: DraftSync) -> dict[str, Any]:
    return {
        "tokens": draft_sync.tokens,
        "reads": draft_sync.reads and draft_sync.reads.model_dump(),
        "base": _base(draft_sync.base),
    }


def _base(base: Base | None) -> dict[str, Any] | None:
    return None if base is None else vars(base)


def plain(value: Any, *, timed: bool) -> Any:
    """Return the recorded form of a step's argument; None if it is the current message, or its
    features. `timed`: record the times of rounds."""
    match value:
        case Message() | Array():
            return None
        case VerifiedItem():
            return value.round
        case RoundTimes():
            return vars(value) if timed else None
        case Base() | Plan():
            return vars(value)
        case Joining():
            return {"reads": value.reads and value.reads.model_dump(), "base": _base(value.base)}
        case _:
            return value


def outline(action: Action) -> tuple[Any, ...]:
    """Return the recorded form of an action; commands are recorded when sent."""
    match action:
        case Ask():
            return ("ask", action.role, action.command.type)
        case Emit():
            return ("emit", action.tokens, action.drafted, action.text)
        case Score():
            return ("score", action.start, len(action.logprobs))
        case Note():
            return ("note", action.record.round)
        case NextRound():
            return ("next_round",)
        case Finish():
            return ("finish", action.reason)


log = logging.getLogger("dovetail.coordinator")

STEPS = (
    *("begin", "base_refused", "prefilled", "refed", "scored", "opened", "drafted", "sent"),
    *("verified", "draft_late", "draft_lost", "target_lost", "recovered", "tree_refused"),
    *("next_round", "verify_early", "cancel", "abandon"),
)
"""The methods of a session that change it."""
PIECE_BYTES = 256 << 10  # bytes of a recording that are passed to the thread early
MAX_SUBMITTED = 256  # requests whose sessions have not begun
MAX_NOTES = 1024  # the most unpacked notes


class Recorder:
    """Records the events of sessions: storing one takes a microsecond, and `settle` packs them once
    the workers have their commands."""

    def __init__(self, folder: Path, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Raises `UserError` if the folder cannot be created or written to."""
        self._folder, self._now = folder, clock_ns
        self._writer = FileWriter(folder)
        self._notes: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """Notes that have not been packed."""
        self._files: dict[int, _SessionFile] = {}  # the file of each session
        self._requests: dict[tuple[bytes, int], _SessionFile] = {}
        """The file of each client's request, until its end was sent."""
        self._over: set[int] = set()  # sessions that had ended at the last tick
        self._submitted: dict[tuple[bytes, int], tuple[int, Sequence[bytes]]] = {}
        """Requests whose sessions have not begun: arrival and frames of each."""

    # -- events ------------------------------------------------------------------------------------

    def begin(self, running: RunningRequest) -> None:
        """Record a new session: its steps, and the messages about it."""
        session, began = running.session, datetime.now(UTC)
        epoch = f"{session.epoch & 0xFFFFFFFF:08x}"
        name = f"{began:%Y%m%dT%H%M%S}-{epoch}-{session.number}{recording.SUFFIX}"
        new = _SessionFile(
            self._folder / name, self._writer, self._now(), timed=session.request.record
        )
        running.recorded = partial(self._step, new)
        self._note(
            self._begin,
            new,
            running.client,
            running.request,
            session.number,
            begun(session, began),
            running.target.hello,
        )

    def received(
        self, peer: Worker | ClientPeer, message: Message, frames: Sequence[bytes]
    ) -> None:
        """Record a message that has arrived and is handled now."""
        self._note(self._say, "in", self._now(), peer, message, frames)

    def sent(self, peer: Worker | ClientPeer, message: Message, frames: Sequence[bytes]) -> None:
        """Record a message that was sent."""
        self._note(self._say, "out", self._now(), peer, message, frames)

    def _step(
        self,
        about: "_SessionFile",
        name: str,
        arguments: Sequence[Any],
        actions: Sequence[Action],
        error: BaseException | None,
    ) -> None:
        """Record an event of a session."""
        self._note(about.add_step, self._now(), name, arguments, actions, error)

    def _note(self, write: Callable[..., None], *what: Any) -> None:
        self._notes.append((write, what))
        if len(self._notes) > MAX_NOTES:
            self.settle()

    # -- packing and writing -----------------------------------------------------------------------

    def settle(self) -> None:
        """Pack the stored events; an error is logged and affects no session."""
        notes, self._notes = self._notes, []
        for write, what in notes:
            try:
                write(*what)
            except Exception:
                log.exception("a message could not be recorded")

    def tick(self, running: Container[int]) -> None:
        """Write everything; `running`: sessions that have not ended. Ended ones are kept for one
        more call."""
        self.settle()
        over = {number for number in self._files if number not in running}
        ended = [self._files.pop(number) for number in over & self._over]
        self._over = over - self._over
        if ended:
            self._requests = {
                key: about for key, about in self._requests.items() if about not in ended
            }
        for about in ended:
            about.end("the session has ended", whole=True)
        for kept in self._files.values():
            kept.hand_over()

    def close(self) -> None:
        """Write everything, and end. No session is running."""
        self.settle()
        for kept in self._files.values():
            kept.end("the session has ended", whole=True)
        self._writer.close()

    def _begin(
        self,
        new: "_SessionFile",
        client: ClientPeer,
        request: int,
        session: int,
        begun: dict[str, Any],
        target: Hello,
    ) -> None:
        self._files[session] = self._requests[client.peer, request] = new
        new.add(begun)
        if target.tokenizer is not None:
            new.add_tokenizer(target.tokenizer.data)
        if (submitted := self._submitted.pop((client.peer, request), None)) is not None:
            new.add_message("in", submitted[0], client, submitted[1])

    def _say(
        self,
        direction: str,
        at_ns: int,
        peer: Worker | ClientPeer,
        message: Message,
        frames: Sequence[bytes],
    ) -> None:
        """Add a message to all recordings that it belongs to."""
        files: Sequence[_SessionFile]
        if isinstance(message, Verified | Verify | Drafts):
            parts = message.orders if isinstance(message, Drafts) else message.items
            numbers = dict.fromkeys(part.session for part in parts)
            files = [self._files[number] for number in numbers if number in self._files]
        elif isinstance(peer, ClientPeer):
            files = self._of_request(direction, at_ns, peer, message, frames)
        else:
            files = (
                [self._files[number]]
                if (number := getattr(message, "session", None)) in self._files
                else []
            )
        for about in files:
            about.add_message(direction, at_ns, peer, frames)

    def _of_request(
        self,
        direction: str,
        at_ns: int,
        client: ClientPeer,
        message: Message,
        frames: Sequence[bytes],
    ) -> Sequence["_SessionFile"]:
        request = (
            message.session if isinstance(message, Failed) else getattr(message, "request", None)
        )
        if request is None:
            return []
        found = self._requests.get((client.peer, request))
        if found is None and isinstance(message, Submit):
            if len(self._submitted) >= MAX_SUBMITTED:
                self._submitted.pop(next(iter(self._submitted)))
            self._submitted[client.peer, request] = at_ns, frames
        if direction == "out" and isinstance(message, Finished | Failed):
            self._requests.pop((client.peer, request), None)
            self._submitted.pop((client.peer, request), None)
        return [] if found is None else [found]


class _SessionFile:
    """The recording of a session: packed entries for the writing thread."""

    def __init__(self, path: Path, writer: FileWriter, began_ns: int, *, timed: bool) -> None:
        """`timed`: include the times of rounds."""
        self._path, self._writer, self._began_ns, self._timed = path, writer, began_ns, timed
        self._peers: dict[bytes, int] = {}
        self._pieces: list[bytes] = []
        self._waiting = self._size = 0
        self._ended = False

    def add(self, entry: dict[str, Any]) -> None:
        """Pack an entry, if there is room for it."""
        if self._ended:
            return
        piece = recording.pack_entry(entry)
        self._size += len(piece)
        if self._size > recording.MAX_FILE_BYTES:
            self.end(f"it has grown beyond {recording.MAX_FILE_BYTES >> 20} MiB", whole=False)
            return
        self._pieces.append(piece)
        self._waiting += len(piece)
        if self._waiting > PIECE_BYTES:
            self.hand_over()

    def add_tokenizer(self, content: bytes) -> None:
        self.hand_over()
        self._writer.add_tokenizer(self._path, content)

    def add_message(
        self, direction: str, at_ns: int, peer: Worker | ClientPeer, frames: Sequence[bytes]
    ) -> None:
        number = self._peers.get(peer.peer)
        if number is None:
            number = self._peers[peer.peer] = len(self._peers)
            self.add(
                {
                    "type": "peer",
                    "number": number,
                    "hello": peer.hello.model_dump(exclude={"tokenizer"}),
                }
            )
        self.add({"type": direction, "at": self._since(at_ns), "peer": number, "frames": frames})

    def add_step(
        self,
        at_ns: int,
        name: str,
        arguments: Sequence[Any],
        actions: Sequence[Action],
        error: BaseException | None,
    ) -> None:
        """Add a step and the resulting actions."""
        entry: dict[str, Any] = {
            "type": "step",
            "at": self._since(at_ns),
            "name": name,
            "arguments": [plain(value, timed=self._timed) for value in arguments],
        }
        if actions:
            entry["actions"] = [outline(action) for action in actions]
        if error is not None:
            entry["raised"] = (type(error).__name__, str(error)[:MAX_WORDS])
        self.add(entry)

    def _since(self, at_ns: int) -> int:
        """Return the time since the session began; negative for its request."""
        return max(0, at_ns - self._began_ns)

    def hand_over(self) -> None:
        """Pass the packed entries to the thread."""
        if not self._pieces:
            return
        pieces, self._pieces, self._waiting = self._pieces, [], 0
        if not self._writer.add(self._path, pieces):
            self._ended = True
            log.warning(
                "the recording %s ends early: %d MiB wait for the disk",
                self._path,
                MAX_WAITING_BYTES >> 20,
            )

    def end(self, why: str, *, whole: bool) -> None:
        """End the recording."""
        if self._ended:
            return
        self._ended = True
        self._pieces.append(recording.pack_entry({"type": "end", "whole": whole, "why": why}))
        self.hand_over()
        self._writer.finish(self._path)
