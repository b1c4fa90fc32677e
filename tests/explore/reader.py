"""A client that checks what it is told, as it is told."""

from collections.abc import Callable
from typing import Protocol

from dovetail.protocol.codec import REPLY, encode
from dovetail.protocol.messages import (
    Cancel,
    Dismiss,
    Dismissed,
    Emitted,
    Failed,
    Finished,
    Hello,
    Message,
    Progressed,
    PromptScored,
    Submit,
    Swap,
    Swapped,
    Welcome,
)
from dovetail.protocol.settings import Sampling, TreeSettings
from explore import invariants
from explore.clock import Time
from explore.schedules import Reply, Wish
from explore.told import Told
from explore.wires import FaultyHub

CHANGES = 1_000_000  # the numbers of requests for a change of workers begin here


class Surroundings(Protocol):
    """The world as far as a reader knows it."""

    time: Time
    losses: int
    sabotages: int

    @property
    def hub(self) -> FaultyHub: ...

    def committed(self, client: bytes, request: int) -> int | None: ...

    def note(self, what: object) -> None: ...

    def check_failed(self, told: Told, reply: Failed) -> None: ...

    def check_change_failed(self, reply: Failed) -> None: ...


class Reader:
    """A client."""

    def __init__(
        self,
        world: Surroundings,
        number: int,
        expect: Callable[[Wish], Reply] | None,
        *,
        tickets: bool = False,
    ) -> None:
        """`expect`: what a reply is to be; None: who asks is about to find out. `tickets`: it comes
        back for its replies when its coordinator was lost."""
        self._tickets = tickets
        self.told: dict[int, Told] = {}
        self.refused = False  # true if the coordinator failed at its Hello
        self.deaf = False  # true if it did not read for some time
        self._world, self.hub, self._expect = world, world.hub, expect
        self.peer, self._epoch, self._changes = b"client %d" % number, 1000 + number, 0
        self._hello = Hello(
            epoch=self._epoch, roles=("client",), name="client", host="here", pid=number
        )
        self._join(self.hub)

    def _join(self, hub: FaultyHub) -> None:
        self.hub = hub
        hub.join(self.peer, self._hear)
        self._say(self._hello)

    def come_back(self) -> None:
        """Go on with another coordinator, which is asked for what has not ended and is still
        wanted."""
        hub = self._world.hub
        self._join(hub)
        for request, told in self.told.items():
            if told.cancelled:
                told.void = True
            elif told.open and hub is self.hub and not hub.closed:
                told.again = told.again or told.asked
                self._ask(request, told, again=told.again)

    # -- what it asks ------------------------------------------------------------------------------

    def submit(self, wish: Wish) -> Told:
        request = len(self.told) + 1
        expected = None if self._expect is None else self._expect(wish)
        self.told[request] = told = Told(wish, expected, losses=self._world.losses)
        told.late = self.deaf
        self._ask(request, told)
        return told

    def _ask(self, request: int, told: Told, *, again: bool = False) -> None:
        told.asked = True
        wish = told.wish
        self._say(
            Submit(
                epoch=self._epoch,
                request=request,
                tokens=wish.prompt,
                sampling=Sampling(temperature=wish.temperature),
                max_tokens=wish.tokens,
                seed=1,
                tree=TreeSettings(
                    policy=wish.policy, insist=wish.policy != "goodput", gamma=6, depth=4, width=2
                ),
                speculate=wish.speculate,
                owner=wish.owner,
                stop=wish.stop,
                logprobs=wish.logprobs,
                scored=wish.scored,
                ticket=f"{self._epoch}/{request}" if self._tickets else "",
                again=again,
                told=told.heard,
            )
        )

    def cancel(self, which: int) -> bool:
        """Cancel one of the requests that run; return False if there is none."""
        running = [request for request, told in self.told.items() if told.open]
        if running:
            request = running[which % len(running)]
            told = self.told[request]
            told.cancelled = True
            if told.most is None:
                committed = self._world.committed(self.peer, request)
                # a request that waits to go on has what its client was told before
                told.most = committed if committed is None else max(committed, len(told.tokens))
            self._say(Cancel(epoch=self._epoch, request=request))
        return bool(running)

    def swap(self, newcomer: int, old: int | None) -> None:
        """Have a worker on standby take the place of another; both by their epochs."""
        self._changes += 1
        self._say(
            Swap(epoch=self._epoch, request=CHANGES + self._changes, newcomer=newcomer, old=old)
        )

    def dismiss(self, worker: int) -> None:
        """Let a worker go."""
        self._changes += 1
        self._say(
            Dismiss(epoch=self._epoch, request=CHANGES + self._changes, worker=worker, last=True)
        )

    def leave(self) -> None:
        """From now on nobody listens."""
        for told in self.told.values():
            told.void = True
        self.hub.leave(self.peer)

    def _say(self, message: Message) -> None:
        self.hub.take(self.peer, encode(message))

    def _hear(self, frames: list[bytes]) -> None:
        match reply := REPLY.decode(frames):
            case Emitted():
                told = self._running(reply.request)
                told.heard = told.heard.after(reply)
                told.tokens += reply.tokens
                told.text += reply.text
                told.logprobs += reply.logprobs
                told.heard_ns.append(self._world.time.now_ns)
                self._check(told)
            case PromptScored():
                told = self._running(reply.request)
                assert reply.start == 1 + len(told.scored), (
                    "log-probabilities of the prompt twice, or left out"
                )
                told.heard = told.heard.after(reply)
                told.scored += reply.logprobs
                self._check(told)
            case Finished():
                told = self._running(reply.request)
                told.end = reply
                invariants.a_cancel_is_heeded(told)
                if told.expected is not None:
                    invariants.the_end_is_what_was_told(told)
            case Progressed() | Swapped() | Dismissed():
                self._world.note(reply)
            case Failed():
                self._hear_failed(reply)
            case _:
                assert isinstance(reply, Welcome), reply

    def _hear_failed(self, reply: Failed) -> None:
        if reply.session is None:
            assert self._world.sabotages, reply.text
            self.refused = True
            return
        if reply.session > CHANGES:
            self._world.check_change_failed(reply)
            self._world.note(reply.text)
            return
        told = self._running(reply.session)
        told.end = reply
        self._world.check_failed(told, reply)

    def _running(self, request: int) -> Told:
        told = self.told[request]
        invariants.every_request_ends_exactly_once(told, request)
        return told

    def _check(self, told: Told) -> None:
        if told.expected is not None:
            invariants.nothing_told_differs(told)
