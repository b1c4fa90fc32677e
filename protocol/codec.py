"""Encodes a message as frames and back: MessagePack in the first frame, the raw bytes of its arrays
in the following ones.

Input is hostile until decoded: sizes and nesting are bounded before anything is allocated, types
are checked strictly, and unknown fields and tags are refused. `decode` raises nothing but
`DecodeError`. Knows no sockets."""

from collections.abc import Sequence, Sized
from functools import cached_property
from typing import Annotated, Any, Generic, TypeVar, get_args

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from dovetail.protocol.errors import DecodeError, ProtocolError, printable
from dovetail.protocol.interruptions import uninterrupted
from dovetail.protocol.messages import MAX_TOKENS, Command, Event, Message, Reply, Request

MAX_FRAMES = 4
MAX_BODY_BYTES = 16 << 20
MAX_FRAME_BYTES = 64 << 20
MAX_ITEMS = 4 << 20
"""Items of all arrays and maps of a body; the largest message, a Finished of MAX_TOKENS tokens and
65536 spans, has 3.6 million."""
MAX_FIELDS = 256
SMALL_BYTES = 512
"""Bodies up to this size need no walk: an array has at most as many items as bytes."""
_CONTAINER_ITEMS = 8
UNCOUNTED_BYTES = MAX_ITEMS // (1 + _CONTAINER_ITEMS)
"""Items of a complete body up to this size are not counted: each takes at least a byte, so they
cannot exceed `MAX_ITEMS`."""

M = TypeVar("M")
C = TypeVar("C", bound=Sized)


class Dialect(Generic[M]):
    """The messages of one direction of a link: a union of types, distinguished by `type`."""

    def __init__(self, union: Any) -> None:
        self._members: dict[str, type[Message]] = {
            m.model_fields["type"].default: m for m in get_args(union)
        }
        self._tagged: Any = Annotated[union, Field(discriminator="type")]

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        """Return the validator that explains why a message fits no member. It is built on demand,
        since most processes never need it."""
        with uninterrupted():
            return TypeAdapter(self._tagged)

    def decode(self, frames: Sequence[bytes]) -> M:
        """Return the message in `frames`; `DecodeError` if they hold no message of this dialect."""
        body = _unpack(frames)
        member = self._members.get(tag) if isinstance(tag := body.get("type"), str) else None
        _attach(body, member, frames[1:])
        check = self._adapter if member is None else member.__pydantic_validator__
        try:
            message: M = check.validate_python(body)
        except ValidationError as error:
            unread = DecodeError(_explain(error, *(() if member is None else (tag,))))
            if type(number := body.get("request")) is int and 0 <= number < 1 << 63:
                unread.request = number
            raise unread from None
        return message


def encode(message: Message) -> list[bytes]:
    """Return the frames of a message: the body, then one for each array that is not None;
    `ProtocolError` if the body is beyond the limit."""
    body, arrays = {**vars(message)}, []
    for name in message.ARRAYS:
        if (array := body[name]) is not None:
            body[name] = {"dtype": array.dtype, "shape": array.shape}
            arrays.append(array.data)
    packed: bytes = msgpack.packb(body, default=vars)
    if len(packed) > MAX_BODY_BYTES:
        raise ProtocolError(
            f"a message {body['type']!r} of {len(packed)} bytes is beyond the limit of "
            f"{MAX_BODY_BYTES}"
        )
    return [packed, *arrays]


def _unpack(frames: Sequence[bytes]) -> dict[str, Any]:
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise DecodeError(f"a message has 1 to {MAX_FRAMES} frames, not {len(frames)}")
    size = len(frames[0])
    if size > MAX_BODY_BYTES or max(map(len, frames)) > MAX_FRAME_BYTES:
        raise DecodeError(f"a frame of {max(map(len, frames))} bytes is beyond the limit")
    budget = _Budget() if size > UNCOUNTED_BYTES else None
    try:
        if size > SMALL_BYTES:
            _measure(frames[0])
        body = msgpack.unpackb(
            frames[0],
            use_list=False,
            strict_map_key=True,
            list_hook=budget,
            object_hook=budget,
            max_ext_len=0,
            max_array_len=min(MAX_TOKENS, size),
            max_map_len=min(MAX_FIELDS, size),
        )
    except (
        ValueError,
        RecursionError,
        TypeError,
        OverflowError,
        MemoryError,
        msgpack.exceptions.UnpackException,
    ) as error:
        raise DecodeError(
            f"not MessagePack: {printable(f'{type(error).__name__}: {error}'[:200])}"
        ) from None
    if not isinstance(body, dict):
        raise DecodeError(f"a message is a map, not {type(body).__name__}")
    return body


def _measure(body: bytes) -> None:
    """Walk over the body without building objects. This rejects a few bytes that claim nested
    arrays of millions: a body that passes is complete, and has at most as many items as bytes."""
    walker = msgpack.Unpacker(read_size=1, max_buffer_size=MAX_BODY_BYTES)
    walker.feed(body)
    walker.skip()
    if walker.tell() != len(body):
        raise ValueError(f"{len(body) - walker.tell()} bytes after the message")


class _Budget:
    """Counts items while decoding, so that a small body cannot take up many times its size in
    memory: containers are expensive, items cheap."""

    def __init__(self) -> None:
        self._left = MAX_ITEMS

    def __call__(self, container: C) -> C:
        self._left -= len(container) + _CONTAINER_ITEMS
        if self._left < 0:
            raise ValueError(f"more than {MAX_ITEMS} items")
        return container


def _attach(body: dict[str, Any], member: type[Message] | None, raw: Sequence[bytes]) -> None:
    """Put the raw frames back where the body names arrays; every frame must belong to one."""
    rest = list(raw)
    for name in member.ARRAYS if member else ():
        header = body.get(name)
        if header is None:
            continue
        if not rest or not isinstance(header, dict) or "data" in header:
            raise DecodeError(f"array {name!r} has no frame")
        body[name] = {**header, "data": bytes(rest.pop(0))}
    if rest:
        raise DecodeError(f"{len(rest)} frames belong to no array")


def _explain(error: ValidationError, *within: str) -> str:
    """Return the first error without the value, which may be large; `within`: the path to it."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part)[:64] for part in (*within, *first["loc"])[:8])
    return printable(f"{where or 'message'}: {first['msg'][:300]}")


INBOUND: Dialect[Event | Request] = Dialect(Event | Request)
COMMAND: Dialect[Command] = Dialect(Command)
EVENT: Dialect[Event] = Dialect(Event)
REQUEST: Dialect[Request] = Dialect(Request)
REPLY: Dialect[Reply] = Dialect(Reply)
