"""Hostile messages at the codec: each is a message or a `DecodeError`, whatever it is, and soon."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from time import perf_counter
from typing import Any

from dovetail.protocol.codec import COMMAND, INBOUND, REPLY, Dialect, encode
from dovetail.protocol.errors import DecodeError
from hostile import messages
from hostile.found import Found
from hostile.messages import KINDS, Direction, Knowledge, hostile

WAYS: Sequence[tuple[Direction, Dialect[Any]]] = (
    (messages.INBOUND, INBOUND),
    (messages.COMMANDS, COMMAND),
    (messages.REPLIES, REPLY),
)
AT_A_TIME = 1000


@dataclass
class KindFound:
    """The codec's handling of the messages of one kind."""

    messages: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0


def siege_codec(
    count: int, seed: int, step: Callable[[int], None]
) -> tuple[Found, Mapping[str, KindFound]]:
    """Decode them, each in the dialect that it was made for; the healthy one is a message of the
    same dialect now and then."""
    streams = [
        (hostile(Random(seed + place), way, Knowledge()), dialect, way.examples[0])
        for place, (way, dialect) in enumerate(WAYS)
    ]
    found, kinds = Found("codec"), {kind: KindFound() for kind in KINDS}
    began = perf_counter()
    found.look(0.0)
    while found.messages < count:
        stream, dialect, healthy = streams[found.messages // AT_A_TIME % len(streams)]
        for kind, frames in islice(stream, min(AT_A_TIME, count - found.messages)):
            _decode(dialect, frames, found, kinds[kind])
        found.asked += 1
        found.disturbed += tuple(encode(dialect.decode(healthy))) != healthy
        found.look(found.messages / count)
        step(found.messages)
    found.seconds = perf_counter() - began
    return found, kinds


def _decode(dialect: Dialect[Any], frames: list[bytes], found: Found, kind: KindFound) -> None:
    began = perf_counter()
    try:
        dialect.decode(frames)
    except DecodeError:
        found.refused += 1
        kind.refused += 1
    except Exception:  # that there is none is what this is about
        found.faults.append(traceback.format_exc())
    took = perf_counter() - began
    found.messages += 1
    kind.messages += 1
    kind.seconds += took
    kind.slowest_s = max(kind.slowest_s, took)
