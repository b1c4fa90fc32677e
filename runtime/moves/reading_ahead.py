"""Prefill ahead of a move: before a session moves to another target, the new target prefills its
log in an internal session, while the old target continues to serve. The rows are kept, and the
session reuses them: it pauses only until the tokens committed meanwhile are prefilled."""

import os
from dataclasses import dataclass, replace

from dovetail.protocol.messages import AHEAD, Failed, Finished, Hello, Message
from dovetail.runtime.engine.acts import EngineState
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.fleet.peers import ClientPeer, Worker
from dovetail.runtime.moves.moving import Moving

MOST_LAG = 8
"""The most tokens for whose prefill a moving session may pause: about two passes."""
GAINS = 0.9
"""A log is prefilled again as long as the new tokens are at most this share of the last prefill.
It always is after the first one, in which a new worker may leave most CPU time to the streams."""


@dataclass(eq=False)
class Reading:
    """A log that is prefilled ahead."""

    running: RunningRequest  # the session whose log it is
    new: Worker  # the target that prefills it
    reader: RunningRequest | None = None
    heard: Finished | Failed | None = None  # the message with which the reader ended
    unread: int = 0  # tokens that the reader had to prefill

    def hear(self, message: Message) -> None:
        """Keep the message that ends the reader."""
        if isinstance(message, Finished | Failed):
            self.heard = message


class ReadingAhead:
    """Makes targets prefill logs ahead of moves."""

    def __init__(self, state: EngineState, moving: Moving) -> None:
        self._running, self._placement, self._moving = state.running, state.placement, moving
        self._acts, self._now_ns, self._reuse = state.acts, state.now_ns, state.settings.reuse
        self._epoch = state.epoch

    def able(self, running: RunningRequest, target: Worker) -> bool:
        """Return whether a target can prefill the log of a session ahead."""
        session = running.session
        tokens = session.length + 1 + session.request.most_levels
        return self._reuse and session.request.may_reuse and tokens <= target.limits.kept

    def begin(self, running: RunningRequest, target: Worker) -> Reading:
        """Make a target prefill the present log of a session."""
        reading, session = Reading(running, target), running.session
        log = replace(
            session.request,
            prompt=session.request.log(session.tokens, session.length),
            key=AHEAD,
            max_tokens=0,
            least_capacity=session.request.capacity,
            logprobs=None,
            constraint=None,
            record=False,
        )
        hello = Hello(epoch=self._epoch, roles=("client",), name="move", host="", pid=os.getpid())
        ours = ClientPeer(b"", hello, hear=reading.hear)
        reader = self._placement.read_log(ours, target, log, self._now_ns())
        reader.reads_for, reading.reader = running, reader
        reading.unread = reader.session.new_tokens
        base = reader.session.target_base
        try:
            self._moving.make_room(session.request, target, base)
        except BaseException:
            if base is not None:
                target.shelf.give_back(base)
            raise
        self._acts.start(reader)
        return reading

    def lags(self, reading: Reading) -> bool:
        """Return whether enough new tokens were committed to prefill them before the move."""
        assert reading.reader is not None
        came = reading.running.session.length - reading.reader.session.length
        gains = came <= GAINS * reading.unread or reading.reader.session.target_base is None
        return came > MOST_LAG and gains and self.able(reading.running, reading.new)

    def abandon(self, reading: Reading | None) -> None:
        """End a reader if it is still running."""
        reader = reading.reader if reading is not None else None
        if reader is not None and self._running.get(reader.session.number) is reader:
            self._acts.drop(reader)
