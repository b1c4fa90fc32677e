"""A client of a coordinator: blocking, for commands and tests. Handles the protocol's requests and
replies, not processes or terminals."""

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from dovetail.protocol.codec import REPLY, encode
from dovetail.protocol.errors import LinkClosed, RequestError
from dovetail.protocol.links import Link
from dovetail.protocol.messages import (
    VERSION,
    Cancel,
    Constraint,
    Describe,
    Described,
    Dismiss,
    Dismissed,
    Emitted,
    Failed,
    Finished,
    Forget,
    Hello,
    LoadingState,
    Look,
    Message,
    Progressed,
    PromptScored,
    Recorded,
    Reply,
    Reported,
    Seen,
    Status,
    Stop,
    Submit,
    Swap,
    Swapped,
    Welcome,
)
from dovetail.protocol.settings import ANSWER_S, Sampling, TreeSettings

R = TypeVar("R", Welcome, Reported, Described, Seen)


class Client:
    """One registered client; `close` it, or use it as a context."""

    def __init__(self, link: Link, answer_s: float = ANSWER_S) -> None:
        """Register. Raises `LinkClosed` if the coordinator does not answer within `answer_s`."""
        self._link, self._answer_s = link, answer_s
        self._loading: Sequence[LoadingState] = ()
        """The workers that were loading at the last status."""
        self.epoch = secrets.randbits(62)
        self._requests = 0
        self.coordinator_epoch = -1
        self._send(
            Hello(
                epoch=self.epoch,
                roles=("client",),
                name=f"client-{os.getpid()}",
                host=socket.gethostname()[:512],
                pid=os.getpid(),
                version=VERSION,
            )
        )
        reply = self._wait_for(Welcome)
        self.coordinator_epoch = reply.epoch

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._link.close()

    def submit(
        self,
        *,
        tokens: Sequence[int] | None = None,
        text: str | None = None,
        turns: Sequence[str] | None = None,
        sampling: Sampling | None = None,
        max_tokens: int = 512,
        stop: Sequence[str] = (),
        seed: int | None = None,
        sample: int = 0,
        owner: str = "",
        salt: str = "",
        end: Sequence[int] | None = None,
        constraint: Constraint | None = None,
        vocabulary: str = "",
        logprobs: int | None = None,
        scored: bool = False,
        tree: TreeSettings | None = None,
        speculate: bool = True,
        trace: bool = False,
        record: bool = False,
        ahead: bool | None = None,
    ) -> int:
        """Request a completion of token ids, text or chat turns. Return the request's number, which
        its replies carry.

        `sample`: which of several replies to the same prompt and seed; `owner`: the owner of the
        request, `salt`: cached rows are shared with the owner's requests of the same salt only;
        `end`: ids that end the reply, None: the target's; `constraint`: the grammar of the reply;
        `vocabulary`: the digest of the vocabulary of `tokens`, if the target must have the same.
        `logprobs`: the number of alternatives in the log-probabilities of each token, `scored`:
        also those of the prompt, before the reply. `record`: every round is sent as a Recorded;
        `ahead`: whether drafting continues while the target verifies, None: if that pays off."""
        self._requests += 1
        self._send(
            Submit(
                epoch=self.epoch,
                request=self._requests,
                tokens=None if tokens is None else tuple(tokens),
                text=text,
                turns=None if turns is None else tuple(turns),
                sampling=sampling or Sampling(),
                max_tokens=max_tokens,
                stop=tuple(stop),
                seed=seed,
                sample=sample,
                owner=owner,
                salt=salt,
                end=None if end is None else tuple(end),
                constraint=constraint,
                vocabulary=vocabulary,
                logprobs=logprobs,
                scored=scored,
                tree=tree or TreeSettings(),
                speculate=speculate,
                trace=trace,
                record=record,
                ahead=ahead,
            )
        )
        return self._requests

    def forget(self, owner: str = "") -> int:
        """Request that an owner's earlier texts be forgotten, which is answered by Forgotten.
        Return the request's number."""
        self._requests += 1
        self._send(Forget(epoch=self.epoch, request=self._requests, owner=owner))
        return self._requests

    def cancel(self, request: int) -> None:
        self._send(Cancel(epoch=self.epoch, request=request))

    def stop(self) -> None:
        """Request that the coordinator finish running requests, dismiss its workers and end."""
        self._send(Stop(epoch=self.epoch))

    def status(self) -> Reported:
        """Return the coordinator's state; not while a completion streams."""
        self.inquire()
        state = self._wait_for(Reported)
        self._loading = state.loading
        return state

    def inquire(self) -> None:
        """Request the coordinator's state, which arrives as a Reported among the other replies."""
        self._send(Status(epoch=self.epoch))

    def describe(self) -> Described:
        """Return the target of requests; `RequestError` if there is none. Not while streaming."""
        self._send(Describe(epoch=self.epoch))
        return self._wait_for(Described)

    def look(self, after: int = 0, *, spans: bool = False) -> Seen:
        """Return the events since number `after`, the `next` of the last answer; `spans`: include
        spans, fine ones from now on. Like `status`, not while a completion streams."""
        self._requests += 1
        self._send(Look(epoch=self.epoch, request=self._requests, after=after, spans=spans))
        return self._wait_for(Seen)

    def swap(self, newcomer: int, old: int | None) -> int:
        """Request that a worker on standby replace another, or be added; both are named by their
        epochs. Return the request's number."""
        self._requests += 1
        self._send(Swap(epoch=self.epoch, request=self._requests, newcomer=newcomer, old=old))
        return self._requests

    def dismiss(self, worker: int, *, last: bool = False) -> int:
        """Request the dismissal of a worker, by epoch; `last`: even the last target."""
        self._requests += 1
        self._send(Dismiss(epoch=self.epoch, request=self._requests, worker=worker, last=last))
        return self._requests

    def changed(
        self, request: int, say: Callable[[str], None] = lambda _: None
    ) -> Swapped | Dismissed:
        """Wait for the end of a change of workers; raise `RequestError` if it failed."""
        while True:
            reply = self.receive(None)
            if isinstance(reply, Progressed) and reply.request == request:
                say(reply.text)
            elif isinstance(reply, Swapped | Dismissed) and reply.request == request:
                return reply
            elif isinstance(reply, Failed) and reply.session in (request, None):
                raise RequestError(reply.code, reply.text)
            elif reply is None:
                raise LinkClosed("the coordinator does not report the change of workers")

    def replies(self, timeout_s: float | None = None) -> Iterator[Reply]:
        """Yield replies as they arrive, until none arrives within the timeout."""
        while (reply := self.receive(timeout_s)) is not None:
            yield reply

    def receive(self, timeout_s: float | None = None) -> Reply | None:
        """Return the next reply; None if none arrives in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            frames = self._link.receive(
                None if deadline is None else max(0.0, deadline - time.monotonic())
            )
            reply = None if frames is None else REPLY.decode(frames)
            if not isinstance(reply, Welcome) or reply.epoch != self.coordinator_epoch:
                return reply

    def complete(self, request: int) -> Finished:
        """Wait until a request is done; raise `RequestError` if it failed."""
        while True:
            reply = self.receive(None)
            if isinstance(reply, Finished) and reply.request == request:
                return reply
            if isinstance(reply, Failed) and reply.session in (request, None):
                raise RequestError(reply.code, reply.text)
            if not isinstance(reply, Emitted | PromptScored | Recorded | Finished | Failed):
                raise LinkClosed(
                    f"the coordinator answered a completion with {type(reply).__name__}"
                )

    def _send(self, message: Message) -> None:
        self._link.send(encode(message))

    def _wait_for(self, kind: type[R]) -> R:
        deadline = time.monotonic() + self._answer_s
        while (left := deadline - time.monotonic()) > 0:
            reply = self.receive(left)
            if isinstance(reply, kind):
                return reply
            if isinstance(reply, Failed):
                raise RequestError(reply.code, reply.text)
        raise LinkClosed(no_answer(self._answer_s, self._loading))


def no_answer(answer_s: float, loading: Sequence[LoadingState]) -> str:
    """Report that the coordinator did not answer in time, and which workers were loading."""
    busy = "".join(f"; {state.words}" for state in loading)
    return (
        f"the coordinator did not answer within {answer_s:g} s{busy}; to wait longer set "
        "--coordinator.answer_s"
    )
