"""Hostile messages at a coordinator over memory links, beside the requests of a healthy client,
whose oracle is what the target alone would write.

Strangers, a registered client and a registered draft that sessions use attack it all together, and
none of them can change a token. A registered target can, since its word is what the reply is; by
itself it attacks the coordinator, which has to end every request once, and to serve others
afterwards.
"""

from collections.abc import Callable
from random import Random
from time import perf_counter
from typing import Any

from dovetail.protocol.codec import COMMAND, INBOUND, REPLY, encode
from dovetail.protocol.keys import PeerKey
from dovetail.protocol.messages import (
    Draft,
    Drafted,
    Failed,
    Finished,
    Hello,
    Limits,
    Opened,
    Probe,
    Scored,
    Verified,
    Welcome,
)
from hostile import messages
from hostile.found import Found, faults_of
from hostile.messages import Knowledge, decodable, falsified, hostile
from support.houses import PROMPT, House
from support.memory_links import MemoryLink
from support.scripted import ScriptedDraft, ScriptedTarget, ScriptedWorker, continuation

EPOCH = 4242
"""The epoch of whoever attacks: what it says is not old."""
AT_A_TIME = 50
"""Messages that are there when the coordinator looks: fewer than a link may hold."""
RUNNING = 3
"""Requests of the healthy client at a time; `TOKENS`: of each."""
TOKENS = 12
PATIENCE = 50
"""Turns in which no request ends: sessions move from a target that was removed to the next, several
times if need be."""
ANYBODY = PeerKey("anybody", ("client", "draft", "target"), "")
"""The hostile ones': they may be whatever they like but an operator, who lets workers go."""
LIES = 0.1
"""Share of a lying target's answers that are lies: sessions come some way between them."""


def siege_coordinator(count: int, seed: int, step: Callable[[int], None]) -> Found:
    """A stranger, a client and a draft, all hostile, while the requests of another client run."""
    found = Found("coordinator")
    with faults_of("dovetail.coordinator") as found.faults:
        scene = _Scene(Random(seed), found)
        began = perf_counter()
        found.look(0.0)
        while found.messages < count and not found.faults:
            for _ in range(min(AT_A_TIME, count - found.messages)):
                scene.attack()
            scene.let_run()
            found.look(found.messages / count)
            step(found.messages)
        scene.end()
        found.seconds = perf_counter() - began
    return found


class _Scene:
    """A house with healthy workers and a healthy client, and the three who attack it."""

    def __init__(self, rng: Random, found: Found) -> None:
        self._rng, self._found = rng, found
        self._house = House(limits=Limits(context=64, kept=512))
        self._known = Knowledge(epochs=(EPOCH,))
        self._streams = (
            hostile(rng, messages.INBOUND, self._known),
            decodable(rng, messages.INBOUND, self._known, INBOUND),
        )
        self._prompts: dict[int | None, tuple[int, ...]] = {}
        """Prompts of the healthy client's requests that run."""
        self._draft = self._new_draft()
        self._stranger, self._client = self._house.hub.connect(ANYBODY), self._new_client()

    def attack(self) -> None:
        """One hostile message of one of the three; for some time any, and for some time such as are
        messages."""
        _, frames = next(self._streams[self._found.messages // AT_A_TIME % 2])
        slip(self._rng.choice((self._stranger, self._client, self._draft.link)), frames)
        self._found.messages += 1

    def let_run(self) -> None:
        """Everybody handles what has arrived; who is not listened to any more comes again under a
        new name."""
        house = self._house
        while len(self._prompts) < RUNNING:
            prompt = tuple(self._rng.randint(1, 90) for _ in range(self._rng.randint(1, 8)))
            self._prompts[house.submit(prompt, max_tokens=TOKENS)] = prompt
        self._hear()
        newest = max(house.coordinator._running, default=self._found.asked)
        self._known.sessions = tuple(range(max(0, newest - 6), newest + 2))
        if self._draft.failures or self._draft not in house.workers:
            house.lose(self._draft)
            self._draft = self._new_draft()
            self._found.hung_up += 1
        if is_struck(self._stranger):
            self._stranger = self._instead(self._stranger, house.hub.connect(ANYBODY))
        if is_struck(self._client):
            self._client = self._instead(self._client, self._new_client())

    def end(self) -> None:
        """The healthy requests that still run end as they should, and nothing is left."""
        house, faults = self._house, self._found.faults
        for link in (self._stranger, self._client):
            link.close()
        house.lose(self._draft)
        while self._prompts and not faults:
            if not self._hear():
                faults.append(f"requests {sorted(map(str, self._prompts))} never end")
        state = house.report()
        self._found.refused = state.refused + state.stale
        if state.sessions:
            faults.append(f"{state.sessions} sessions are left")

    def _hear(self) -> int:
        """Return how many of the healthy client's requests have ended; each should be as the target
        alone would write it."""
        self._house.run()
        for worker in self._house.workers:
            tidy(worker)
        ends = [reply for reply in self._house.replies() if isinstance(reply, Finished | Failed)]
        for end in ends:
            prompt = self._prompts.pop(end.request if isinstance(end, Finished) else end.session)
            self._found.asked += 1
            self._found.disturbed += isinstance(end, Failed) or list(
                end.result.token_ids
            ) != continuation(prompt, TOKENS)
        return len(ends)

    def _instead(self, struck: MemoryLink, fresh: MemoryLink) -> MemoryLink:
        struck.close()
        self._found.hung_up += 1
        return fresh

    def _new_draft(self) -> "RogueDraft":
        rogue = RogueDraft(self._house.hub.connect(), "draft", EPOCH)
        rogue.rng = self._rng
        rogue.register(limits=Limits(context=64))
        self._house.workers.append(rogue)
        return rogue

    def _new_client(self) -> MemoryLink:
        link = self._house.hub.connect(ANYBODY)
        link.send(encode(Hello(epoch=EPOCH, roles=("client",), name="rogue", host="here", pid=1)))
        return link


class RogueDraft(ScriptedDraft):
    """A draft that answers every order with a proposal that cannot be, and nothing else at all."""

    rng: Random

    def step(self) -> int:
        handled = 0
        while (frames := self.link.receive(0)) is not None:
            handled += 1
            command = COMMAND.decode(frames)
            if isinstance(command, Draft):
                slip(self.link, self._lie(command))
            elif isinstance(command, Failed | Welcome | Probe):
                for event in self.handle(command):
                    self.link.send(encode(event))
        return handled

    def _lie(self, order: Draft) -> list[bytes]:
        """Its form is that of the answer that is waited for."""
        nodes = self.rng.choice((0, 1, 3, 15, 65))
        tree: dict[str, Any] = {
            "tokens": (7,) * nodes,
            "parents": (-1,) * nodes,
            "scores": (0.0,) * nodes,
        }
        return falsified(
            self.rng,
            encode(
                Drafted(
                    epoch=EPOCH,
                    session=order.session,
                    round=order.round,
                    grown=1,
                    hit=False,
                    **tree,
                )
            ),
        )


# -- a target that lies ----------------------------------------------------------------------------


def siege_by_target(count: int, seed: int, step: Callable[[int], None]) -> Found:
    """The only target answers what cannot be, now and then; in the end an honest one takes its
    place."""
    found, rng = Found("coordinator of a lying target"), Random(seed)
    with faults_of("dovetail.coordinator") as found.faults:
        house = House(target=False)
        began, waiting = perf_counter(), set[int | None]()
        found.look(0.0)
        rogue, idle = _new_target(house, rng), 0
        while found.messages < count and not found.faults:
            while len(waiting) < RUNNING:
                waiting.add(
                    house.submit(
                        (rng.randint(1, 90),),
                        max_tokens=TOKENS,
                        scored=rng.random() < 0.2,
                        logprobs=0,
                    )
                )
            house.run()
            found.messages, rogue.lies = found.messages + rogue.lies, 0
            if rogue.failures:
                house.lose(rogue)
                rogue = _new_target(house, rng)
                found.hung_up += 1
            ends = [reply for reply in house.replies() if isinstance(reply, Finished | Failed)]
            for end in ends:
                number = end.request if isinstance(end, Finished) else end.session
                found.asked += 1
                found.disturbed += number not in waiting
                waiting.discard(number)
            idle = 0 if ends else idle + 1
            if idle > PATIENCE:
                found.faults.append(f"requests {waiting} never end")
            for worker in house.workers:
                tidy(worker)
            found.look(found.messages / count)
            step(found.messages)
        house.lose(rogue)
        house.add(ScriptedTarget, "target")
        house.replies()
        found.disturbed += list(house.complete().result.token_ids) != continuation(PROMPT, 60)
        found.refused = house.report().refused
        found.seconds = perf_counter() - began
    return found


def _new_target(house: House, rng: Random) -> "RogueTarget":
    rogue = RogueTarget(house.hub.connect(), "target", EPOCH)
    rogue.rng = rng
    rogue.register()
    house.workers.append(rogue)
    house.run()
    return rogue


class RogueTarget(ScriptedTarget):
    """A target that lies now and then about what it has computed."""

    rng: Random
    lies = 0

    def step(self) -> int:
        handled = 0
        while (frames := self.link.receive(0)) is not None:
            handled += 1
            for event in self.handle(COMMAND.decode(frames)):
                lies = isinstance(event, Opened | Scored | Verified) and self.rng.random() < LIES
                self.lies += lies
                slip(self.link, falsified(self.rng, encode(event)) if lies else encode(event))
        return handled


# -- links and workers -----------------------------------------------------------------------------


def slip(link: MemoryLink, frames: list[bytes]) -> None:
    """Send what a link refuses to: who means harm has one of their own."""
    with link._hub.changed:
        link._put(frames)


def is_struck(link: MemoryLink) -> bool:
    """Return whether the coordinator has said that it has enough; reads what it said."""
    struck = False
    while (frames := link.receive(0)) is not None:
        reply = REPLY.decode(frames)
        struck |= isinstance(reply, Failed) and reply.code == "protocol" and reply.session is None
    return struck


def tidy(worker: ScriptedWorker) -> None:
    """A scripted worker remembers everything; what has ended would look like a leak."""
    worker.seen.clear()
    for name in ("opens", "last", "fed", "rounds"):
        table = vars(worker).get(name, {})
        for session in table.keys() - worker.logs.keys():
            del table[session]
