"""A stage for a worker that replays: its process, its link, and the exchanges over it."""

import select
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dovetail.launch.processes.supervise import Supervisor
from dovetail.protocol.codec import EVENT, INBOUND, encode
from dovetail.protocol.links import Hub
from dovetail.protocol.messages import Event, Hello, Message, Welcome
from dovetail.runtime.record.replay import Asked
from replay.exchanges import Exchange, answers, ended

POLL_MS = 250
EPOCH = 1


@dataclass
class Stage:
    """A hub with one worker on it: a `Player`."""

    hub: Hub
    supervisor: Supervisor
    peer: bytes = b""
    hello: Hello = field(init=False)

    def wait_for_worker(self) -> None:
        """Wait until it has registered; its error is raised if it ends before."""
        for peer, frames in self._arriving():
            message: Any = INBOUND.decode(frames)
            if isinstance(message, Hello):
                self.peer, self.hello = peer, message
                self.say(Welcome(epoch=EPOCH))
                return

    def say(self, message: Message) -> None:
        self.hub.send(self.peer, encode(message))

    def ask(self, command: Asked, session: int) -> Sequence[Event]:
        self.say(command)
        exchange = Exchange(0, 0.0, command)
        for _, frames in self._arriving():
            event: Event = EVENT.decode(frames)
            if answers(command, event, session):
                exchange = replace(exchange, answers=(*exchange.answers, event))
            if ended(exchange):
                break
        return exchange.answers

    def _arriving(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """Whatever comes, for ever. A worker that makes no progress ends by itself, and its last
        words are raised."""
        poller = select.poll()
        poller.register(self.hub.fileno(), select.POLLIN)
        while True:
            while (arrived := self.hub.receive()) is not None:
                yield arrived
            self.supervisor.check()
            poller.poll(POLL_MS)
