"""Hostile commands at real workers over memory links.

Nobody but its coordinator speaks to a worker, so here that is the attacker, and its epoch is right.
Between its messages a session is opened, worked on and closed; what the worker answers there has to
be, byte for byte, what it answered before the first of them. A worker that has had enough hangs up,
forgets its sessions and comes again.
"""

import select
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from random import Random
from time import perf_counter
from typing import Any

from dovetail.protocol.arrays import Array
from dovetail.protocol.codec import COMMAND, EVENT, encode
from dovetail.protocol.errors import LinkClosed, PeerGone
from dovetail.protocol.messages import (
    Close,
    Closed,
    Command,
    Draft,
    Drafted,
    Drain,
    Event,
    Failed,
    Feed,
    Hello,
    Open,
    Opened,
    Probe,
    Probed,
    Verified,
    Verify,
    VerifyItem,
    Welcome,
)
from dovetail.protocol.noise import session_key
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.workers.loop import serve
from dovetail.workers.serving.registration import Reconnecting, Worker
from hostile import messages
from hostile.found import Found
from hostile.messages import Knowledge, decodable, hostile
from support.memory_links import MemoryLink, memory_links
from support.models import VOCABULARY
from support.patience import PATIENCE_S

EPOCH = 4242
AT_A_TIME = 10
"""Messages between two looks whether the worker is still there: it hangs up after eight that are
none."""
CONVERSE_EVERY = 100
PROMPT = (0, 3, 17, 9)
HEALTHY = 1 << 40
"""The number of the session that is looked at; no hostile message speaks of it."""


def siege_worker(
    name: str, worker: Worker, count: int, seed: int, step: Callable[[int], None]
) -> Found:
    """Hostile commands, and the same healthy session over and over."""
    found = Found(name)
    rng, known = Random(seed), Knowledge(epochs=(EPOCH,), sessions=range(8))
    streams = (
        hostile(rng, messages.COMMANDS, known),
        decodable(rng, messages.COMMANDS, known, COMMAND),
    )
    began = perf_counter()
    coordinator = _Coordinator(worker)
    try:
        expected = coordinator.converse()
        found.look(0.0)
        while found.messages < count and not coordinator.fault:
            for _, frames in islice(
                streams[found.messages // AT_A_TIME % 2], min(AT_A_TIME, count - found.messages)
            ):
                coordinator.slip(frames)
                found.messages += 1
            coordinator.settle()
            if found.messages % CONVERSE_EVERY == 0:
                found.asked += 1
                found.disturbed += coordinator.converse() != expected
            found.look(found.messages / count)
            step(found.messages)
    finally:
        coordinator.end()
    found.refused, found.hung_up = coordinator.refused, coordinator.hung_up
    found.faults += filter(None, [coordinator.fault])
    found.seconds = perf_counter() - began
    return found


class _Coordinator:
    """The other end of a worker's link; the worker runs in a thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.fault = ""
        self.refused = self._asked = self._stale = 0
        self.hung_up = -1  # the first Hello is no return
        self._hub = memory_links()
        self._peer = b""
        self._thread = threading.Thread(
            target=self._serve, args=(self._hub.connect(),), daemon=True
        )
        self._thread.start()
        self._registered(EVENT.decode(self._next()))

    def _serve(self, link: MemoryLink) -> None:
        try:
            serve(
                link,
                self._worker,
                reconnecting=Reconnecting(self._hub.connect, PATIENCE_S, lambda _: None),
            )
        except LinkClosed:
            return
        except Exception:
            self.fault = traceback.format_exc()

    def _registered(self, hello: Hello) -> None:
        self.hung_up += 1
        self._stale, self._hello = 0, hello
        self._send(Welcome(epoch=EPOCH))

    def _next(self) -> list[bytes]:
        while (arrived := self._hub.receive()) is None:
            if not select.select([self._hub.fileno()], [], [], PATIENCE_S)[0]:
                raise TimeoutError(f"the worker says nothing: {self.fault}")
        self._peer, frames = arrived
        return frames

    def _send(self, message: Command) -> None:
        with suppress(PeerGone):
            self._hub.send(self._peer, encode(message))

    def slip(self, frames: list[bytes]) -> None:
        """Send what a hub refuses to."""
        with self._hub.changed:
            if (link := self._hub._links.get(self._peer)) is not None:
                link.inbox.append(frames)
                self._hub.changed.notify_all()

    def settle(self) -> list[Event]:
        """Wait until all that was sent has been handled; what was said meanwhile. Whatever a
        hostile message opened is closed again."""
        self._ask()
        said: list[Event] = []
        while (
            not isinstance(event := EVENT.decode(self._next()), Probed)
            or event.sent_ns != self._asked
        ):
            said.append(event)
            if isinstance(event, Hello):
                self._registered(event)
                self._ask()
        self.refused += sum(isinstance(event, Failed) for event in said) + event.stale - self._stale
        self._stale = event.stale
        for opened in said:
            if isinstance(opened, Opened) and opened.session != HEALTHY:
                self._send(Close(epoch=EPOCH, session=opened.session))
        return said

    def _ask(self) -> None:
        self._asked += 1
        self._send(Probe(epoch=EPOCH, sent_ns=self._asked))

    def converse(self) -> list[Any]:
        """A whole session, and what it is answered."""
        answers: list[Any] = []
        for command in self._commands():
            self._send(command)
            answers += [
                _essence(event)
                for event in self.settle()
                if not isinstance(event, Closed | Failed) or event.session == HEALTHY
            ]
        return answers

    def _commands(self) -> Iterator[Command]:
        tree = TreeSettings(
            policy="dynamic", insist=True, gamma=6, depth=3, width=3, sharpening=1.0
        )
        about: dict[str, Any] = {"epoch": EPOCH, "session": HEALTHY}
        sampling, key, reads = (
            Sampling(temperature=1.0),
            session_key(0, 0, PROMPT),
            self._hello.reads,
        )
        yield Open(
            **about,
            key=key,
            prompt=PROMPT,
            capacity=20,
            vocabulary_size=VOCABULARY,
            sampling=sampling,
            tree=tree,
            features=reads,
        )
        if reads is not None:
            yield Feed(**about, start=0, features=_features(reads.dtype, len(PROMPT), reads.row))
        for number in (1, 2, 3):
            length = len(PROMPT) + number
            if "target" in self._hello.roles:
                yield Verify(
                    epoch=EPOCH,
                    items=(
                        VerifyItem(
                            session=HEALTHY, round=number, prefix=length, tokens=(), parents=()
                        ),
                    ),
                )
            else:
                features = (
                    _features(reads.dtype, 1, reads.row)
                    if reads is not None and number > 1
                    else None
                )
                order: dict[str, Any] = {
                    "bonus": 5 + number,
                    "accepted": (),
                    "max_nodes": 6,
                    "max_depth": 3,
                    "max_width": 3,
                    "features": features,
                }
                yield Draft(**about, round=number, prefix=length, **order)
        yield Close(**about)

    def end(self) -> None:
        self._send(Drain(epoch=EPOCH))
        self._thread.join(PATIENCE_S)
        self._hub.close()
        if self._thread.is_alive():
            self.fault = self.fault or "the worker does not end"


def _features(dtype: str, rows: int, row: int) -> Array:
    return Array(dtype=dtype, shape=(rows, row), data=bytes(2 * rows * row))  # type: ignore[arg-type]


def _essence(event: Event) -> Any:
    """Return the content of an answer, without when and how fast."""
    match event:
        case Drafted():
            return event.tokens, event.parents
        case Verified():
            return event.items
    return (
        event.model_copy(update={"epoch": 0, "spans": ()})
        if isinstance(event, Opened)
        else event.type
    )
