"""OpenAI's chunks and completions, byte for byte where clients depend on it. Streamed lines are
assembled by hand: a line takes a few microseconds, and the HTTP process does nothing more often."""

import json
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from dovetail.protocol.messages import PromptRead, Result, TokenLogprobs
from dovetail.runtime.http.apis.writers import Writer, compact, prompt_progress, sse
from dovetail.runtime.http.asked import RequestTarget
from dovetail.runtime.http.errors import ApiError
from dovetail.runtime.http.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    Event,
    Reasoning,
    Text,
    all_text,
    blocks_of,
    size,
    without,
)
from dovetail.runtime.http.orders import Order
from dovetail.runtime.http.replies import Part, Reply, ShownToken
from dovetail.runtime.http.resuming import StreamPlace, beyond, event_id
from dovetail.runtime.text.tokenizer import TextCodec

DONE = b"data: [DONE]\n\n"
EMPTY, NO_TEXT = '""', '{"content":""}'
LEAST_LOGPROB = -9999.0  # OpenAI's number for a logarithm that JSON cannot represent


def open_writer(
    order: Order, target: RequestTarget, model: str, places: Sequence[StreamPlace | None] = ()
) -> "Writer":
    """Return the writer of an order's response in OpenAI's form. `places`: the parts that a
    returning client has."""
    return (ChatWriter if order.kind == "chat" else TextWriter)(order, target, model, places)


class CompletionWriter(Writer):
    """Writes OpenAI's completions."""

    chunk_object: ClassVar[str]
    whole_object: ClassVar[str]

    def __init__(
        self,
        order: Order,
        target: RequestTarget,
        model: str,
        places: Sequence[StreamPlace | None] = (),
    ) -> None:
        super().__init__(order, target, model, places)
        self._head = {
            "id": order.name,
            "object": self.chunk_object if order.stream else self.whole_object,
            "created": order.created,
            "model": model,
            "system_fingerprint": self._fingerprint,
        }
        self._begin = f'data: {compact(self._head)[:-1]},"choices":['
        self._end = '],"usage":null}\n\n' if order.usage_chunk else "]}\n\n"
        known = dict(enumerate(places[: len(order.submits)]))
        self._streamed = [
            StreamPlace() if known.get(reply.index) else None for reply in self.replies
        ]
        """The streamed part of each reply; None before its first chunk."""
        self._has = {index: place for index, place in known.items() if place is not None}
        """The parts that the client already has."""
        self._calling: set[int] = set()
        """The replies with a tool call."""

    # -- streamed ----------------------------------------------------------------------------------

    def lines(self, reply: Reply, part: Part | None) -> str:
        """Return the chunks of a reply's new part; the first has the seed."""
        if part is None:
            return ""
        self._note_calls(reply.index, part.events)
        if (part := self._unsent(reply.index, part)) is None:
            return ""
        parts = _single(part) if self._order.wishes.event_ids else [part]
        return "".join(self._chunks(reply, one) for one in parts)

    def _chunks(self, reply: Reply, part: Part) -> str:
        """Return the chunks of a part."""
        chunks, begin = "", None
        if self._streamed[reply.index] is None:
            begin = {"seed": self._order.submits[reply.index].seed, **self._lowered(reply.index)}
            chunks = self._first(reply.index, begin)
            if chunks and self._order.wishes.event_ids:
                self._streamed[reply.index] = StreamPlace()
                chunks = self._with_id(chunks)
        self._count(reply.index, part)
        tokens = part.tokens
        deltas = self._deltas(part.events) or ([""] if part.ended is None else [])
        for delta in deltas:
            chunks += self._chunk(
                self._choice(reply.index, delta, tokens, None), metrics=None if chunks else begin
            )
            tokens = ()
        if part.ended is not None:
            reason = self._reason(reply.index, part.ended)
            chunks += self._chunk(
                self._choice(reply.index, None, tokens, reason),
                metrics=self._metrics(reply.index, part.ended),
            )
        return self._with_id(chunks) if self._order.wishes.event_ids else chunks

    def _with_id(self, chunks: str) -> str:
        """Return chunks, the last with the id of an event after which this much was streamed."""
        return f"{chunks[:-1]}id: {event_id(self._order.name, self._streamed)}\n\n"

    def _note_calls(self, index: int, events: Iterable[Event]) -> None:
        if any(isinstance(event, CallBegun) for event in events):
            self._calling.add(index)

    def _reason(self, index: int, result: Result) -> str:
        """Return why a reply ended, in OpenAI's words."""
        if result.finish_reason != "stop" or index not in self._calling:
            return result.finish_reason
        return "function_call" if self._legacy else "tool_calls"

    @property
    def _legacy(self) -> bool:
        """Whether a call is the reply's `function_call`, as before there were tools."""
        return self._order.reading is not None and self._order.reading.use.legacy

    def _unsent(self, index: int, part: Part) -> Part | None:
        """Return the part that a returning client lacks, or None."""
        if (has := self._has.get(index)) is None:
            return part
        before = self._streamed[index] or StreamPlace()
        whole = _behind(before, part)
        more = has.characters > whole.characters or has.tokens > whole.tokens
        if whole.ended and (more or (has.ended and has != whole)):
            raise beyond(has, whole)
        characters = max(0, has.characters - before.characters)
        tokens = max(0, has.tokens - before.tokens)
        left = Part(
            without(part.events, characters),
            part.tokens[tokens:],
            None if has.ended else part.ended,
        )
        if left.events or left.tokens or left.ended is not None:
            skipped = min(characters, sum(map(size, part.events))), min(tokens, len(part.tokens))
            self._streamed[index] = StreamPlace(
                before.characters + skipped[0], before.tokens + skipped[1]
            )
            return left
        self._count(index, part)
        return None

    def _count(self, index: int, part: Part) -> None:
        """Note that a part has been streamed."""
        self._streamed[index] = _behind(self._streamed[index] or StreamPlace(), part)

    def comment(self, read: PromptRead | None) -> bytes:
        """Return a stream line that clients ignore. Some clients split a stream at empty lines, so
        one follows, except with event ids, where openai-python would read it as an event."""
        line = super().comment(read)
        return line[:-1] if self._order.wishes.event_ids else line

    def progress(self, read: PromptRead, index: int, since_s: float) -> str:
        """Return a chunk without text, if progress is requested."""
        if not self._order.progress or self._order.wishes.event_ids:
            return ""
        progress = compact(prompt_progress(read, since_s))[1:-1]
        return f"{self._begin}{self._choice(index, '', (), None)}],{progress}}}\n\n"

    def last_lines(self) -> bytes:
        """Return the lines after the last reply."""
        usage = (
            sse({**self._head, "choices": [], "usage": self.usage()})
            if self._order.usage_chunk
            else b""
        )
        return usage + DONE

    def failed(self, error: ApiError) -> bytes:
        """Return the last event of a stream that failed; no [DONE] follows."""
        return sse(error.body)

    def _chunk(self, choice: str, metrics: dict[str, Any] | None = None) -> str:
        end = self._end
        if self._order.usage_always:
            end = f'],"usage":{json.dumps(self.usage())}}}\n\n'
        if metrics is not None:
            end = f'],"metrics":{json.dumps(metrics)}{end[1:]}'
        return self._begin + choice + end

    def _extra(self, shown: Sequence[ShownToken]) -> str:
        """The field `dovetail` of a choice, if requested."""
        if not self._order.wishes.drafted:
            return ""
        own = {
            "tokens": [s.token for s in shown],
            "drafted": [s.drafted for s in shown],
            "texts": [s.text for s in shown],
        }
        return f',"dovetail":{json.dumps(own)}'

    def _first(self, index: int, metrics: dict[str, Any]) -> str:
        """Return the opening chunk of a reply, with these metrics, if its kind has one."""
        return ""

    @abstractmethod
    def _deltas(self, events: Iterable[Event]) -> list[str]:
        """Return the events as contents of chunks, in JSON."""

    def _choice(
        self, index: int, delta: str | None, tokens: Sequence[ShownToken], reason: str | None
    ) -> str:
        """Return a choice of a chunk. `delta`: "" for no text, None at the end."""
        scores = self._scores(tokens) if tokens else None
        logprobs = "null" if scores is None else json.dumps(scores)
        return f'{{"index":{index},{self._content(delta)},"logprobs":{logprobs},"finish_reason":{json.dumps(reason)}{self._extra(tokens)}}}'  # noqa: E501

    @abstractmethod
    def _content(self, delta: str | None) -> str:
        """Return the field of a choice that has its text."""

    def _scores(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        """Return the log-probabilities of a choice, if requested."""
        return self._logprobs(tokens) if self._order.logprobs is not None else None

    @abstractmethod
    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        """Return the log-probabilities of tokens."""

    # -- whole -------------------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        """Return the response in one piece."""
        choices, metrics = [], []
        for reply in self.replies:
            assert reply.result is not None
            events, tokens = self._kept(reply.index)
            self._note_calls(reply.index, events)
            reason = self._reason(reply.index, reply.result)
            choices.append(self._whole_choice(reply.index, events, tokens, reason))
            metrics.append(self._metrics(reply.index, reply.result))
            head = {**self._head, "system_fingerprint": reply.result.fingerprint}
        if len(choices) == 1:
            return {**head, "choices": choices, "usage": self.usage(), "metrics": metrics[0]}
        return {
            **head,
            "choices": [
                {**choice, "metrics": own} for choice, own in zip(choices, metrics, strict=True)
            ],
            "usage": self.usage(),
        }

    @abstractmethod
    def _whole_choice(
        self, index: int, events: Sequence[Event], tokens: Sequence[ShownToken], reason: str
    ) -> dict[str, Any]:
        """Return a choice of a whole response."""

    # -- both --------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """Return the tokens so far."""
        prompts, cached = self._prompts()
        results = [reply.result for reply in self.replies if reply.result is not None]
        completion = sum(reply.completion_tokens for reply in self.replies)
        accepted = sum(result.accepted_tokens for result in results)
        reasoning = sum(reply.reasoning_tokens for reply in self.replies)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": completion,
            "total_tokens": prompts + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(result.drafted_tokens for result in results)
                - accepted,
                **({"reasoning_tokens": reasoning} if reasoning else {}),
            },
        }


def _single(part: Part) -> list[Part]:
    """Return a part as parts of one chunk each, so that each chunk has an id of its own."""
    shown = [one for one in part.events if not isinstance(one, CallEnded)]
    if len(shown) + (part.ended is not None) < 2:
        return [part]
    parts: list[Part] = []
    for event in part.events:
        if isinstance(event, CallEnded) and parts:
            parts[-1] = replace(parts[-1], events=(*parts[-1].events, event))
        else:
            parts.append(Part((event,)))
    parts[0] = replace(parts[0], tokens=part.tokens)
    return [*parts, Part(ended=part.ended)] if part.ended is not None else parts


def _behind(place: StreamPlace, part: Part) -> StreamPlace:
    """Return the streamed part of a reply, once another part has been streamed."""
    characters = place.characters + sum(map(size, part.events))
    return StreamPlace(characters, place.tokens + len(part.tokens), part.ended is not None)


class ChatWriter(CompletionWriter):
    """Writes the replies of /v1/chat/completions."""

    chunk_object, whole_object = "chat.completion.chunk", "chat.completion"

    def _first(self, index: int, metrics: dict[str, Any]) -> str:
        choice = f'{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}'  # noqa: E501
        return self._chunk(choice, metrics)

    def _deltas(self, events: Iterable[Event]) -> list[str]:
        deltas = []
        for event in events:
            match event:
                case Text(text):
                    deltas.append(f'{{"content":{json.dumps(text)}}}')
                case Reasoning(text):
                    deltas.append(compact(_reasoning(text)))
                case CallBegun() if self._legacy:
                    deltas.append(compact({"function_call": _call(event, "")["function"]}))
                case CallArguments(_, text) if self._legacy:
                    deltas.append(compact({"function_call": {"arguments": text}}))
                case CallBegun():
                    begun = {"index": event.index, **_call(event, "")}
                    deltas.append(compact({"tool_calls": [begun]}))
                case CallArguments(call, text):
                    more = {"index": call, "function": {"arguments": text}}
                    deltas.append(compact({"tool_calls": [more]}))
        return deltas

    def _content(self, delta: str | None) -> str:
        return f'"delta":{"{}" if delta is None else delta or NO_TEXT}'

    def _whole_choice(
        self, index: int, events: Sequence[Event], tokens: Sequence[ShownToken], reason: str
    ) -> dict[str, Any]:
        scores = self._scores(tokens)
        logprobs = None if scores is None else {**scores, "refusal": None}
        blocks = blocks_of(events)
        text, reasoning = all_text(blocks, "text"), all_text(blocks, "reasoning")
        calls = [_call(block.call, block.text) for block in blocks if block.call is not None]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text or (None if calls else ""),
            "refusal": None,
        }
        if reasoning:
            message |= _reasoning(reasoning)
        if calls and self._legacy:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = calls
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        scored = []
        for shown in tokens:
            scores = shown.logprobs or TokenLogprobs(logprob=0.0)
            top = [
                self._scored(token, logprob)
                for token, logprob in scores.top[: self._order.logprobs]
            ]
            scored.append({**self._scored(shown.token, scores.logprob), "top_logprobs": top})
        return {"content": scored}

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": spelling(self._text, token),
            "logprob": finite(logprob),
            "bytes": list(self._text.piece(token)),
        }


def _reasoning(text: str) -> dict[str, str]:
    """Return reasoning under both of its names, DeepSeek's and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: CallBegun, arguments: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


class TextWriter(CompletionWriter):
    """Writes the replies of /v1/completions."""

    chunk_object, whole_object = "text_completion", "text_completion"

    def _deltas(self, events: Iterable[Event]) -> list[str]:
        return [json.dumps(event.text) for event in events if isinstance(event, Text)]

    def _content(self, delta: str | None) -> str:
        return f'"text":{delta or EMPTY}'

    def _whole_choice(
        self, index: int, events: Sequence[Event], tokens: Sequence[ShownToken], reason: str
    ) -> dict[str, Any]:
        text = "".join(event.text for event in events if isinstance(event, Text))
        scores = self._scores(tokens)
        return {"index": index, "text": text, "logprobs": scores, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        """Return log-probabilities, adding the token to the likeliest; a prompt's first token has
        none."""
        return {
            "tokens": [self._spelling(shown) for shown in tokens],
            "token_logprobs": [
                finite(shown.logprobs.logprob) if shown.logprobs is not None else None
                for shown in tokens
            ],
            "top_logprobs": [
                self._top(shown.token, shown.logprobs) if shown.logprobs is not None else None
                for shown in tokens
            ],
            "text_offset": [shown.offset for shown in tokens],
        }

    def _spelling(self, shown: ShownToken) -> str:
        """Spell a token; the first one without its space if the text does not begin with one."""
        spelt = spelling(self._text, shown.token)
        return spelt[1:] if not shown.offset and spelt == f" {shown.text}" else spelt

    def _top(self, token: int, scores: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for other, logprob in (*scores.top[: self._order.logprobs], (token, scores.logprob)):
            top.setdefault(spelling(self._text, other), finite(logprob))
        return top


def spelling(text: TextCodec, token: int) -> str:
    """Return a token as text; as its bytes, in OpenAI's notation, if it is not valid text."""
    piece = text.piece(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
