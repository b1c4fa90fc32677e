"""Chats as JSON lines: their turns, and which tokens of the rendering an assistant wrote.

A line has one of four forms of public data sets: ShareGPT's {"conversations": [{"from", "value"}]},
OpenAI's {"messages": [{"role", "content"}]}, {"turns": [user, assistant, user, ...]} and {"prompt",
"response"}; or {"text"} for a text that is not a chat. Errors name file and line. Chats are
rendered with the target's own template. Knows templates and tokenizers, no weights."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import numpy as np

from dovetail.protocol.errors import UserError
from dovetail.protocol.files import decode
from dovetail.workers.training.data.examples import Example

Role = Literal["system", "user", "assistant"]
ROLES: Mapping[str, Role] = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bot", "bing", "bard"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}
FORMS = '"conversations", "messages", "turns", "prompt" and "response", or "text"'
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Matches a template that marks the assistant's text."""

PLAIN = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}"
    "{{ eos_token if message.role == 'assistant' else '\n' }}{% endfor %}"
)
"""The template for targets without one: a line per message, and an end token per answer."""


@dataclass(frozen=True)
class Message:
    """A message of one side."""

    role: Role
    content: str


@dataclass(frozen=True)
class Chat:
    """One line of a file."""

    where: str  # file and line
    messages: tuple[Message, ...] = ()
    text: str = ""  # the content of the line instead of messages
    whole: bool = True  # True if the last answer ended by itself rather than being cut off


class RefusedError(Exception):
    """The chat template refuses a chat, with the reason."""


def read_chats(file: Path) -> Iterator[Chat]:
    """Yield the chats of a file. Raises `UserError` naming the first invalid line."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{file}, line {number}"
                if (text := decode(line, where)).strip():
                    yield _chat(where, text)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None


def _chat(where: str, line: str) -> Chat:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        _refuse(where, f"not a JSON object with {FORMS}")
    if "text" in row and not {"conversations", "messages", "turns", "prompt"} & set(row):
        return Chat(where, text=_text(where, row["text"], "text"))
    messages = tuple(_messages(where, row))
    # an assistant's first turn before any question is not an answer
    asked = next((i for i, message in enumerate(messages) if message.role == "user"), len(messages))
    opening = tuple(message for message in messages[:asked] if message.role == "system")
    return Chat(where, opening + messages[asked:], whole=row.get("finish_reason") != "length")


def _messages(where: str, row: Mapping[str, Any]) -> Iterator[Message]:
    for name, role, content in (
        ("conversations", "from", "value"),
        ("messages", "role", "content"),
    ):
        if name in row:
            for entry in _list(where, row[name], name):
                if not isinstance(entry, dict) or role not in entry or content not in entry:
                    _refuse(
                        where,
                        f'an entry of "{name}" is not an object with "{role}" and "{content}"',
                    )
                yield Message(_role(where, entry[role]), _text(where, entry[content], content))
            return
    if "turns" in row:
        for number, turn in enumerate(_list(where, row["turns"], "turns")):
            yield Message("assistant" if number % 2 else "user", _text(where, turn, "turns"))
    elif "prompt" in row:
        yield Message("user", _text(where, row["prompt"], "prompt"))
        if "response" in row:
            yield Message("assistant", _text(where, row["response"], "response"))
    else:
        _refuse(where, f"has none of {FORMS}")


def _list(where: str, value: object, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        _refuse(where, f'"{name}" is not a list, or is empty')
    return value


def _role(where: str, value: object) -> Role:
    if not isinstance(value, str) or value.lower() not in ROLES:
        _refuse(
            where, f"there is no role {value!r} here; only {', '.join(ROLES)} can be learned from"
        )
    return ROLES[value.lower()]


def _text(where: str, value: object, name: str) -> str:
    """Return a text, given as such or as OpenAI's list of text parts."""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value)
    ):
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str) or any("\ud800" <= character <= "\udfff" for character in value):
        _refuse(where, f'a "{name}" is not text')
    return value


def _refuse(where: str, what: str) -> NoReturn:
    raise UserError(f"{where}: {what}")


class Renderer:
    """Renders chats for one target, with its tokenizer and template, its begin id and the ids that
    end its answers."""

    def __init__(self, tokenizer: Any, begin: int | None, end: Sequence[int]) -> None:
        self.begin = begin
        self._tokenizer, self._end = tokenizer, frozenset(end)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids before the answer to these messages. Raises `RefusedError` if the template
        refuses them."""
        return self._ids(self._render(messages, ask=True))

    def decode(self, answer: Sequence[int]) -> str:
        """Return the text of an answer, without the id that ends it."""
        return cast(
            str,
            self._tokenizer.decode(
                [token for token in answer if token not in self._end],
                clean_up_tokenization_spaces=False,
            ),
        )

    def examples(self, chat: Chat) -> list[Example]:
        """Return the chat as a sequence whose answers are learned, each with the id that ends it.
        Raises `RefusedError` if the template refuses it. A template that rewrites earlier turns
        (for example, dropping earlier thoughts) gives several: each answer is learned after the
        context in which the target wrote it."""
        if chat.text:
            return [self._text_example(chat.text)]
        answers = [
            number for number, message in enumerate(chat.messages) if message.role == "assistant"
        ]
        messages = chat.messages[: answers[-1] + 1] if answers else ()
        if not messages:
            return []
        if MARKED.search(self._template):
            return [self._marked(messages, chat.whole)]
        return list(self._compared(messages, answers, chat.whole))

    @property
    def is_plain(self) -> bool:
        """Return whether the target has no template, so that a chat becomes plain lines."""
        return self._template == PLAIN

    @property
    def _template(self) -> str:
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return cast(str, template or PLAIN)

    def _marked(self, messages: Sequence[Message], whole: bool) -> Example:
        """Find the answers by the template's marks, including the ids that end them, which may be
        outside the marks."""
        rendered = self._apply(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        tokens, learn = (
            np.array(rendered["input_ids"], dtype=np.int64),
            np.array(rendered["assistant_masks"], dtype=np.bool_),
        )
        edges = np.flatnonzero(np.diff(np.concatenate([[False], learn, [False]])))
        ids: list[int] = tokens.tolist()
        ends = [
            stop + (stop < len(ids) and ids[stop] in self._end) for stop in edges[1::2].tolist()
        ]
        return self._example(ids, list(zip(edges[::2].tolist(), ends, strict=True)), whole)

    def _compared(
        self, messages: Sequence[Message], answers: Sequence[int], whole: bool
    ) -> Iterator[Example]:
        """Find each answer by comparing the rendered texts before and after it."""
        text, spans = "", list[tuple[int, int]]()
        for number in answers:
            before, behind = (
                self._render(messages[:number], ask=True),
                self._render(messages[: number + 1], ask=False),
            )
            if not behind.startswith(
                before
            ):  # the prompt has words that are dropped after the answer
                behind = before + messages[number].content + (self._tokenizer.eos_token or "")
            if spans and not before.startswith(text):
                yield self._example(*self._placed(text, spans), whole=True)
                spans = []
            text = behind
            spans.append((len(before), len(behind)))
        yield self._example(*self._placed(text, spans), whole)

    def _placed(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text, and spans of its characters as spans of ids, each without ids
        that cross its edge."""
        ids = self._ids(text)
        return ids, [
            (self._place(ids, text, start, after=True), self._place(ids, text, stop, after=False))
            for start, stop in spans
        ]

    def _place(self, ids: Sequence[int], text: str, edge: int, *, after: bool) -> int:
        """Return how many ids of a text make up its first `edge` characters, including one that
        crosses the edge if `after`."""
        alone = self._ids(text[:edge])
        same = next(
            (i for i, (a, b) in enumerate(zip(ids, alone, strict=False)) if a != b),
            min(len(ids), len(alone)),
        )
        if same == len(alone) or not after:
            return same
        offsets = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )["offset_mapping"]
        return max(
            same + 1, next((i for i, (start, _) in enumerate(offsets) if start >= edge), len(ids))
        )

    def _example(
        self, ids: Sequence[int], spans: Sequence[tuple[int, int]], whole: bool
    ) -> Example:
        """Return the example up to the last id that is learned. An answer ends with the first id
        that ends it, or before that if it was cut off."""
        learn = np.zeros(len(ids), dtype=np.bool_)
        for number, (start, stop) in enumerate(spans):
            ended = next((i for i in range(start, stop) if ids[i] in self._end), None)
            if ended is not None:
                stop = ended + (whole or number < len(spans) - 1)
            learn[start:stop] = True
        stop = int(np.flatnonzero(learn)[-1]) + 1 if learn.any() else 0
        return Example(np.array(ids[:stop], dtype=np.int64), learn[:stop])

    def _text_example(self, text: str) -> Example:
        """Return the example of a plain text: everything after the begin id (if any) is learned,
        including the end."""
        begin = [] if self.begin is None else [self.begin]
        ids = [*begin, *self._ids(text), *sorted(self._end)[:1]]
        learn = np.ones(len(ids), dtype=np.bool_)
        learn[: len(begin)] = False
        return Example(np.array(ids, dtype=np.int64), learn)

    def _ids(self, text: str) -> list[int]:
        return cast(
            list[int], self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        )

    def _render(self, messages: Sequence[Message], *, ask: bool) -> str:
        return cast(str, self._apply(messages, tokenize=False, add_generation_prompt=ask))

    def _apply(self, messages: Sequence[Message], **how: Any) -> Any:
        template, turns = (
            self._template,
            [{"role": message.role, "content": message.content} for message in messages],
        )
        try:
            return self._tokenizer.apply_chat_template(turns, chat_template=template, **how)
        except Exception as error:  # a template is a program: any exception is possible
            raise RefusedError(str(error)) from None
