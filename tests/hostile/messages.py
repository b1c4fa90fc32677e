"""Hostile messages: frames as a peer might send them that means harm, is broken, or belongs to
another time. Each is made from a seed; knows no victim.

Twelve kinds. Some are no message, some are a message with something wrong in it, some are right in
form and wrong in time or content: the last are what somebody can say who is registered and knows
what is going on (`Knowledge`).
"""

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, get_args

import msgpack

from dovetail.protocol import messages
from dovetail.protocol.codec import Dialect, encode
from dovetail.protocol.errors import DecodeError
from dovetail.protocol.messages import Message
from dovetail.protocol.settings import Sampling, TreeSettings
from support import golden

INTEGERS = (
    0,
    1,
    2,
    5,
    96,
    512,
    1023,
    1024,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    1 << 53,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    -1,
    -(1 << 63),
)
FLOATS = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e308, -1e308, 5e-324, 1.0)
TEXTS = (
    "",
    "\0",
    "a\nforged line",
    "\x1b[2J\x1b]0;owned\x07",
    "../../etc/passwd",
    "/dev/zero",
    "{{ 7 * 7 }}",
    "\u202e",
    "A" * 5000,
    "target",
    "\N{PILE OF POO}",
)
DEEPEST = 200_000
LARGEST = 1 << 24
RARE = 1 / 4000
"""Share of a kind's messages that are of the largest size: each takes milliseconds."""


@dataclass
class Knowledge:
    """The knowledge that an attacker has of its victim at present."""

    epochs: Sequence[int] = (1,)
    """Epochs that the victim believes."""
    sessions: Sequence[int] = (1, 2, 3)
    """Sessions that the victim might speak of."""


@dataclass(frozen=True)
class Direction:
    """The messages that go one way, as examples of every type."""

    name: str
    examples: tuple[tuple[bytes, ...], ...]
    """The frames of each."""

    @property
    def carriers(self) -> tuple[tuple[bytes, ...], ...]:
        """Those with arrays."""
        return tuple(frames for frames in self.examples if len(frames) > 1)


LAST_WORDS = (messages.Stop, messages.Drain, messages.Failed, messages.Welcome)
"""With these a conversation ends or begins, whoever may say them: there is nothing to see after
them."""


def direction(name: str, *unions: Any, others: Sequence[Message] = ()) -> Direction:
    """The representative messages of these dialects but for the last words, and others."""
    types = {member for union in unions for member in get_args(union)} - {*LAST_WORDS}
    examples = [message for message in golden.representative().values() if type(message) in types]
    return Direction(name, tuple(tuple(encode(message)) for message in (*examples, *others)))


SHORT = messages.Submit(
    epoch=1,
    request=1,
    tokens=(5, 6, 7),
    sampling=Sampling(),
    max_tokens=4,
    tree=TreeSettings(policy="dynamic", insist=True),
)
"""A request that is served, where the representative one has three prompts and is refused."""
INBOUND = direction("coordinator", messages.Event, messages.Request, others=(SHORT,))
PROMPT = (0, 3, 17, 9)
_SESSION: Mapping[str, Any] = {"epoch": 1, "session": 1}
_OPEN = messages.Open(
    **_SESSION,
    key=bytes(16),
    prompt=PROMPT,
    capacity=20,
    vocabulary_size=48,
    sampling=Sampling(temperature=1.0),
    tree=TreeSettings(policy="dynamic", insist=True, gamma=6),
)
_ITEM = messages.VerifyItem(session=1, round=1, prefix=5, tokens=(7, 8, 9), parents=(-1, -1, 0))
_DRAFT = messages.Draft(
    **_SESSION, round=1, prefix=5, accepted=(), bonus=6, max_nodes=6, max_depth=3, max_width=3
)
FITTING = (
    _OPEN,
    _OPEN,
    messages.Verify(epoch=1, items=(_ITEM,)),
    messages.Verify(epoch=1, items=(_ITEM, _ITEM)),
    _DRAFT,
    _DRAFT,
)
"""Commands that a worker with a vocabulary of 48 can do, so that some of what is made of them is
about sessions that are open."""
COMMANDS = direction("worker", messages.Command, others=FITTING)
REPLIES = direction("client", messages.Reply)


def hostile(rng: Random, sent: Direction, known: Knowledge) -> Iterator[tuple[str, list[bytes]]]:
    """(kind, frames) without end: the kinds in turn, the same for the same seed."""
    while True:
        for kind, make in KINDS.items():
            yield kind, make(rng, sent, known)


def decodable(
    rng: Random, sent: Direction, known: Knowledge, dialect: Dialect[Any]
) -> Iterator[tuple[str, list[bytes]]]:
    """Yield those hostile messages that can be decoded: an attacker who sends nothing else is not
    found out by form, and gets further."""
    while True:
        for kind in DEEPER:
            frames = KINDS[kind](rng, sent, known)
            try:
                dialect.decode(frames)
            except DecodeError:
                continue
            yield kind, frames


# -- no messages -----------------------------------------------------------------------------------


def random_bytes(rng: Random, _sent: Direction, _known: Knowledge) -> list[bytes]:
    return [rng.randbytes(rng.randint(0, 64)) for _ in range(rng.randint(1, 4))]


def random_structure(rng: Random, _sent: Direction, _known: Knowledge) -> list[bytes]:
    return [
        msgpack.packb(_structure(rng, 3)),
        *(rng.randbytes(8) for _ in range(rng.randint(0, 2))),
    ]


def huge_claim(rng: Random, _sent: Direction, _known: Knowledge) -> list[bytes]:
    """A few bytes that claim an array, a map, a text or bytes of up to 2^32 items, one in the
    other."""
    claim = rng.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")) + struct.pack(
        ">I", rng.choice((0xFFFFFFFF, 0x7FFFFFFF, 1 << 20, 1 << 24))
    )
    return [
        rng.choice((b"", b"\x81\xa4type"))
        + claim * rng.choice((1, 1, 5, 500))
        + rng.randbytes(rng.randint(0, 600))
    ]


def deep_nesting(rng: Random, _sent: Direction, _known: Knowledge) -> list[bytes]:
    depth = DEEPEST if rng.random() < 10 * RARE else rng.randint(10, 2000)
    return [rng.choice((b"\x91", b"\x81\xa1a", b"\x82\xa4type\xa4open\xa6prompt\x91")) * depth]


def many_frames(rng: Random, sent: Direction, _known: Knowledge) -> list[bytes]:
    frames = [*rng.choice(sent.examples)]
    count = rng.choice((0, 5, 6, 100)) if rng.random() > 10 * RARE else 50_000
    return (frames * (1 + count // len(frames)))[:count]


def large(rng: Random, sent: Direction, _known: Knowledge) -> list[bytes]:
    """A field of many items or bytes, of the wrong type or too many."""
    size = LARGEST if rng.random() < RARE else 1 << rng.randint(8, 14)
    body = _body(rng.choice(sent.examples))
    name = rng.choice(sorted(body))
    filling = rng.randint(0, 5)
    if filling == 0:
        body[name] = [0] * (size // 4)
    elif filling == 1:
        body[name] = "a" * (size - 4096 if size == LARGEST else size)
    elif filling == 2:
        body[name] = bytes(size)
    elif filling == 3:
        body[name] = [[None] * 7] * (size // 16)
    elif filling == 4:
        body[name] = ["ab"] * (size // 4)
    else:
        body |= {f"field{place}": place for place in range(min(size // 16, 70_000))}
    return [msgpack.packb(body)]


# -- broken messages -------------------------------------------------------------------------------


def mutated_bytes(rng: Random, sent: Direction, known: Knowledge) -> list[bytes]:
    """An example with a few bytes written over, taken away or put in."""
    frames = [bytearray(frame) for frame in _packed(*_timely(rng, sent, known))]
    for _ in range(rng.randint(1, 4)):
        frame = rng.choice(frames)
        at, change = rng.randint(0, len(frame)), rng.randint(0, 2)
        if change == 0:
            frame[at:at] = rng.randbytes(rng.randint(1, 5))
        elif change == 1:
            del frame[at : at + rng.randint(1, 5)]
        else:
            frame[at : at + 1] = rng.randbytes(1)
    return [bytes(frame) for frame in frames]


def cut_short(rng: Random, sent: Direction, known: Knowledge) -> list[bytes]:
    """An example whose end is missing, in its body or in its arrays, or with something behind
    it."""
    body, *arrays = _packed(*_timely(rng, sent, known))
    if arrays and rng.random() < 0.5:
        return [body, *(array[: rng.randint(0, max(0, len(array) - 1))] for array in arrays)]
    return (
        [body[: rng.randint(0, len(body) - 1)], *arrays]
        if rng.random() < 0.8
        else [body + rng.randbytes(rng.randint(1, 9)), *arrays]
    )


def wrong_fields(rng: Random, sent: Direction, known: Knowledge) -> list[bytes]:
    """An example with a field of another type, without one, or with one too many."""
    body, arrays = _timely(rng, sent, known)
    change, name = rng.randint(0, 2), rng.choice(sorted(body))
    if change == 0:
        body[name] = _structure(rng, 2)
    elif change == 1:
        del body[name]
    else:
        body[rng.choice(TEXTS)] = _structure(rng, 1)
    return _packed(body, arrays)


def wrong_arrays(rng: Random, sent: Direction, known: Knowledge) -> list[bytes]:
    """An array whose type, shape or bytes do not go together, without a frame, with two, or inside
    the body."""
    body, arrays = _timely(rng, Direction(sent.name, sent.carriers), known)
    name = next(
        name for name, value in body.items() if isinstance(value, dict) and "dtype" in value
    )
    change = rng.randint(0, 5)
    if change == 0:
        body[name] = {
            **body[name],
            "shape": [rng.choice(INTEGERS) for _ in range(rng.randint(0, 6))],
        }
    elif change == 1:
        body[name] = {
            **body[name],
            "dtype": rng.choice(("object", "uint8", "int64", "float32", "O", "", 3)),
        }
    elif change == 2:
        body[name] = {**body[name], "data": bytes(16)}
    elif change == 3:
        return _packed(body, [*arrays, rng.randbytes(8)])
    elif change == 4:
        return _packed(body, arrays[:-1])
    else:
        body[name] = {
            **body[name],
            "shape": [1 << 32, 1 << 32, 1 << 32, rng.choice((0, 1, 1 << 32))],
        }
    return _packed(body, arrays)


# -- messages of another time, or that cannot be ---------------------------------------------------


def wrong_time(rng: Random, sent: Direction, known: Knowledge) -> list[bytes]:
    """A whole message about another epoch, session, round or length than there is."""
    body, arrays = _timely(rng, sent, known)
    for fields in (body, *(item for item in body.get("items", ()) if isinstance(item, dict))):
        for name in ("epoch", "session", "round", "prefix", "request", "start", "base"):
            if name in fields and (name == "epoch" or rng.random() < 0.7):
                fields[name] = _moment(rng, name, known)
    return _packed(body, arrays)


def wrong_content(rng: Random, sent: Direction, known: Knowledge) -> list[bytes]:
    """A message of the right time whose values are at the edge of their type or beyond: trees that
    are none, ids that nobody has, what is no number."""
    return falsified(rng, _packed(*_timely(rng, sent, known)))


def falsified(rng: Random, frames: Sequence[bytes]) -> list[bytes]:
    """Return a message about the same session and round with other values in some fields."""
    body = _body(frames)
    for fields in (body, *(item for item in body.get("items", ()) if isinstance(item, dict))):
        names = sorted(fields.keys() - {"type", "epoch", "session", "round", "items"})
        for name in rng.sample(names, min(len(names), rng.randint(1, 3))):
            fields[name] = _edge(rng, fields[name])
    return _packed(body, frames[1:])


KINDS: Mapping[str, Callable[[Random, Direction, Knowledge], list[bytes]]] = {
    "random bytes": random_bytes,
    "random MessagePack": random_structure,
    "claims of 2^32 items": huge_claim,
    "nested up to 200,000 deep": deep_nesting,
    "up to 50,000 frames": many_frames,
    "fields of up to 16 MiB": large,
    "mutated bytes": mutated_bytes,
    "cut short": cut_short,
    "wrong fields": wrong_fields,
    "wrong arrays": wrong_arrays,
    "wrong epoch, session, round": wrong_time,
    "impossible content": wrong_content,
}
DEEPER = ("mutated bytes", "wrong epoch, session, round", "impossible content")
"""Those of which many are messages."""


# -- parts -----------------------------------------------------------------------------------------


def _body(frames: Sequence[bytes]) -> dict[str, Any]:
    """The fields of a message as its body has them."""
    body: dict[str, Any] = msgpack.unpackb(frames[0])
    return body


def _timely(rng: Random, sent: Direction, known: Knowledge) -> tuple[dict[str, Any], list[bytes]]:
    """An example that says an epoch and speaks of a session that the victim knows."""
    frames = rng.choice(sent.examples)
    body, arrays = _body(frames), [*frames[1:]]
    body["epoch"] = rng.choice(known.epochs)
    for fields in (body, *(item for item in body.get("items", ()) if isinstance(item, dict))):
        if "session" in fields:
            fields["session"] = rng.choice(known.sessions)
    return body, arrays


def _packed(body: Mapping[str, Any], arrays: Sequence[bytes]) -> list[bytes]:
    return [msgpack.packb(body), *arrays]


def _moment(rng: Random, name: str, known: Knowledge) -> int:
    if name == "epoch":
        return rng.choice((*known.epochs, 0, rng.getrandbits(62)))
    if name == "session":
        return rng.choice((*known.sessions, 0, rng.getrandbits(63)))
    return rng.choice((0, 1, 2, 3, rng.randint(0, 600), (1 << 63) - 1))


def _structure(rng: Random, depth: int) -> Any:
    kind = rng.randint(0, 7 if depth else 5)
    if kind < 6:
        return (
            None,
            rng.random() < 0.5,
            rng.choice(INTEGERS),
            rng.choice(FLOATS),
            rng.choice(TEXTS),
            rng.randbytes(rng.randint(0, 8)),
        )[kind]
    inside = [_structure(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    return inside if kind == 6 else {rng.choice(TEXTS): value for value in inside}


def _edge(rng: Random, value: Any) -> Any:
    """Another value of nearly the same type."""
    match value:
        case bool():
            return not value
        case int():
            return rng.choice(INTEGERS)
        case float():
            return rng.choice(FLOATS)
        case str():
            return rng.choice(TEXTS)
        case bytes():
            return rng.randbytes(rng.randint(0, 20))
        case list():
            return [
                _edge(rng, rng.choice(value or [0]))
                for _ in range(rng.choice((0, 1, 2, 3, 15, 65)))
            ]
        case dict():
            return {
                name: _edge(rng, inner) if rng.random() < 0.4 else inner
                for name, inner in value.items()
            }
    return rng.choice((None, 0, 1.0, ""))
