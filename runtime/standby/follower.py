"""The standby's end: what it copies of a coordinator's journal, who waits at it, and when it takes
over. Sends over a link and a hub that are handed in; `watching.py` runs it for real.

Whoever says Hello waits, workers and clients alike, and is among the first that the next
coordinator hears; or is sent to the present one, if that is there after all.
"""

import logging
import math
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dovetail.protocol.codec import INBOUND, REPLY, encode
from dovetail.protocol.errors import DecodeError, LinkError, UserError, printable
from dovetail.protocol.links import Hub, Link
from dovetail.protocol.messages import (
    MAX_VOTERS,
    Confirmed,
    Copied,
    Failed,
    Follow,
    Hello,
    Message,
    Probe,
    Reply,
)
from dovetail.runtime.journal.journal import Journal
from dovetail.runtime.standby.succession import Watch, reached_at, voter_of

log = logging.getLogger("dovetail.coordinator")

SILENCE_S = 3.0
"""A coordinator that says nothing for so long, four times a second otherwise, is followed anew."""
ANSWER_S = 2.0
"""Whoever leads unless somebody else does waits so long for that one to say so."""
REFUSED_S = 1.0
"""A coordinator that refused this standby is asked again after so long."""
GRACE_S, HOLD_S = 2.0, 10.0
"""Who has waited here so long is told to look for the coordinator: while that is there for us, who
may be the last to find out that it has gone; and while it is lost. Without a copy of its journal
this one cannot take over, and they are told at once."""
TICK_S = 0.25
MAX_CLIENTS = 960
Arrived = tuple[bytes, list[bytes]]


@dataclass(frozen=True)
class Waiting:
    """A peer that said Hello."""

    hello: Hello
    frames: list[bytes]
    since_s: float


class Follower:
    """A standby from its start until it takes over."""

    def __init__(
        self, hub: Hub, journal: Journal, address: str, *, leads_on: bool, now_s: float
    ) -> None:
        """`address`: of the coordinator, in words. `leads_on`: this one leads itself unless the
        other one leads, in a term that is not below."""
        self._hub, self._journal, self._address = hub, journal, address
        self._epoch = secrets.randbits(62)
        self._link: Link | None = None
        self._copied = False
        """True if the journal is a whole copy of that of the coordinator on this link."""
        self._parts: list[bytes] = []
        self._why = ""
        """The words with which the coordinator refused this standby last."""
        self._heard_s = self._ticked_s = self._again_s = 0.0
        self._leads_s = now_s + ANSWER_S if leads_on else math.inf
        self._waiting: dict[bytes, Waiting] = {}
        self.watch = Watch()

    def step(self, now_s: float, open_link: Callable[[], Link | None]) -> list[Arrived] | None:
        """Do what is due, some times a second; return the greetings of all who wait if it is time
        to take over, None if it is not. `open_link` returns a link to the coordinator, if one could
        be opened."""
        self.listen(now_s)
        self.receive(now_s)
        if self._link is None and now_s >= self._again_s and (link := open_link()) is not None:
            self.follow(link, now_s)
        if self._copied and now_s - self._ticked_s > TICK_S:
            self._ticked_s = now_s
            self._journal.tick()
        return self.take_over(now_s)

    # -- the coordinator ---------------------------------------------------------------------------

    def follow(self, link: Link, now_s: float) -> None:
        """Ask the coordinator at the other end of a link for its journal."""
        self._link, self._copied, self._parts, self._heard_s = link, False, [], now_s
        self._say(
            Follow(
                epoch=self._epoch,
                host=socket.gethostname()[:512],
                pid=os.getpid(),
                term=self._journal.term,
                address=self._hub.address,
            )
        )

    def _say(self, message: Message) -> None:
        if self._link is not None:
            try:
                self._link.offer(encode(message))
            except LinkError as error:
                log.debug("%s", error)  # the next read finds out

    def listen(self, now_s: float) -> None:
        """Take in what the coordinator has said; `UserError` if it refuses this standby for
        good."""
        try:
            while self._link is not None and (frames := self._link.receive(0)) is not None:
                self._heard_s = now_s
                self._hear(REPLY.decode(frames), now_s)
            if self._link is not None and now_s - self._heard_s > SILENCE_S:
                self._lose(f"{self._address} has said nothing for {SILENCE_S:g} s", now_s)
        except (LinkError, DecodeError) as error:
            self._lose(str(error), now_s)

    def _lose(self, why: str, now_s: float) -> None:
        assert self._link is not None
        self._link.close()
        self._link = None
        if self.watch.lost_s is None and self._copied:
            self.watch.lost_s = now_s
            log.warning("the coordinator is lost: %s", why)
        self._copied = False

    def _hear(self, reply: Reply, now_s: float) -> None:
        match reply:
            case Copied():
                self._put_off(now_s)
                self._copy(reply)
            case Failed(code="role" | "version" | "settings"):
                raise UserError(f"the coordinator refused this standby: {printable(reply.text)}")
            case Failed():
                if reply.code == "capacity":  # it has a standby, so that it leads
                    self._put_off(now_s)
                self._again_s = now_s + REFUSED_S
                self._lose(self._refused(printable(reply.text)), now_s)

    def _refused(self, why: str) -> str:
        """Say why the coordinator does not have this standby now, once for each reason."""
        if why != self._why:
            log.warning("%s is not followed yet, and is asked again: %s", self._address, why)
        self._why = why
        return why

    def _put_off(self, now_s: float) -> None:
        """Note that the other one leads: this one does only if it says nothing more for some
        time."""
        if self._leads_s < math.inf:
            self._leads_s = now_s + HOLD_S

    def _copy(self, copied: Copied) -> None:
        if copied.records is not None:
            self._parts.append(copied.records.data)
        if not copied.whole:
            return
        records, self._parts = b"".join(self._parts), []
        if self._copied:
            self._journal.copy(records)
        else:
            self._journal.copy_anew(records, self._address)
        voters = frozenset(copied.voters)
        if not self._copied or voters != self.watch.voters:
            log.info("%s", self._words(voters, anew=not self._copied))
        self._copied, self.watch.voters, self.watch.lost_s = True, voters, None
        self._leads_s = math.inf
        self._say(Confirmed(epoch=self._epoch, number=copied.number))

    def _words(self, voters: frozenset[str], *, anew: bool) -> str:
        """Return what this standby is there for, in words."""
        copies = f"the journal of {self._address}, term {self._journal.term}, is copied: "
        if not voters:
            return (
                f"{copies if anew else ''}it takes over if it loses the coordinator and more than "
                "half of the workers on other machines than that come here, and there is none yet"
            )
        return (
            f"{copies if anew else ''}this standby takes over if it loses the coordinator and more "
            f"than half of these workers wait here: {', '.join(sorted(voters))}"
        )

    # -- who comes here ----------------------------------------------------------------------------

    def receive(self, now_s: float) -> None:
        """Take in who says Hello; all else is not for a standby."""
        while (arrived := self._hub.receive()) is not None:
            peer, frames = arrived
            try:
                message = INBOUND.decode(frames)
            except DecodeError as error:
                log.debug("a message was dropped: %s", error)
                continue
            if isinstance(message, Hello):
                self._greet(peer, Waiting(message, frames, now_s))
            elif isinstance(message, Follow):
                self._refuse(peer, f"it is the standby of {self._address} itself")
        self._find_gone(now_s)

    def _greet(self, peer: bytes, waiting: Waiting) -> None:
        if len(self._waiting) < MAX_VOTERS + MAX_CLIENTS:
            self._waiting[peer] = waiting
        else:
            self._turn_away([peer], "too many wait here")

    def _find_gone(self, now_s: float) -> None:
        """Forget who has gone, and send those on who have waited for long."""
        if self._hub.disconnects():
            for peer, one in [*self._waiting.items()]:
                if "client" not in one.hello.roles and not self._reach(
                    peer, Probe(epoch=self._epoch, sent_ns=0)
                ):
                    del self._waiting[peer]
        if self.watch.lost_s is not None:
            most_s, why = HOLD_S, "that one is lost, and too few workers have come here"
        else:
            hopeless = not self._copied and self._leads_s == math.inf  # without a copy nobody leads
            most_s = 0.0 if hopeless else GRACE_S
            why = f"it takes over when that one is lost, and {self._copy_in_words()}"
        late = [peer for peer, one in self._waiting.items() if now_s - one.since_s > most_s]
        self._turn_away(late, why)

    def _copy_in_words(self) -> str:
        """Return whether there is a copy of the journal, and of which term."""
        if not self._copied:
            return "has no copy of its journal yet"
        return f"has a copy of its journal, of term {self._journal.term}"

    def _turn_away(self, peers: list[bytes], why: str) -> None:
        own = reached_at(self._hub.address, socket.gethostname())
        for peer in peers:
            self._waiting.pop(peer, None)
            self._refuse(
                peer,
                f"{own} is the standby of {self._address} and serves nobody ({why}): connect to "
                f"{self._address},{own}",
            )

    def _refuse(self, peer: bytes, text: str) -> None:
        self._reach(peer, Failed(epoch=self._epoch, code="standby", text=text))

    def _reach(self, peer: bytes, message: Message) -> bool:
        try:
            self._hub.send(peer, encode(message))
        except LinkError as error:
            log.debug("%s", error)
            return False
        return True

    # -- taking over -------------------------------------------------------------------------------

    def take_over(self, now_s: float) -> list[Arrived] | None:
        """Return the greetings of all who wait, if it is time to take over; None: it is not."""
        if now_s >= self._leads_s:
            log.warning("%s does not lead: this coordinator does", self._address)
            return [*self._arrived()]
        waiting = {voter_of(one.hello) for one in self._waiting.values()}
        lost_s = self.watch.lost_s
        if lost_s is None or not self.watch.due(waiting, now_s):
            return None
        there = len(self.watch.voters & waiting)
        log.warning(
            "%s has been lost for %.1f s, and %d of %d workers wait here: taking over in term %d",
            self._address,
            now_s - lost_s,
            there,
            len(self.watch.voters),
            self._journal.term + 1,
        )
        return [*self._arrived()]

    def _arrived(self) -> Iterator[Arrived]:
        """Yield the greetings, workers first."""
        order = sorted(self._waiting.items(), key=lambda one: "client" in one[1].hello.roles)
        yield from ((peer, one.frames) for peer, one in order)

    def close(self) -> None:
        """Let the coordinator go."""
        if self._link is not None:
            self._link.close()
            self._link = None
