"""Values that a person gives the target's chat template, such as enable_thinking, and turns that
are made into tokens with them, as the HTTP API does it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from dovetail.launch.console.options import rare
from dovetail.protocol.errors import RequestError, UserError
from dovetail.protocol.settings import template_values
from dovetail.runtime.client import Client
from dovetail.runtime.text.tokenizer import against_values, codec_of

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
        """Return the arguments of `Client.submit` for these turns, user first; `UserError` if the
        template fails."""
        said = [(("user", "assistant")[place % 2], turn) for place, turn in enumerate(turns)]
        try:
            tokens = self._codec.encode_messages(said, values=self._values)
        except RequestError as error:
            raise UserError(str(error)) from None
        return {"tokens": tokens, "vocabulary": self._digest}


def templated(client: Client, values: Mapping[str, Any]) -> Templated | None:
    """Return what tokenizes turns if there are template values; None: the coordinator does."""
    return Templated(client, values) if values else None
