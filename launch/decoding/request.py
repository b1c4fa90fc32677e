"""The settings of all requests of a command, checked before anything is started."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from dovetail.launch.chat.answering import PLAIN, Templated, templated
from dovetail.launch.console.network_notice import leaves_the_machine, of_request
from dovetail.launch.console.terminal import note
from dovetail.launch.files.prompts import is_unicode
from dovetail.launch.files.records import RecordFile
from dovetail.launch.processes.connection import Connection, ahead_of
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.errors import UserError
from dovetail.protocol.files import decode
from dovetail.protocol.messages import MAX_STOPS, MAX_TEXT

STOP_CHARACTERS = 1024  # the longest stop that `messages.Submit` takes


@dataclass(frozen=True)
class Wish:
    """The settings of every request of a command."""

    configuration: Configuration
    raw: bool = False
    seed: int | None = None
    stop: tuple[str, ...] = ()
    trace: bool = False
    records: RecordFile | None = None  # gets every round
    values: Mapping[str, Any] = field(default_factory=dict)  # values for the chat template
    template: Templated | None = None
    """Makes tokens of turns with these values; None: the coordinator does, without any."""

    @property
    def speculates(self) -> bool:
        return self.configuration.settings.draft.kind != "none"

    def to(self, connection: Connection, configuration: Configuration) -> "Wish":
        """Return this wish with the settings that hold for a target, and its chat template."""
        if not self.raw and not connection.client.describe().vocabulary.template:
            note(PLAIN)
        template = templated(connection.client, self.values)
        return replace(self, configuration=configuration, template=template)

    def submit(self, connection: Connection, turns: tuple[str, ...]) -> int:
        """Ask for the reply to these turns (user first, then alternating), or for the plain
        continuation of a text."""
        settings = self.configuration.settings
        asked: dict[str, Any] = {"text": turns[0]} if self.raw else {"turns": turns}
        if self.template is not None:
            asked = self.template.submitted(turns)
        try:
            return connection.client.submit(
                **asked,
                sampling=settings.sampling,
                max_tokens=settings.sampling.max_tokens,
                stop=self.stop,
                seed=self.seed,
                tree=settings.tree,
                speculate=self.speculates,
                trace=self.trace,
                record=self.records is not None,
                ahead=ahead_of(settings.draft),
            )
        except ValidationError as error:  # too many turns, or too long ones
            first = error.errors(include_url=False, include_input=False)[0]
            raise UserError(
                f"the request is not possible: {first['loc'][0]}: {first['msg']}"
            ) from None


def tell_what_travels(connection: Connection) -> None:
    """Report what will be sent to another machine before sending it."""
    address = connection.address or connection.state.address
    if leaves_the_machine(address):
        note(of_request(address, connection.state))


def check_stops(stops: Sequence[str]) -> None:
    """`UserError` for stop strings that no request may have."""
    if len(stops) > MAX_STOPS:
        raise UserError(f"--stop is given {len(stops)} times: {MAX_STOPS} are possible")
    for stop in stops:
        if not stop:
            raise UserError("--stop '' would end every reply at once: leave it out")
        if len(stop) > STOP_CHARACTERS:
            raise UserError(
                f"--stop {stop[:20]!r}... has {len(stop)} characters: {STOP_CHARACTERS} are "
                "possible"
            )
        if not is_unicode(stop):
            raise UserError(
                f"--stop {stop[:40]!r} is not valid UTF-8 text: set your terminal to UTF-8"
            )


def read_prompt(prompt: str | None) -> str:
    """The argument, or standard input if it is missing or "-"."""
    if prompt is None and sys.stdin.isatty():
        raise UserError(
            "there is no prompt: give it as an argument, on stdin, or in a file with --prompts"
        )
    if prompt is None or prompt == "-":
        prompt = decode(sys.stdin.buffer.read(), "the prompt on standard input", zeros=True)
    if not prompt.strip():
        raise UserError("the prompt is empty: write it as an argument, or pipe it in")
    if not is_unicode(prompt):
        raise UserError(
            "the prompt is not valid UTF-8 text: set your terminal to UTF-8, or use iconv"
        )
    if len(prompt) > MAX_TEXT:
        raise UserError(f"the prompt has {len(prompt)} characters: {MAX_TEXT} are possible")
    return prompt
