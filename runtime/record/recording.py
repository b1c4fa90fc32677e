"""The format of a recording of a session, and its reader.

A recording is a file of consecutive MessagePack maps: the initial session, its target's tokenizer,
peers before their first message, every message (unchanged frames) and every event of the session
(with its arguments other than the message) in order, and finally the reason for the end. If the
coordinator is killed, the file may end anywhere. Written by `recorder.py`, one entry at a time.

A recording contains the users' and the models' text. No message contains the keys of links; the
`key` of a session is for its noise."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from dovetail.protocol.arrays import MAX_ARRAY_BYTES
from dovetail.protocol.errors import UserError, printable
from dovetail.protocol.interruptions import uninterrupted
from dovetail.protocol.messages import (
    Constraint,
    Count,
    Ends,
    Hello,
    Name,
    Reads,
    Role,
    Text,
    TokenLogprobs,
    Tokens,
    Version,
)
from dovetail.protocol.settings import Frozen, Sampling, TreeSettings

FORMAT = 2
SUFFIX = ".messages"
MAX_FILE_BYTES = 64 << 20  # most bytes of one recording, without its tokenizer
MAX_ENTRY_BYTES = MAX_FILE_BYTES + MAX_ARRAY_BYTES


class RecordedRequest(Frozen):
    """`session.Request`."""

    prompt: bytes  # four bytes a token, as in `kept.pack`
    key: bytes
    seed: Count
    sampling: Sampling
    max_tokens: Count
    tree: TreeSettings
    end: Ends
    vocabulary_size: Count
    stop: tuple[Text, ...]
    record: bool
    logprobs: int | None
    scored: bool
    blocks: bytes = b""
    constraint: Constraint | None = None


class From(Frozen):
    """`kept.Base`."""

    session: Count | None
    tokens: Count
    shared: bool = False


class Drafting(Frozen):
    """The start of a `draft_sync.DraftSync`: the draft's part of the log."""

    tokens: Count
    reads: Reads | None
    base: From | None


class Joined(Frozen):
    """`draft_sync.Joining`."""

    reads: Reads | None
    base: From | None


class Begin(Frozen):
    """A session as it begins."""

    type: Literal["recording"] = "recording"
    format: int
    protocol: Version
    began: Name  # date and time, UTC. All other times are nanoseconds since then
    session: Count
    epoch: Count
    request: RecordedRequest
    fingerprint: Name
    draft: Drafting | None
    target_base: From | None
    tokens: Tokens = ()
    """Tokens of an earlier coordinator, with their margins and log-probabilities."""
    margins: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    scores_told: Count = 0
    """Tokens of the prompt whose scores the client had from an earlier coordinator."""


class Deflated(Frozen):
    """The target's tokenizer.json, by zlib."""

    type: Literal["tokenizer"] = "tokenizer"
    deflated: bytes


class Peer(Frozen):
    """A peer that sent or received a message of the session; the first one is number 0."""

    type: Literal["peer"] = "peer"
    number: Count
    hello: Hello  # without the tokenizer

    @property
    def roles(self) -> tuple[Role, ...]:
        return self.hello.roles

    @property
    def words(self) -> str:
        return f"{'/'.join(self.roles)} {self.hello.name}"


class Said(Frozen):
    """A message: "in" to the coordinator, or "out" of it."""

    type: Literal["in", "out"]
    at: Count
    peer: Count
    frames: tuple[bytes, ...]


class Step(Frozen):
    """A call of a method of `session.Session`, with parts of the last message."""

    type: Literal["step"] = "step"
    at: Count
    name: Name
    arguments: tuple[Any, ...] = ()
    actions: tuple[tuple[Any, ...], ...] = ()  # the resulting actions, as in `entries.outline`
    raised: tuple[Name, Text] | None = None
    """The exception instead of actions: its name and message."""


class LastEntry(Frozen):
    """The last entry. `whole`: the recording is complete."""

    type: Literal["end"] = "end"
    whole: bool
    why: Name


Entry = Begin | Deflated | Peer | Said | Step | LastEntry
with uninterrupted():
    _ENTRY: TypeAdapter[Any] = TypeAdapter(Annotated[Entry, Field(discriminator="type")])
_PACKER = msgpack.Packer()


def pack_entry(entry: Mapping[str, Any]) -> bytes:
    """Return an entry of the file, with the fields of a class above. Not thread-safe."""
    packed: bytes = _PACKER.pack(entry)
    return packed


def deflated(tokenizer: bytes) -> bytes:
    """Return the entry of a tokenizer; takes half a second for a large one."""
    return bytes(msgpack.packb({"type": "tokenizer", "deflated": zlib.compress(tokenizer)}))


@dataclass(frozen=True)
class Recording:
    """A file that was read."""

    path: Path
    begin: Begin
    entries: tuple[Entry, ...]  # all except the first

    @property
    def whole(self) -> bool:
        """Whether the recording is complete."""
        last = self.entries[-1] if self.entries else None
        return isinstance(last, LastEntry) and last.whole

    @property
    def words(self) -> str:
        """Why it ends."""
        last = self.entries[-1] if self.entries else None
        return (
            last.why
            if isinstance(last, LastEntry)
            else "its coordinator was killed, or is still writing it"
        )

    @cached_property
    def peers(self) -> Mapping[int, Peer]:
        return {entry.number: entry for entry in self.entries if isinstance(entry, Peer)}

    @cached_property
    def tokenizer(self) -> bytes:
        """Return the bytes of tokenizer.json; raise `UserError` if they are missing."""
        found = next((entry for entry in self.entries if isinstance(entry, Deflated)), None)
        if found is None:
            raise UserError(
                f"the recording {self.path} ends before the tokenizer of its target: there is "
                "nothing to replay"
            )
        inflater = zlib.decompressobj()
        try:
            content = inflater.decompress(found.deflated, MAX_ARRAY_BYTES)
        except zlib.error as error:
            raise UserError(f"the tokenizer in {self.path} cannot be read: {error}") from None
        if not inflater.eof:
            raise UserError(
                f"the tokenizer in {self.path} is cut short, or beyond {MAX_ARRAY_BYTES >> 20} MiB"
            )
        return content


def read_recording(path: Path) -> Recording:
    """Read the complete entries of a recording; raise `UserError` if the file is not a
    recording."""
    try:
        entries = list(_entries(path))
    except OSError as error:
        raise UserError(f"the recording {path} cannot be read: {error.strerror}") from None
    if not entries or not isinstance(begin := entries[0], Begin):
        raise UserError(
            f"{path} is not a recording of a session: a coordinator makes recordings with "
            "--record-messages FOLDER"
        )
    recording = Recording(path, begin, tuple(entries[1:]))
    for number, entry in enumerate(recording.entries, start=1):
        if isinstance(entry, Said) and entry.peer not in recording.peers:
            raise UserError(
                f"{path} is damaged: entry {number} is from peer {entry.peer}, which has no entry"
            )
    return recording


def _entries(path: Path) -> Iterator[Entry]:
    """Yield every complete entry."""
    with path.open("rb") as file:
        unpacker = msgpack.Unpacker(
            file, use_list=False, strict_map_key=True, max_buffer_size=MAX_ENTRY_BYTES
        )
        number = 0
        while True:
            try:
                content = unpacker.unpack()
            except msgpack.exceptions.OutOfData:
                return
            except (
                ValueError,
                TypeError,
                RecursionError,
                msgpack.exceptions.UnpackException,
            ) as error:
                raise UserError(
                    f"{path} is not a recording of a session: entry {number}: "
                    f"{printable(f'{type(error).__name__}: {error}'[:200])}"
                ) from None
            yield _entry(path, number, content)
            number += 1


def _entry(path: Path, number: int, content: Any) -> Entry:
    if (
        number == 0
        and isinstance(content, dict)
        and content.get("type") == "recording"
        and content.get("format") != FORMAT
    ):
        written = printable(str(content.get("format"))[:20])
        raise UserError(
            f"the recording {path} has format {written}, this release reads {FORMAT}: use the "
            "release that wrote it"
        )
    try:
        entry: Entry = _ENTRY.validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        complaint = f"{'.'.join(str(part)[:64] for part in first['loc'][:8])}: {first['msg'][:200]}"
        raise UserError(
            f"{path} is not a recording of a session: entry {number}, {printable(complaint)}"
        ) from None
    return entry
