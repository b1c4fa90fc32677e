"""Replies to HTTP clients: the coordinator's messages become parts, in events and tokens. The
writers of the APIs turn parts into bytes."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dovetail.protocol.messages import (
    Emitted,
    Failed,
    PromptRead,
    PromptScored,
    Result,
    TokenLogprobs,
)
from dovetail.runtime.http.asked import RequestTarget, Told
from dovetail.runtime.http.decoding import ended_early
from dovetail.runtime.http.errors import of_failure
from dovetail.runtime.http.events import Event, Reasoning, Text, joined
from dovetail.runtime.http.orders import Order
from dovetail.runtime.text.tokenizer import Detokenizer


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

    events: tuple[Event, ...] = ()
    tokens: Sequence[ShownToken] = ()
    ended: Result | None = None

    @property
    def text(self) -> str:
        """The text of the reply alone, without reasoning and calls."""
        return "".join(event.text for event in self.events if isinstance(event, Text))


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
        self.reasoning_tokens = self._unread = 0
        """The tokens up to the last one of the reasoning, and those read since the last event."""
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
        self._parser = self._marked = None
        if order.reading is not None:
            self._parser = order.reading.parser(f"{order.name}/{index}")
            markers = order.reading.form.markers
            self._marked = target.text.detokenizer(self._submit.tokens or (), special=markers)
        self._lists = order.logprobs is not None or order.wishes.drafted
        wanted = self._lists or self._parser is not None
        reads = target.text.detokenizer(self._submit.tokens or ()) if wanted else None
        self._tokens = Tokens(reads, len(self._prompt)) if reads is not None else None

    @property
    def cut(self) -> bool:
        """Whether a stop string ended the reply."""
        result = self.result
        if result is None or result.finish_reason != "stop" or not result.token_ids:
            return False
        return result.token_ids[-1] not in self._ends

    @property
    def stop(self) -> str | None:
        """The stop string that ended the reply, if one did."""
        if self.result is None or not self.cut:
            return None
        text = self._target.text.decode(self.result.token_ids, special=True)
        found = {text.find(stop): stop for stop in self._submit.stop if stop in text}
        return found[min(found)] if found else None

    def hear(self, told: Told) -> Part | None:
        """Return the new part, if any; raise the error of a reply that failed."""
        match told:
            case PromptScored():
                self._scores += told.logprobs
                return None
            case PromptRead():
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
        events = self._read(text, tokens)
        listed = tokens if self._lists else ()
        return Part(events, listed) if events or listed else None

    def _ended(self, result: Result) -> Part:
        self.result, self.completion_tokens = result, result.completion_tokens
        text, tokens = self._echo()
        if self._tokens is not None:
            tokens += self._tokens.rest(self._length, cut=self.cut)
        events = self._read(text, tokens, cut=self.cut)
        if self._parser is not None:
            events += self._parser.end()
        return Part(events, tokens if self._lists else (), result)

    def _read(
        self, text: str, tokens: Sequence[ShownToken], *, cut: bool | None = None
    ) -> tuple[Event, ...]:
        """Return the events of a new text, which a parser reads from its tokens. `cut`: whether a
        stop string cut the last token; None: it is not the end of the reply."""
        if self._parser is None or self._marked is None:
            return (Text(text),) if text else ()
        pieces = [self._marked.push(shown.token) for shown in tokens]
        if cut and pieces:
            pieces[-1] = pieces[-1][: len(tokens[-1].text)]
        elif cut is False:
            pieces[-1:] = ["".join((*pieces[-1:], self._marked.flush()))]
        events: list[Event] = []
        for piece in pieces:
            found = self._parser.feed(piece)
            self._unread += 1
            if found:
                thinks = isinstance(found[-1], Reasoning)
                self.reasoning_tokens += self._unread if thinks else 0
                self._unread = 0
            events += found
        return joined(events)

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
