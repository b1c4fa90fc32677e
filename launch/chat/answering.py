"""Replies of a coordinator, piece by piece, each with whether the draft proposed it; `web.py` does
the same over HTTP."""

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import click
from pydantic import ValidationError

from dovetail.launch.chat.conversation import Answer, Manner, Paint
from dovetail.launch.console.options import rare
from dovetail.launch.processes.connection import Connection
from dovetail.protocol.errors import RequestError, UserError
from dovetail.protocol.messages import Described, Emitted, Failed, Finished
from dovetail.protocol.settings import template_values
from dovetail.runtime.client import Client
from dovetail.runtime.text.tokenizer import (
    NO_TEMPLATE,
    TextCodec,
    against_values,
    codec_of,
    why_no_chats,
)

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


class Templated:
    """Makes tokens of conversations by the template of a coordinator's target."""

    def __init__(self, client: Client, values: Mapping[str, Any]) -> None:
        """`UserError` for values that this template cannot be given."""
        described = client.describe()
        self._digest, self._values = described.vocabulary.digest, values
        if why_not := against_values(values, described.vocabulary.template):
            raise UserError(f"{FLAG} {json.dumps(values, ensure_ascii=False)}: {why_not}")
        self._codec = codec_of(described)

    def submitted(self, turns: Sequence[str]) -> dict[str, Any]:
        """Return what `Client.submit` is given for these turns, user first; `UserError` where the
        template fails on them."""
        said = [(("user", "assistant")[place % 2], turn) for place, turn in enumerate(turns)]
        try:
            tokens = self._codec.encode_messages(said, values=self._values)
        except RequestError as error:
            raise UserError(str(error)) from None
        return {"tokens": tokens, "vocabulary": self._digest}


def templated(client: Client, values: Mapping[str, Any]) -> Templated | None:
    """Return what makes tokens of turns where there are values; None: the coordinator does."""
    return Templated(client, values) if values else None


CANCEL_GRACE_S = 2.0
LOOK_EVERY_S = 0.05
PLAIN = f"{NO_TEMPLATE}: prompts are continued as plain text"

Show = Callable[[str, bool], None]
"""Receives each piece of a reply: the text, and whether it was drafted."""


class Answerer(Protocol):
    """A source of replies."""

    def models(self) -> str:
        """Describe the models that answer."""

    def no_chats(self) -> str:
        """Return why the model does not support chats; empty if it does."""

    def answer(self, turns: Sequence[str], manner: Manner, show: Show) -> Answer:
        """The reply to these turns, user first; Ctrl-C interrupts it. `DovetailError` if it
        fails."""


class CoordinatorAnswerer:
    """Has the models of a coordinator answer."""

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
                    return Answer(
                        text, reply.result, interrupted=reply.result.finish_reason == "cancelled"
                    )
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
            raise RequestError(
                "settings", f"the request is not possible: {first['loc'][0]}: {first['msg']}"
            ) from None

    def _text_codec(self) -> TextCodec:
        """Return the codec of the target's tokens, by which replies are coloured; their text comes
        from the coordinator."""
        if self._codec is None or self._described is None:
            self._described = self._client.describe()
            self._codec = codec_of(self._described)
        return self._codec


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C in this block is only noted, so that no message is lost half-read; the yielded
    function returns whether there was one. A second one interrupts as usual."""
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
