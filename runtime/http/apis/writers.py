"""What the writers of all APIs share. A writer turns the parts of replies into the bytes of one
API (`apis/`)."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

from dovetail.protocol.messages import PromptRead, Result
from dovetail.runtime.http.asked import RequestTarget
from dovetail.runtime.http.errors import ApiError
from dovetail.runtime.http.events import Blocks, Change, Event
from dovetail.runtime.http.orders import Order
from dovetail.runtime.http.replies import Part, Reply, ShownToken
from dovetail.runtime.http.resuming import StreamPlace

EVENT_STREAM = "text/event-stream; charset=utf-8"

OpenWriter = Callable[[Order, RequestTarget, str, Sequence[StreamPlace | None]], "Writer"]
"""Returns the writer of an order's response; its last argument: how much of each reply a returning
client has."""


def compact(value: Any) -> str:
    """Return a value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def waiting(read: PromptRead | None) -> str:
    """Return what a request without tokens waits for."""
    return "no token yet" if read is None else f"reading {read.done} of {read.total} tokens"


def prompt_progress(read: PromptRead, since_s: float) -> dict[str, Any]:
    """Return the progress of a prompt in llama-server's form."""
    return {
        "prompt_progress": {
            "total": read.total,
            "cache": read.cached,
            "processed": read.done,
            "time_ms": round(1e3 * since_s),
        }
    }


def sse(value: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return f"data: {compact(value)}\n\n".encode()


def typed(value: dict[str, Any]) -> str:
    """Return one server-sent event that is named after the `type` of its data."""
    return f"event: {value['type']}\ndata: {compact(value)}\n\n"


class Writer(ABC):
    """Writes one response, streamed or whole, in the form of an API."""

    content_type: ClassVar[str] = EVENT_STREAM  # of a stream

    def __init__(
        self,
        order: Order,
        target: RequestTarget,
        model: str,
        places: Sequence[StreamPlace | None] = (),
    ) -> None:
        """`places`: how much of each reply a returning client has."""
        self.replies = [Reply(order, index, target) for index in range(len(order.submits))]
        self._order, self._text, self._context = order, target.text, target.context
        self._model, self._fingerprint = model, target.described.fingerprint
        self._parts: dict[int, list[Part]] = {}

    def opening(self) -> str:
        """Return the beginning of a stream."""
        return ""

    @abstractmethod
    def lines(self, reply: Reply, part: Part | None) -> str:
        """Return the new part of a reply for a stream."""

    def comment(self, read: PromptRead | None) -> bytes:
        """Return a line of a stream that clients ignore, for the time while no token arrives.
        `read`: how far the prompt has been read, if that is known and no token has come."""
        return f": {waiting(read)}\n\n".encode()

    def progress(self, read: PromptRead, index: int, since_s: float) -> str:
        """Return the progress of a reply's prompt for a stream, if it is requested; `since_s`:
        seconds since the request came."""
        return ""

    @abstractmethod
    def last_lines(self) -> bytes:
        """Return the end of a stream, after the last reply."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Return the end of a stream that failed."""

    def keep(self, reply: Reply, part: Part | None) -> None:
        """Store the new part of a reply."""
        if part is not None:
            self._parts.setdefault(reply.index, []).append(part)

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the response in one piece."""

    def _kept(self, index: int) -> tuple[list[Event], list[ShownToken]]:
        """Return the stored events and tokens of a reply."""
        parts = self._parts.get(index, ())
        events = [event for part in parts for event in part.events]
        return events, [shown for part in parts for shown in part.tokens]

    @property
    def _gamma(self) -> int:
        return self._order.submits[0].tree.most_nodes

    def _metrics(self, index: int, result: Result) -> dict[str, Any]:
        """Return the metrics of a reply, with its draft's failure if requested."""
        figures = metrics_of(result, self._gamma, failure=self._order.wishes.drafted)
        return {**figures, **self._lowered(index)}

    def _lowered(self, index: int) -> dict[str, int]:
        """Return the value to which max_tokens was lowered, if it was."""
        room = self._context - len(self._order.submits[index].tokens or ())
        return {"max_tokens": room} if room < self._order.asked else {}

    def _prompts(self) -> tuple[int, int]:
        """Return the tokens of all prompts, and how many of them came from the cache; a prompt
        counts once for all its replies."""
        first = [reply for reply in self.replies if reply.index % self._order.copies == 0]
        tokens = sum(len(self._order.submits[reply.index].tokens or ()) for reply in first)
        results = [reply.result for reply in first if reply.result is not None]
        return tokens, sum(result.reused_tokens for result in results)


class BlockWriter(Writer):
    """Writes one reply as a sequence of blocks."""

    @cached_property
    def _blocks(self) -> Blocks:
        """The blocks so far."""
        return Blocks()

    @property
    def _result(self) -> Result:
        """The result of the reply, once it has ended."""
        result = self.replies[0].result
        assert result is not None
        return result

    @property
    def _calls(self) -> bool:
        """Whether the reply has a tool call."""
        return any(block.call is not None for block in self._blocks.all)

    def lines(self, reply: Reply, part: Part | None) -> str:
        """Return the changes of blocks, and the end of the reply."""
        if part is None:
            return ""
        lines = "".join(map(self._change, self._blocks.take(part.events)))
        if part.ended is not None:
            lines += "".join(map(self._change, self._blocks.end())) + self._ended()
        return lines

    def last_lines(self) -> bytes:
        """Return nothing: a reply's end is the stream's."""
        return b""

    def keep(self, reply: Reply, part: Part | None) -> None:
        """Store the new part of a reply."""
        if part is not None:
            for _ in self._blocks.take(part.events):
                pass

    @abstractmethod
    def _change(self, change: Change) -> str:
        """Return the lines of a change."""

    @abstractmethod
    def _ended(self) -> str:
        """Return the lines after the last block."""


def metrics_of(result: Result, gamma: int, *, failure: bool = False) -> dict[str, Any]:
    """Return the cost of a reply and the benefit of its draft, under our names and vLLM's. `gamma`:
    the most nodes of a tree; `failure`: include the draft's first failure."""
    drafts = result.rounds - result.plain_rounds
    reached = [round(share * result.rounds) for share in result.accepted_per_position]
    histogram = [
        before - after for before, after in zip([drafts, *reached], [*reached, 0], strict=True)
    ]
    speculation = {
        "mean_acceptance_length": 1 + result.accepted_tokens / drafts if drafts else None,
        "draft_acceptance_rate": result.acceptance_rate,
        "acceptance_histogram": histogram,
        "num_spec_steps": drafts,
        "num_accepted_draft_tokens": result.accepted_tokens,
        "num_draft_tokens": result.drafted_tokens,
        "num_spec_tokens": gamma,
    }
    left_out = {"text", "token_ids"} | (set() if failure else {"draft_failure"})
    return {**result.model_dump(mode="json", exclude=left_out), "speculative_decoding": speculation}
