"""Replies to the client of a session: tokens and text, log-probabilities of the prompt, records of
rounds, and the final result."""

from dovetail.protocol.messages import Emitted, Finished, PromptScored, Recorded
from dovetail.runtime.engine.outgoing import Outgoing
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.engine.shared import Shared
from dovetail.runtime.session.actions import Action, Emit, Finish, Note, Score


class Replies:
    """Sends clients the actions of sessions."""

    def __init__(self, shared: Shared, post: Outgoing) -> None:
        self._epoch, self._post, self._failing = shared.epoch, post, shared.failing
        self._changes, self._observing = shared.changes, shared.observing
        self._tally, self._now_ns = shared.tally, shared.now_ns
        self._journal = shared.journal

    def tell(self, running: RunningRequest, action: Action, at_ns: int) -> None:
        """Send a session's client an action that happened at `at_ns`."""
        if isinstance(action, Emit):
            self._emit(running, action, at_ns)
        elif isinstance(action, Score):
            self._post.to_client(
                running.client,
                PromptScored(
                    epoch=self._epoch,
                    request=running.request,
                    start=action.start,
                    logprobs=action.logprobs,
                ),
            )
        elif isinstance(action, Note):
            self._post.to_client(
                running.client,
                Recorded(epoch=self._epoch, request=running.request, record=action.record),
            )
        elif isinstance(action, Finish):
            self._finish(running, action)

    def _emit(self, running: RunningRequest, emit: Emit, at_ns: int) -> None:
        if running.told_ns is not None and not running.trial:
            self._changes.paused(at_ns - running.told_ns)
        running.told_ns = at_ns
        if (left := running.delivery.left_of(emit)) is None:
            return
        emit, fingerprint = left, running.session.fingerprint
        new = fingerprint != running.delivery.fingerprint
        running.delivery.fingerprint = fingerprint
        self._post.to_client(
            running.client,
            Emitted.unchecked(
                epoch=self._epoch,
                type="emitted",
                request=running.request,
                tokens=emit.tokens,
                drafted=(True,) * emit.drafted + (False,) * (len(emit.tokens) - emit.drafted),
                text=emit.text,
                logprobs=emit.logprobs,
                fingerprint=fingerprint if new else "",
            ),
        )

    def _finish(self, running: RunningRequest, finish: Finish) -> None:
        now_ns = self._now_ns()
        running.over(now_ns)
        result = running.session.result(now_ns, finish.reason)
        controls = min(
            running.controller.controls, result.plain_rounds
        )  # the last one may have been cut short
        result = result.model_copy(
            update={
                "predicted_tokens_per_s": running.controller.predicted_tokens_per_s,
                "control_rounds": controls,
                "draft_failure": running.draft_failure,
            }
        )
        if not running.trial:
            self._failing.drafted(running, result.rounds - result.plain_rounds)
            self._tally.end(finish.reason, result)
        spans = self._observing.traced(running.session.number)
        finished = Finished(
            epoch=self._epoch,
            request=running.request,
            result=result,
            margins=tuple(running.session.margins),
            spans=spans,
        )
        if self._journal is not None and running.delivery.ticket:
            self._journal.ended(running.delivery.ticket, finished)
        self._post.to_client(running.client, finished)
        running.delivery.finished = True
