"""The coordinator's end of its standby: the journal is sent there as it is written, and who may
have been taken over from commands nobody.

A coordinator whose standby may have taken over lets its workers go and holds those that come, until
its standby or enough of them are here: sessions wait for a target meanwhile, and nothing is
committed. One that hears of a higher term steps down for good.
"""

import logging
import socket
from dataclasses import dataclass

from dovetail.protocol.arrays import Array
from dovetail.protocol.errors import RequestError, StaleError
from dovetail.protocol.keys import STANDBY
from dovetail.protocol.messages import (
    MAX_COPIED,
    MAX_VOTERS,
    VERSION,
    Confirmed,
    Copied,
    Follow,
    Hello,
)
from dovetail.runtime.engine.effects import Effects, Lose, Say
from dovetail.runtime.engine.faults import refusal
from dovetail.runtime.engine.outgoing import Outgoing
from dovetail.runtime.engine.shared import Shared
from dovetail.runtime.fleet.registry import Registry
from dovetail.runtime.fleet.service import Service
from dovetail.runtime.standby.succession import Copying, Deposed, Tenure, reached_at, voter_of

log = logging.getLogger("dovetail.coordinator")

HOLD_NS = 10**9
"""A worker that comes to a coordinator which commands nobody is sent on to the standby behind so
long."""
TAKEN = "the standby may have taken over"


@dataclass(frozen=True)
class Held:
    """A worker that waits to be let in."""

    hello: Hello
    since_ns: int


def voters_of(registry: Registry) -> tuple[str, ...]:
    """Return the workers on other machines than this one, as voters."""
    own, workers = socket.gethostname()[:512], registry.workers.values()
    others = (voter_of(one.hello) for one in workers if one.hello.host != own)
    return tuple(sorted(others))[:MAX_VOTERS]


def successor(service: Service, registry: Registry) -> Copying | None:
    """Return the standby that takes over when this coordinator leaves; None: nobody does, since
    none is here or no worker decides for it, or the whole service is about to end."""
    return None if service.ending or not voters_of(registry) else service.standby


class Lead:
    """Sends the journal to a standby, and knows whether this coordinator may command."""

    def __init__(self, shared: Shared, post: Outgoing) -> None:
        self._hub, self._service, self._registry = shared.hub, shared.service, shared.registry
        self._journal, self._now_ns, self._post = shared.journal, shared.now_ns, post
        self._tenure = Tenure()
        self._follower: bytes | None = None
        self._number = 0
        self._held: dict[bytes, Held] = {}
        self.lapsed = False
        """True if the standby may have taken over, so that nobody is commanded."""

    # -- the standby -------------------------------------------------------------------------------

    def hear(self, peer: bytes, message: Follow | Confirmed) -> Effects[None]:
        """Heed a standby, which shows this coordinator's own key; anybody else is refused."""
        if isinstance(message, Confirmed):
            if peer != self._follower:
                raise StaleError("what is no standby confirmed something")
            self._tenure.confirmed(message.number)
            if self._service.standby is not None:
                self._service.standby.confirmed(message.number)
            return
        key = self._hub.user(peer)
        if key is None or not key.may_be((STANDBY,)):
            self._refuse(peer, "role", "a standby connects over tcp with the coordinator's own key")
        elif message.version != VERSION:
            theirs, ours = (".".join(map(str, one)) for one in (message.version, VERSION))
            self._refuse(
                peer,
                "version",
                f"the standby speaks protocol {theirs}, the coordinator {ours}: run the same "
                "release of dovetail on both",
            )
        elif message.term > self._service.term:
            self._service.deposed = Deposed(
                f"the coordinator at {message.address} on {message.host} is of term "
                f"{message.term}, and this one of term {self._service.term}: it has been taken "
                "over from, and steps down",
                reached_at(message.address, message.host),
            )
        elif self._journal is None or self._journal.failed:
            self._refuse(
                peer,
                "settings",
                "this coordinator keeps no journal that a standby could copy: start it with "
                "coordinator.journal",
            )
        elif self._service.alone:
            self._refuse(peer, "settings", self._service.alone)
        elif self._follower is not None:
            self._refuse(
                peer,
                "capacity",
                f"this coordinator has a standby already, {self._service.standby}: the one at "
                f"{message.address} on {message.host} is one too many; stop either",
            )
        else:
            yield from self._followed(peer, message)

    def _refuse(self, peer: bytes, code: str, text: str) -> None:
        log.warning("refused: %s", text)
        self._post.to_peer(peer, refusal(self._service.epoch, RequestError(code, text)))

    def _followed(self, peer: bytes, follow: Follow) -> Effects[None]:
        """Send all of the journal, and from now on what is added."""
        assert self._journal is not None
        records = self._journal.whole()
        self._follower, self._tenure.followed = peer, True
        self._service.standby_lost_ns = None
        self._service.standby = Copying(follow.address, follow.host)
        self._journal.copy_to = self._copy
        self._copy(records)
        both = (
            reached_at(self._hub.address, socket.gethostname()),
            reached_at(follow.address, follow.host),
        )
        yield Say(
            f"the standby at {follow.address} on {follow.host} copies the journal; workers and the "
            f"HTTP API find both with --connect {','.join(both)}"
        )

    def _copy(self, records: bytes) -> None:
        """Send records to the standby."""
        for place in range(0, len(records), MAX_COPIED):
            part = records[place : place + MAX_COPIED]
            self._send(part, whole=place + MAX_COPIED >= len(records))

    def _send(self, records: bytes = b"", *, whole: bool = True) -> None:
        """Send a part of records to the standby, with the voters of now; it is lost if it takes
        nothing."""
        if self._follower is None:
            return
        array = Array(dtype="uint8", shape=(len(records),), data=records) if records else None
        voters = voters_of(self._registry)
        self._number += 1
        if whole:
            self._tenure.told(self._number, voters)
        if self._service.standby is not None:
            self._service.standby.told(self._number, len(records), self._now_ns())
        message = Copied(
            epoch=self._service.epoch,
            number=self._number,
            records=array,
            whole=whole,
            voters=voters,
        )
        if not self._post.to_peer(self._follower, message):
            self._follower, self._tenure.followed, self._service.standby = None, False, None
            self._service.standby_lost_ns = self._now_ns()
            if self._journal is not None:
                self._journal.copy_to = None
            log.warning("the standby is lost: nothing copies the journal until one is here again")

    # -- whether this coordinator may command ------------------------------------------------------

    def holds(self, peer: bytes, hello: Hello) -> bool:
        """Hold a worker that comes while the standby may have taken over; return whether it is
        held."""
        if not self.lapsed or "client" in hello.roles:
            return False
        if len(self._held) < MAX_VOTERS:
            self._held[peer] = Held(hello, self._now_ns())
        else:
            self._refuse(peer, "standby", f"{TAKEN}: this coordinator commands nobody")
        return True

    def tick(self) -> Effects[list[tuple[bytes, Hello]]]:
        """Tell the standby that this coordinator is here, and see whether it may command. Return
        the workers that are to be let in."""
        self._send()
        held = {voter_of(one.hello) for one in self._held.values()}
        lapsed = self._tenure.lapsed({*voters_of(self._registry), *held})
        if lapsed and not self.lapsed:
            yield Say(
                "the standby is lost, and more than half of the workers on other machines are: "
                f"{TAKEN}, and this coordinator commands nobody until one or the other is here"
            )
            for worker in [*self._registry.workers.values()]:
                yield Lose(worker, f"is let go because {TAKEN}")
        elif self.lapsed and not lapsed:
            yield Say("the standby or enough workers are here again: sessions go on")
        self.lapsed = lapsed
        return self._released()

    def _released(self) -> list[tuple[bytes, Hello]]:
        """Return those held, if they are to be let in; else send those on that have waited."""
        if not self.lapsed:
            held, self._held = self._held, {}
            return [(peer, one.hello) for peer, one in held.items()]
        now_ns = self._now_ns()
        for peer, one in [*self._held.items()]:
            if now_ns - one.since_ns > HOLD_NS:
                del self._held[peer]
                self._refuse(peer, "standby", f"{TAKEN}: this coordinator commands nobody")
        return []

    def check_term(self, hello: Hello) -> None:
        """Raise `RequestError` for a worker that has served a coordinator of a higher term."""
        if hello.term > self._service.term:
            raise RequestError(
                "standby",
                f"{hello.name} has served a coordinator of term {hello.term}, and this one is of "
                f"term {self._service.term}: it commands only who has known none above",
            )
