"""A message to frames and back: MessagePack in the first frame, the raw bytes of its arrays in the frames behind it.

What arrives is hostile until it has been decoded: sizes and nesting are bounded before anything is allocated, types are checked strictly, unknown
fields and tags are refused. The only exception that leaves `decode` is `DecodeError`. Knows no sockets.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Generic, TypeVar, get_args

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from dovetail.protocol.errors import DecodeError
from dovetail.protocol.messages import Command, Event, Message, Reply, Request

MAX_FRAMES = 4
MAX_BODY_BYTES = 16 << 20
MAX_FRAME_BYTES = 64 << 20

M = TypeVar("M")


class Dialect(Generic[M]):
    """The messages that one direction of a link may carry: a union of message types, told apart by their `type`."""

    def __init__(self, union: Any) -> None:
        self._members: dict[str, type[Message]] = {m.model_fields["type"].default: m for m in get_args(union)}
        self._adapter: TypeAdapter[Any] = TypeAdapter(Annotated[union, Field(discriminator="type")])

    def decode(self, frames: Sequence[bytes]) -> M:
        """The message in `frames`; `DecodeError` if they hold none of this dialect."""
        body = _unpack(frames)
        member = self._members.get(tag) if isinstance(tag := body.get("type"), str) else None
        _attach(body, member, frames[1:])
        try:
            message: M = self._adapter.validate_python(body)
        except ValidationError as error:
            raise DecodeError(_explain(error)) from None
        return message


def encode(message: Message) -> list[bytes]:
    """The frames of a message: the body, then one frame for each of its arrays that is present."""
    body = message.model_dump()
    arrays = [body[name].pop("data") for name in message.ARRAYS if body[name] is not None]
    return [msgpack.packb(body), *arrays]


def _unpack(frames: Sequence[bytes]) -> dict[str, Any]:
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise DecodeError(f"a message has 1 to {MAX_FRAMES} frames, not {len(frames)}")
    if len(frames[0]) > MAX_BODY_BYTES or any(len(f) > MAX_FRAME_BYTES for f in frames[1:]):
        raise DecodeError(f"a frame of {max(map(len, frames))} bytes is beyond the limit")
    try:
        body = msgpack.unpackb(
            frames[0], use_list=False, raw=False, strict_map_key=True, max_ext_len=0, max_map_len=256, max_str_len=MAX_BODY_BYTES, max_bin_len=MAX_BODY_BYTES
        )
    except (ValueError, RecursionError, TypeError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise DecodeError(f"no MessagePack: {type(error).__name__}: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise DecodeError(f"a message is a map, not {type(body).__name__}")
    return body


def _attach(body: dict[str, Any], member: type[Message] | None, raw: Sequence[bytes]) -> None:
    """Put the raw frames back where the body names arrays; every frame must have its place."""
    rest = list(raw)
    for name in member.ARRAYS if member else ():
        header = body.get(name)
        if header is None:
            continue
        if not rest or not isinstance(header, dict) or "data" in header:
            raise DecodeError(f"array {name!r} has no frame of its own")
        body[name] = {**header, "data": bytes(rest.pop(0))}
    if rest:
        raise DecodeError(f"{len(rest)} frames belong to no array")


def _explain(error: ValidationError) -> str:
    """The first complaint, without the offending value: it may be large and hostile."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part)[:64] for part in first["loc"][:8])
    return f"{where or 'message'}: {first['msg'][:300]}"


COMMAND: Dialect[Command] = Dialect(Command)
EVENT: Dialect[Event] = Dialect(Event)
REQUEST: Dialect[Request] = Dialect(Request)
REPLY: Dialect[Reply] = Dialect(Reply)
