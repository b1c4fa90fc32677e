"""Replies to the client of a session: tokens and text, log-probabilities of the prompt, records
of rounds, and how it ended."""

from dovetail.protocol.messages import Emitted, Finished, PromptScored, Recorded
from dovetail.runtime.engine.outgoing import Outgoing
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.engine.shared import Shared
from dovetail.runtime.session.actions import Action, Emit, Finish, Note, Score


class Replies:
    """Tells clients what sessions decided."""

    def __init__(
        self,
        shared: Shared,
        post: Outgoing,
    ) -> None:
        self._epoch, self._post, self._failing = shared.epoch, post, shared.failing
        self._changes, self._observing = shared.changes, shared.observing
        self._tally, self._now_ns = shared.tally, shared.now_ns

    def tell(self, live: RunningRequest, action: Action, at_ns: int) -> None:
        """Tell a session's client of an action of the time `at_ns` that it is to hear of."""
        if isinstance(action, Emit):
            self._emit(live, action, at_ns)
        elif isinstance(action, Score):
            self._post.to_client(
                live.client,
                PromptScored(
                    epoch=self._epoch,
                    request=live.request,
                    start=action.start,
                    logprobs=action.logprobs,
                ),
            )
        elif isinstance(action, Note):
            self._post.to_client(
                live.client,
                Recorded(epoch=self._epoch, request=live.request, record=action.record),
            )
        elif isinstance(action, Finish):
            self._finish(live, action)

    def _emit(self, live: RunningRequest, emit: Emit, at_ns: int) -> None:
        if live.told_ns is not None and not live.trial:
            self._changes.paused(at_ns - live.told_ns)
        live.told_ns = at_ns
        drafted = tuple(place < emit.drafted for place in range(len(emit.tokens)))
        self._post.to_client(
            live.client,
            Emitted(
                epoch=self._epoch,
                request=live.request,
                tokens=emit.tokens,
                drafted=drafted,
                text=emit.text,
                logprobs=emit.logprobs,
            ),
        )

    def _finish(self, live: RunningRequest, finish: Finish) -> None:
        now_ns = self._now_ns()
        live.over(now_ns)
        result = live.session.result(now_ns, finish.reason)
        controls = min(
            live.controller.controls, result.plain_rounds
        )  # the last one may have been cut short
        result = result.model_copy(
            update={
                "predicted_tokens_per_s": live.controller.predicted_tokens_per_s,
                "control_rounds": controls,
                "draft_failure": live.draft_failure,
            }
        )
        if not live.trial:
            self._failing.drafted(live, result.rounds - result.plain_rounds)
            self._tally.end(finish.reason, result)
        spans = self._observing.traced(live.session.number)
        self._post.to_client(
            live.client,
            Finished(
                epoch=self._epoch,
                request=live.request,
                result=result,
                margins=tuple(live.session.margins),
                spans=spans,
            ),
        )
