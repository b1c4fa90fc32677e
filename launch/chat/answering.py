"""A conversation with the models: its turns, the settings of the next reply, the commands; and a
coordinator's replies in pieces, marked if the draft proposed them. `web.py` gets replies over
HTTP."""

import difflib
import json
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from types import FrameType
from typing import Any, Protocol

import click
from pydantic import ValidationError

from dovetail.launch.console.help import rare
from dovetail.launch.processes.connection import Connection
from dovetail.protocol.errors import RequestError, UserError
from dovetail.protocol.messages import Described, Emitted, Failed, Finished, Result
from dovetail.protocol.settings import Sampling, TreeSettings, template_values
from dovetail.runtime.client import Client
from dovetail.runtime.text.tokenizer import (
    NO_TEMPLATE,
    TextCodec,
    against_values,
    codec_of,
    why_no_chats,
)

COMMANDS = {
    "stats": ("", "the figures of the last replies"),
    "draft": ("[on|off]", "whether the draft proposes tokens; the text is the same"),
    "temperature": ("[X]", "the temperature of the next replies; 0: greedy"),
    "seed": ("[N|random]", "the seed of the next replies"),
    "retry": ("", "ask the last question again; the new reply replaces the old one"),
    "clear": ("", "clear the conversation"),
    "save": ("FILE", "save the conversation, and the figures of the replies, as JSON"),
    "help": ("", "list these commands; begin a message with // to send a text that begins with /"),
    "quit": ("", "quit; so do /exit and Ctrl-D"),
}
"""Name -> (argument, description); without its optional [argument] it shows the value."""
ALIASES = {"exit": "quit"}


@dataclass(frozen=True)
class Command:
    """A line that is not for the models."""

    name: str
    argument: str = ""


def parse(line: str) -> Command | str | None:
    """A command, a text to be answered, or None for an empty line; `UserError` for an unknown
    command, or one that lacks its argument."""
    text = line.strip()
    if not text.startswith("/") or text.startswith("//"):
        return text.removeprefix("/") if text.startswith("//") else text or None
    name, _, argument = text[1:].partition(" ")
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, (*COMMANDS, *ALIASES), 1)
        remedy = f"did you mean /{near[0]}?" if near else "/help lists them"
        raise UserError(f"there is no command /{name}: {remedy}")
    usage, argument = COMMANDS[name][0], argument.strip()
    wanted = usage.strip("[]")
    missing, needless = not argument and usage == wanted != "", argument and not wanted
    if missing or needless or (wanted == "on|off" and argument not in ("on", "off", "")):
        said, better = f"/{name} {argument}".rstrip(), f"/{name} {wanted}".rstrip()
        raise UserError(f"{said} is not possible: write {better}")
    return Command(name, argument)


@dataclass(frozen=True)
class Manner:
    """The settings of a request for a reply."""

    sampling: Sampling
    max_tokens: int
    tree: TreeSettings
    seed: int | None = None
    stop: tuple[str, ...] = ()
    speculate: bool = True
    ahead: bool | None = None
    template: Mapping[str, Any] = field(default_factory=dict)  # values for the chat template
    said: frozenset[str] | None = None
    """The sampling settings that are sent to a server, which decides the others. None: all."""

    def decides(self, name: str) -> bool:
        """Return whether this sampling setting was set here."""
        return self.said is None or name in self.said

    @property
    def is_greedy(self) -> bool:
        return self.decides("temperature") and self.sampling.temperature == 0.0


@dataclass(frozen=True)
class Answer:
    """A reply: its text so far, and its figures unless it was interrupted before there were any."""

    text: str
    result: Result | None = None
    interrupted: bool = False


@dataclass(frozen=True)
class Exchange:
    """A question, its settings, and the answer."""

    question: str
    manner: Manner
    answer: Answer

    def is_repeated_in(self, manner: Manner) -> bool:
        """Return whether the question with these settings always gets the same answer: greedily, or
        with the same seed, with any draft."""
        before = self.manner
        other = (manner.sampling, manner.said) != (before.sampling, before.said)
        if self.answer.interrupted or other:
            return False
        seed = self.answer.result.seed if self.answer.result is not None else before.seed
        alike = manner.seed is not None and manner.seed == seed and not manner.sampling.rejects
        return manner.is_greedy or alike


@dataclass(frozen=True)
class Conversation:
    """The turns of a conversation so far."""

    exchanges: tuple[Exchange, ...] = ()

    def turns_with(self, question: str) -> tuple[str, ...]:
        """All turns up to this question, user first."""
        said = (turn for one in self.exchanges for turn in (one.question, one.answer.text))
        return (*said, question)

    def with_answer(self, question: str, manner: Manner, answer: Answer) -> "Conversation":
        return Conversation((*self.exchanges, Exchange(question, manner, answer)))

    def taken_back(self) -> tuple["Conversation", Exchange]:
        """The conversation up to the last question, and the question. `UserError` if there is
        none."""
        if not self.exchanges:
            raise UserError("there is no question to repeat")
        return Conversation(self.exchanges[:-1]), self.exchanges[-1]

    def as_json(self) -> str:
        """The turns, and the result of each reply as in `--json`."""
        found = (said.answer.result for said in self.exchanges)
        results = [None if result is None else result.model_dump() for result in found]
        told = {"turns": self.turns_with("")[:-1], "results": results}
        return json.dumps(told, ensure_ascii=False, indent=1) + "\n"


class Paint:
    """Finds for each piece of a reply whether the draft proposed its token. The text may arrive
    later than its tokens and end at a stop string, so characters are matched."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, bool]] = deque()

    def push(self, spelt: Iterable[tuple[str, bool]]) -> None:
        """Tokens whose text has not arrived yet: the text that each completes, and whether it was
        drafted."""
        self._waiting.extend(spelt)

    def take(self, text: str) -> list[tuple[str, bool]]:
        """The text in pieces that are drafted or not; text without a token is not."""
        pieces: list[tuple[str, bool]] = []
        while text:
            spelt, flag = self._waiting.popleft() if self._waiting else (text, False)
            if len(spelt) > len(text):
                self._waiting.appendleft((spelt[len(text) :], flag))
            piece, text = text[: len(spelt)], text[len(spelt) :]
            if piece and pieces and pieces[-1][1] == flag:
                pieces[-1] = (pieces[-1][0] + piece, flag)
            elif piece:
                pieces.append((piece, flag))
        return pieces


FLAG = "--chat-template-kwargs"


def _read(_context: click.Context, _option: click.Parameter, text: str) -> Mapping[str, Any]:
    try:
        return template_values(text)
    except ValueError as error:
        raise UserError(f"{FLAG} {text!r}: {error}") from None


template_option = rare(
    FLAG,
    "template",
    metavar="JSON",
    default="",
    callback=_read,
    help="Values for the target's chat template, such as '{\"enable_thinking\": false}'.",
    show_default=False,
)


def spoken(turns: Sequence[str]) -> list[dict[str, str]]:
    """Return turns as messages, user first."""
    roles = cycle(("user", "assistant"))
    return [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]


class Templated:
    """Tokenizes conversations with the template of a coordinator's target."""

    def __init__(self, client: Client, values: Mapping[str, Any]) -> None:
        """`UserError` for values that this template must not get."""
        described = client.describe()
        self._digest, self._values = described.vocabulary.digest, values
        if why_not := against_values(values, described.vocabulary.template):
            raise UserError(f"{FLAG} {json.dumps(values, ensure_ascii=False)}: {why_not}")
        self._codec = codec_of(described)

    def submitted(self, turns: Sequence[str]) -> dict[str, Any]:
        """Return the arguments of `Client.submit` for these turns, user first; `UserError` if the
        template fails on them."""
        try:
            tokens = self._codec.encode_messages(spoken(turns), values=self._values)
        except RequestError as error:
            raise UserError(str(error)) from None
        return {"tokens": tokens, "vocabulary": self._digest}


def templated(client: Client, values: Mapping[str, Any]) -> Templated | None:
    """Return the tokenizer of turns if there are template values; None: the coordinator
    tokenizes."""
    return Templated(client, values) if values else None


CANCEL_GRACE_S = 2.0
LOOK_EVERY_S = 0.05
PLAIN = f"{NO_TEMPLATE}: prompts are continued as plain text"

Show = Callable[[str, bool], None]
"""Receives each piece of a reply: the text, and whether it was drafted."""


class Answerer(Protocol):
    """A source of replies."""

    def models(self) -> str:
        """Describe the models."""

    def no_chats(self) -> str:
        """Return why the model does not support chats; empty if it does."""

    def answer(self, turns: Sequence[str], manner: Manner, show: Show) -> Answer:
        """The reply to these turns, user first; Ctrl-C interrupts it. `DovetailError` if it
        fails."""


class CoordinatorAnswerer:
    """Gets replies from a coordinator."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._client = connection, connection.client
        self._described: Described | None = None
        self._codec: TextCodec | None = None
        self._templated: Templated | None = None

    def models(self) -> str:
        return self._connection.models()

    def no_chats(self) -> str:
        template = self._text_codec().facts.template
        return why_no_chats(template) if template else PLAIN

    def answer(self, turns: Sequence[str], manner: Manner, show: Show) -> Answer:
        """Stream a reply, as `Answerer` describes. The second Ctrl-C is a KeyboardInterrupt."""
        codec, paint = self._text_codec(), Paint()
        spell = codec.detokenizer(codec.encode("a"))  # not at the beginning of a text
        with interruptible() as interrupted:
            request = self._submit(turns, manner)
            text, patience_s = "", None
            while patience_s is None or time.monotonic() < patience_s:
                if interrupted() and patience_s is None:
                    self._client.cancel(request)
                    patience_s = time.monotonic() + CANCEL_GRACE_S
                reply = self._client.receive(LOOK_EVERY_S)
                if isinstance(reply, Emitted) and reply.request == request:
                    paint.push(zip(map(spell.push, reply.tokens), reply.drafted, strict=True))
                    for piece in paint.take(reply.text):
                        show(*piece)
                    text += reply.text
                elif isinstance(reply, Finished) and reply.request == request:
                    other = reply.result.fingerprint  # another target may have answered
                    if self._described is not None and self._described.fingerprint != other:
                        self._described = self._templated = None
                    cancelled = reply.result.finish_reason == "cancelled"
                    return Answer(text, reply.result, interrupted=cancelled)
                elif isinstance(reply, Failed) and reply.session in (request, None):
                    raise self._connection.failure(reply)
            return Answer(text, interrupted=True)

    def _submit(self, turns: Sequence[str], manner: Manner) -> int:
        if manner.template and self._templated is None:
            self._templated = templated(self._client, manner.template)
        asked = {"turns": turns} if self._templated is None else self._templated.submitted(turns)
        try:
            return self._client.submit(
                **asked,
                sampling=manner.sampling,
                max_tokens=manner.max_tokens,
                stop=manner.stop,
                seed=manner.seed,
                tree=manner.tree,
                speculate=manner.speculate,
                ahead=manner.ahead,
            )
        except ValidationError as error:  # too many turns, or too long ones
            first = error.errors(include_url=False, include_input=False)[0]
            why = f"the request is not possible: {first['loc'][0]}: {first['msg']}"
            raise RequestError("settings", why) from None

    def _text_codec(self) -> TextCodec:
        """Return the codec of the target's tokens, for colouring replies; their text comes from the
        coordinator."""
        if self._codec is None or self._described is None:
            self._described = self._client.describe()
            self._codec = codec_of(self._described)
        return self._codec


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C in this block is only recorded, so that no message is lost half-read; the yielded
    function returns whether it was pressed. A second one interrupts as usual."""
    before = signal.getsignal(signal.SIGINT)
    noted = False

    def note_it(_number: int, _frame: FrameType | None) -> None:
        nonlocal noted
        noted = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note_it)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, before)
