"""Replies to HTTP clients: OpenAI's chunks and completions, byte for byte where clients depend on
it. Streamed lines are assembled by hand: a line takes a few microseconds, and the HTTP process does
nothing more often."""

import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.protocol.messages import Emitted, Failed, PromptScored, Result, TokenLogprobs
from dovetail.runtime.http.asked import RequestTarget, Told
from dovetail.runtime.http.decoding import ended_early
from dovetail.runtime.http.errors import ApiError, of_failure
from dovetail.runtime.http.orders import Order
from dovetail.runtime.http.resuming import StreamPlace, beyond, event_id
from dovetail.runtime.text.tokenizer import Detokenizer, TextCodec


@dataclass(frozen=True)
class ShownToken:
    """A token that was sent: offset in the text, whether drafted, log-probability."""

    token: int
    text: str
    offset: int
    drafted: bool = False
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Part:
    """The new part of a reply; `ended`: it is the last."""

    text: str = ""
    tokens: Sequence[ShownToken] = ()
    ended: Result | None = None


class Tokens:
    """Holds tokens back until their text is shown, since a stop string may cut the text."""

    def __init__(self, detokenizer: Detokenizer, offset: int = 0) -> None:
        self._detokenizer = detokenizer
        self._offset = self._length = offset
        self._held: deque[tuple[ShownToken, int]] = deque()
        """Each with the end of its text."""
        self._open: list[ShownToken] = []
        """The last tokens, which have no text yet: it may depend on the next ones."""

    def push(
        self,
        tokens: Sequence[int],
        drafted: Sequence[bool],
        logprobs: Sequence[TokenLogprobs | None],
    ) -> None:
        for token, proposed, scores in zip(
            tokens, drafted, logprobs or (None,) * len(tokens), strict=True
        ):
            text = self._detokenizer.push(token)
            self._open.append(ShownToken(token, text, self._length, proposed, scores))
            self._length += len(text)
            if text:
                self._held.extend((shown, self._length) for shown in self._open)
                self._open = []

    def shown(self, length: int) -> list[ShownToken]:
        """Return the tokens completely within the first `length` characters of the reply."""
        shown = []
        while self._held and self._held[0][1] <= self._offset + length:
            shown.append(self._held.popleft()[0])
        return shown

    def rest(self, length: int, *, cut: bool) -> list[ShownToken]:
        """Return the last tokens of a reply; `cut`: a stop string cut the rest off."""
        held, self._held, self._open = (
            [*(shown for shown, _ in self._held), *self._open],
            deque(),
            [],
        )
        if not cut:
            last = self._detokenizer.flush()
            return [*held[:-1], replace(held[-1], text=held[-1].text + last)] if held else []
        end = self._offset + length
        return [
            replace(shown, text=shown.text[: end - shown.offset])
            for shown in held
            if shown.offset < end
        ]


class Reply:
    """One reply of an order."""

    def __init__(self, order: Order, index: int, target: RequestTarget) -> None:
        self.index = index
        self.result: Result | None = None
        self.completion_tokens = 0
        self._order, self._target = order, target
        self._submit = order.submits[index]
        self.prompt_tokens = len(self._submit.tokens or ())
        self._ends = (
            self._submit.end if self._submit.end is not None else target.described.vocabulary.end
        )
        self._length = 0  # shown characters of the text, without the prompt
        self._prompt = order.prompt(index)
        self._scores: list[TokenLogprobs | None] = [None]
        """Log-probabilities of the prompt, whose first token follows nothing."""
        self._echoes = order.echoed
        wanted = order.logprobs is not None or order.wishes.drafted
        reads = target.text.detokenizer(self._submit.tokens or ()) if wanted else None
        self._tokens = Tokens(reads, len(self._prompt)) if reads is not None else None

    def hear(self, told: Told) -> Part | None:
        """Return the new part, if any; raise the error of a reply that failed."""
        match told:
            case PromptScored():
                self._scores += told.logprobs
                return None
            case Emitted():
                return self._emitted(told)
            case Failed():
                raise of_failure(told)
            case _:
                if told.result.finish_reason in ("cancelled", "error"):
                    raise ended_early()
                return self._ended(told.result)

    def _emitted(self, told: Emitted) -> Part | None:
        self.completion_tokens += len(told.tokens)
        self._length += len(told.text)
        text, tokens = self._echo()
        if self._tokens is not None:
            self._tokens.push(told.tokens, told.drafted, told.logprobs)
            tokens += self._tokens.shown(self._length)
        text += told.text
        return Part(text, tokens) if text or tokens else None

    def _ended(self, result: Result) -> Part:
        self.result, self.completion_tokens = result, result.completion_tokens
        text, tokens = self._echo()
        if self._tokens is not None:
            cut = (
                result.finish_reason == "stop"
                and result.token_ids[-1:] != ()
                and result.token_ids[-1] not in self._ends
            )
            tokens += self._tokens.rest(self._length, cut=cut)
        return Part(text, tokens, result)

    def _echo(self) -> tuple[str, list[ShownToken]]:
        """Return the prompt, once, if it precedes the reply."""
        if not self._echoes:
            return "", []
        self._echoes = False
        if self._order.logprobs is None:
            return self._prompt, []
        prompt, text = self._submit.tokens or (), self._target.text
        written = text.decode(prompt, special=True)
        special = written.endswith(self._prompt)
        begin = len(self._prompt) - len(written) if special else 0  # below 0: a BOS token before it
        read = Tokens(text.detokenizer(special=special), begin)
        read.push(prompt, (False,) * len(prompt), self._scores)
        return self._prompt, [
            shown
            if shown.offset >= 0
            else replace(shown, text=shown.text[-shown.offset :], offset=0)
            for shown in read.rest(len(self._prompt), cut=False)
        ]


DONE = b"data: [DONE]\n\n"
COMMENT = b": no token yet\n"
LEAST_LOGPROB = -9999.0  # OpenAI's number for a logarithm that JSON cannot represent


def event(value: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Return the last event of a stream that failed; no [DONE] follows."""
    return event(error.body)


def open_writer(
    order: Order, target: RequestTarget, model: str, places: Sequence[StreamPlace | None] = ()
) -> "Writer":
    """Return the writer of an order's response. `places`: the parts that a returning client has."""
    return (ChatWriter if order.kind == "chat" else TextWriter)(order, target, model, places)


class Writer(ABC):
    """Writes one response, streamed or whole."""

    chunk_object: str
    whole_object: str

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
        self._head = {
            "id": order.name,
            "object": self.chunk_object if order.stream else self.whole_object,
            "created": order.created,
            "model": model,
            "system_fingerprint": target.described.fingerprint,
        }
        self._begin = f'data: {json.dumps(self._head, separators=(",", ":"))[:-1]},"choices":['
        self._end = '],"usage":null}\n\n' if order.usage_chunk else "]}\n\n"
        known = dict(enumerate(places[: len(order.submits)]))
        self._streamed = [
            StreamPlace() if known.get(reply.index) else None for reply in self.replies
        ]
        """The streamed part of each reply; None before its first chunk."""
        self._has = {index: place for index, place in known.items() if place is not None}
        """The parts that the client already has."""
        self._parts: dict[int, list[Part]] = {}

    # -- streamed ----------------------------------------------------------------------------------

    def lines(self, reply: Reply, part: Part | None) -> str:
        """Return the chunks of a reply's new part; the first has the seed."""
        if part is None or (part := self._unheard(reply.index, part)) is None:
            return ""
        said, begin = "", None
        if self._streamed[reply.index] is None:
            begin = {"seed": self._order.submits[reply.index].seed, **self._lowered(reply.index)}
            said = self._first(reply.index, begin)
        self._count(reply.index, part)
        if part.ended is None or part.text:
            said += self._chunk(
                self._choice(reply.index, part, None), metrics=None if said else begin
            )
        if part.ended is not None:
            last = Part("", () if part.text else part.tokens, part.ended)
            said += self._chunk(
                self._choice(reply.index, last, part.ended.finish_reason),
                metrics=self._metrics(reply.index, part.ended),
            )
        if self._order.wishes.event_ids:
            return f"{said[:-1]}id: {event_id(self._order.name, self._streamed)}\n\n"
        return said

    def _unheard(self, index: int, part: Part) -> Part | None:
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
        left = Part(part.text[characters:], part.tokens[tokens:], None if has.ended else part.ended)
        if left.text or left.tokens or left.ended is not None:
            skipped = min(characters, len(part.text)), min(tokens, len(part.tokens))
            self._streamed[index] = StreamPlace(
                before.characters + skipped[0], before.tokens + skipped[1]
            )
            return left
        self._count(index, part)
        return None

    def _count(self, index: int, part: Part) -> None:
        """Note that a part has been streamed."""
        self._streamed[index] = _behind(self._streamed[index] or StreamPlace(), part)

    @property
    def comment(self) -> bytes:
        """A stream line that clients ignore. Some clients split a stream at empty lines, so one
        follows, except with event ids, where openai-python would read it as an event."""
        return COMMENT if self._order.wishes.event_ids else COMMENT + b"\n"

    def last_lines(self) -> bytes:
        """Return the lines after the last reply."""
        usage = (
            event({**self._head, "choices": [], "usage": self.usage()})
            if self._order.usage_chunk
            else b""
        )
        return usage + DONE

    def _chunk(self, choice: str, metrics: dict[str, Any] | None = None) -> str:
        end = self._end
        if self._order.usage_always:
            end = f'],"usage":{json.dumps(self.usage())}}}\n\n'
        if metrics is not None:
            end = f'],"metrics":{json.dumps(metrics)}{end[1:]}'
        return self._begin + choice + end

    def _extra(self, part: Part) -> str:
        """The field `dovetail` of a choice, if requested."""
        if not self._order.wishes.drafted:
            return ""
        shown = part.tokens
        own = {
            "tokens": [s.token for s in shown],
            "drafted": [s.drafted for s in shown],
            "texts": [s.text for s in shown],
        }
        return f',"dovetail":{json.dumps(own)}'

    @abstractmethod
    def _first(self, index: int, metrics: dict[str, Any]) -> str:
        """Return the opening chunk of a reply, with these metrics, if its kind has one."""

    @abstractmethod
    def _choice(self, index: int, part: Part, reason: str | None) -> str:
        """Return a choice of a chunk."""

    # -- whole -------------------------------------------------------------------------------------

    def keep(self, reply: Reply, part: Part | None) -> None:
        """Store the new part of a reply."""
        if part is not None:
            self._parts.setdefault(reply.index, []).append(part)

    def whole(self) -> dict[str, Any]:
        """Return the response in one piece."""
        choices, metrics = [], []
        for reply in self.replies:
            parts = self._parts[reply.index]
            assert reply.result is not None
            text, tokens = (
                "".join(part.text for part in parts),
                [shown for part in parts for shown in part.tokens],
            )
            choices.append(
                self._whole_choice(reply.index, text, tokens, reply.result.finish_reason)
            )
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
        self, index: int, text: str, tokens: Sequence[ShownToken], reason: str
    ) -> dict[str, Any]:
        """Return a choice of a whole response."""

    # -- both --------------------------------------------------------------------------------------

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

    def usage(self) -> dict[str, Any]:
        """Return the tokens so far; a prompt counts once for all its replies."""
        results = [reply.result for reply in self.replies if reply.result is not None]
        first = [reply for reply in self.replies if reply.index % self._order.copies == 0]
        prompts = sum(len(self._order.submits[reply.index].tokens or ()) for reply in first)
        completion = sum(reply.completion_tokens for reply in self.replies)
        accepted = sum(result.accepted_tokens for result in results)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": completion,
            "total_tokens": prompts + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(
                    reply.result.reused_tokens for reply in first if reply.result is not None
                )
            },
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(result.drafted_tokens for result in results)
                - accepted,
            },
        }


def _behind(place: StreamPlace, part: Part) -> StreamPlace:
    """Return the streamed part of a reply, once another part has been streamed."""
    characters, tokens = place.characters + len(part.text), place.tokens + len(part.tokens)
    return StreamPlace(characters, tokens, part.ended is not None)


class ChatWriter(Writer):
    """Writes the replies of /v1/chat/completions."""

    chunk_object, whole_object = "chat.completion.chunk", "chat.completion"

    def _first(self, index: int, metrics: dict[str, Any]) -> str:
        choice = f'{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}'  # noqa: E501
        return self._chunk(choice, metrics)

    def _choice(self, index: int, part: Part, reason: str | None) -> str:
        delta = f'{{"content":{json.dumps(part.text)}}}' if reason is None else "{}"
        said = (
            json.dumps({"content": self._logprobs(part.tokens)})
            if self._order.logprobs is not None and part.tokens
            else "null"
        )
        return f'{{"index":{index},"delta":{delta},"logprobs":{said},"finish_reason":{json.dumps(reason)}{self._extra(part)}}}'  # noqa: E501

    def _whole_choice(
        self, index: int, text: str, tokens: Sequence[ShownToken], reason: str
    ) -> dict[str, Any]:
        logprobs = (
            {"content": self._logprobs(tokens), "refusal": None}
            if self._order.logprobs is not None
            else None
        )
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[ShownToken]) -> list[dict[str, Any]]:
        told = []
        for shown in tokens:
            scores = shown.logprobs or TokenLogprobs(logprob=0.0)
            top = [
                self._scored(token, logprob)
                for token, logprob in scores.top[: self._order.logprobs]
            ]
            told.append({**self._scored(shown.token, scores.logprob), "top_logprobs": top})
        return told

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": spelling(self._text, token),
            "logprob": finite(logprob),
            "bytes": list(self._text.piece(token)),
        }


class TextWriter(Writer):
    """Writes the replies of /v1/completions."""

    chunk_object, whole_object = "text_completion", "text_completion"

    def _first(self, index: int, metrics: dict[str, Any]) -> str:
        return ""

    def _choice(self, index: int, part: Part, reason: str | None) -> str:
        said = (
            json.dumps(self._logprobs(part.tokens))
            if self._order.logprobs is not None and part.tokens
            else "null"
        )
        return f'{{"index":{index},"text":{json.dumps(part.text)},"logprobs":{said},"finish_reason":{json.dumps(reason)}{self._extra(part)}}}'  # noqa: E501

    def _whole_choice(
        self, index: int, text: str, tokens: Sequence[ShownToken], reason: str
    ) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if self._order.logprobs is not None else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

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
