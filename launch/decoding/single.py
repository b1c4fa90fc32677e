"""Decoding for `dovetail generate`: one prompt, streamed to stdout as it is decoded by a
coordinator or by a server over HTTP; or a file of prompts, several at a time, with answers written
as they arrive."""

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from dovetail.launch.chat.answering import PLAIN, Manner, Templated, templated
from dovetail.launch.chat.web import answerer_at, said_to_server
from dovetail.launch.console.terminal import (
    counted,
    failure_told,
    leaves_the_machine,
    note,
    of_request,
    progress_bar,
    uninterrupted,
)
from dovetail.launch.files.outputs import Answers, RecordFile, open_answers
from dovetail.launch.files.prompts import Prompt, is_unicode
from dovetail.launch.processes.connection import (
    Connection,
    ahead_of,
    all_serving,
    connected_by_target,
)
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.errors import DovetailError, LinkClosed, UserError, printable
from dovetail.protocol.files import decode
from dovetail.protocol.messages import (
    MAX_STOPS,
    MAX_TEXT,
    DraftFailure,
    Emitted,
    Failed,
    Finished,
    Recorded,
    Reported,
    Result,
)

STOP_CHARACTERS = 1024  # the longest stop that `messages.Submit` takes


@dataclass(frozen=True)
class RequestSettings:
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

    def to(self, connection: Connection, configuration: Configuration) -> "RequestSettings":
        """Return this wish with the settings for a target, and its chat template."""
        if not self.raw and not connection.client.describe().vocabulary.template:
            note(PLAIN)
        template = templated(connection.client, self.values)
        return replace(self, configuration=configuration, template=template)

    def submit(self, connection: Connection, turns: tuple[str, ...]) -> int:
        """Request the reply to these turns (user first, then alternating), or the plain
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
    """Before sending data to another machine, report what will be sent."""
    address = connection.address or connection.state.address
    if leaves_the_machine(address):
        note(of_request(address, connection.state))


def check_stops(stops: Sequence[str]) -> None:
    """`UserError` for stop strings that no request may have."""
    if len(stops) > MAX_STOPS:
        raise UserError(f"--stop is given {len(stops)} times: at most {MAX_STOPS} are possible")
    for stop in stops:
        if not stop:
            raise UserError("--stop '' would end every reply at once: leave it out")
        if (length := len(stop)) > STOP_CHARACTERS:
            text = f"--stop {stop[:20]!r}... has {length} characters"
            raise UserError(f"{text}: at most {STOP_CHARACTERS} are possible")
        if not is_unicode(stop):
            text = f"--stop {stop[:40]!r} is not valid UTF-8 text"
            raise UserError(f"{text}: set your terminal to UTF-8")


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
        raise UserError(f"the prompt has {len(prompt)} characters: at most {MAX_TEXT} are possible")
    return prompt


CANCEL_GRACE_S = 2.0
QUIET_S = 1.0  # silence after which to query whether the reply waits for a target


def decode_one(
    wish: RequestSettings, connection: Connection, text: str, *, as_json: bool
) -> tuple[Finished, int]:
    """Decode, streamed to stdout unless the whole result is requested; return the reply and the
    number of tokens of its last round. Ctrl-C cancels the request, and prints the result so far."""
    request: int | None = None
    shown, last = "", 0
    asked = waiting = False
    try:
        with uninterrupted():  # a sent request is known, and can be cancelled
            request = wish.submit(connection, (text,))
        while True:
            reply = connection.client.receive(QUIET_S)
            if reply is None:
                if not asked:
                    connection.client.inquire()
                asked = True
            elif isinstance(reply, Reported):
                asked = False
                if reply.totals.waiting and not waiting:
                    reasons = "; ".join(map(printable, reply.reasons))
                    note(("\n" if shown else "") + f"waiting: {reasons}")
                waiting = bool(reply.totals.waiting)
            elif isinstance(reply, Emitted):
                last = len(reply.tokens)
                if not as_json:
                    click.echo(reply.text, nl=False)
                    shown = reply.text or shown
            elif isinstance(reply, Recorded) and wish.records is not None:
                wish.records.write("", 0, reply.record)
            elif isinstance(reply, Finished):
                if not as_json and not shown.endswith("\n"):
                    click.echo()
                return reply, last
            elif isinstance(reply, Failed):
                break_off(shown, wish.seed if last else None)
                raise connection.failure(reply)
    except LinkClosed as lost:
        break_off(shown, wish.seed if last else None)
        if connection.stack is not None:
            raise
        raise LinkClosed(
            f"{lost}, and the reply is incomplete: start a coordinator (`dovetail serve`)"
        ) from None
    except KeyboardInterrupt:
        cancelled = [] if request is None else cancel(connection, [request])
        break_off(shown, None if cancelled else wish.seed)
        for finished in cancelled:
            models = connection.models(draft=wish.speculates)
            note(f"interrupted: {summary(finished.result, models)}")
            if as_json:
                click.echo(json.dumps(finished.result.model_dump(), ensure_ascii=False))
        raise


def break_off(shown: str, seed: int | None) -> None:
    """End the line of an interrupted reply, and print the seed for repeating it."""
    if shown and not shown.endswith("\n"):
        click.echo()
    if seed is not None:
        note(f"the reply stops here; seed {seed}")


def decode_over_http(wish: RequestSettings, url: str, text: str, *, as_json: bool) -> None:
    """Decode one prompt with a server, streamed to stdout unless the whole result is requested."""
    server = answerer_at(url, wish.configuration)
    settings = wish.configuration.settings
    manner = Manner(
        settings.sampling,
        settings.sampling.max_tokens,
        settings.tree,
        wish.seed,
        wish.stop,
        speculate=wish.speculates,
        template=wish.values,
        said=said_to_server(wish.configuration),
    )
    if held := server.defaults(manner):
        note(held)
    server.plain = wish.raw
    if not wish.raw and (why_not := server.no_chats()) and server.plain:
        note(why_not)
    shown: list[str] = []

    def show(piece: str, _drafted: bool) -> None:
        shown.append(piece)
        if not as_json:
            click.echo(piece, nl=False)

    try:
        answer = server.answer((text,), manner, show)
    except DovetailError:
        break_off("" if as_json else "".join(shown), wish.seed if shown else None)
        raise
    if answer.interrupted:
        break_off("" if as_json else answer.text, wish.seed)
        raise KeyboardInterrupt
    if not as_json and not answer.text.endswith("\n"):
        click.echo()
    if answer.result is None:
        text = "it is not a dovetail server, or another version"
        raise DovetailError(f"the server at {url} sends no figures: {text}")
    note(summary(answer.result, server.models()))
    if answer.result.fingerprints:
        note(other_targets(answer.result))
    if answer.result.draft_failure is not None:
        note(failure_told(answer.result.draft_failure))
    if manner.decides("max_tokens"):
        tell_full_context(answer.result, manner.max_tokens)
    if as_json:
        click.echo(json.dumps(answer.result.model_dump(), ensure_ascii=False))


def cancel(connection: Connection, requests: list[int]) -> list[Finished]:
    """Cancel running requests and wait until the coordinator confirms it. Returns the results so
    far."""
    finished: list[Finished] = []
    with suppress(LinkClosed):
        for request in requests:
            connection.client.cancel(request)
        left: set[int | None] = {*requests}
        for reply in connection.client.replies(CANCEL_GRACE_S):
            if isinstance(reply, Finished):
                finished.append(reply)
                left.discard(reply.request)
            elif isinstance(reply, Failed):
                left.discard(reply.session)
            if not left:
                break
    return finished


TOLD_SHARE = 0.05
"""Above this share of the time, the summary includes prefill, and waiting for workers."""
NOTHING_PAID = "no node was expected to pay off, or the draft had not read the prompt yet"
NOTHING_OFFERED = "the draft offered nothing"
"""Why a round has no tree though the policy always uses the draft."""


def tell_full_context(result: Result, most: int) -> None:
    """Note that a reply of at most `most` tokens ended earlier because the context was full."""
    if result.finish_reason == "length" and result.completion_tokens < most:
        text = "the reply ended because the target's context is full"
        note(f"{text}, before --max-tokens {most}: prompt and reply share it")


def summary(result: Result, models: str) -> str:
    """Return a line with the figures of a request."""
    predicted = result.predicted_tokens_per_s
    parts = [
        f"{counted(result.completion_tokens, 'token')} in {result.wall_s:.2f} s, the first after "
        f"{result.time_to_first_token_s:.2f} s",
        f"{result.tokens_per_s:.1f} tokens/s"
        + ("" if predicted is None else f" ({predicted:.1f} predicted)"),
    ]
    if result.tau is not None:
        parts.append(f"tau {result.tau:.2f}")
    if result.acceptance_rate is not None:
        parts.append(f"acceptance {result.acceptance_rate:.2f}")
    if result.hit_rate is not None and result.ahead_nodes:
        parts.append(f"hit {100 * result.hit_rate:.0f} %")
    parts.append(counted(result.rounds, "round"))
    if result.draft_failure is not None:
        parts.append(f"draft failed in round {result.draft_failure.round}")
    if result.prefill != "local":
        parts.append(f"prompt read by {result.prefill}")
    if result.moves:
        parts.append(f"{counted(result.moves, 'move')} to another target")
    prefill = result.prefill_s if result.prefill_s > TOLD_SHARE * result.wall_s else 0.0
    waiting = result.queue_s if result.queue_s > TOLD_SHARE * result.wall_s else 0.0
    shares = {
        "prefill": prefill,
        "draft": result.draft_exposed_s,
        "verify": result.verify_s,
        "transport": result.transport_s,
        "waiting": waiting,
    }
    known = {name: 100 * seconds / result.wall_s for name, seconds in shares.items() if seconds}
    parts.append(" ".join(f"{name} {share:.0f} %" for name, share in known.items()))
    return " · ".join((*parts, f"seed {result.seed}", models))


def other_targets(result: Result) -> str:
    """Return a note on a reply that moved to targets with other fingerprints."""
    return (
        "this reply is from targets that compute differently; none of them alone would produce it: "
        f"{', then '.join(result.fingerprints)}"
    )


def missing_draft(before: Reported, after: Reported) -> str:
    """Return why there is no draft worker; empty if there is one."""
    had, has = (all_serving(state.workers, "draft") for state in (before, after))
    return "" if has else "its draft worker was lost" if had else "there is no draft worker"


def without_speculation(
    result: Result, decisions: Sequence[str], *, insists: bool, last: int, missing: str = ""
) -> str:
    """Return how many rounds the target decoded alone, and why. `insists`: whether the request did;
    `last`: tokens of the last round; `missing`: in words, that there is no draft."""
    plain, every = result.plain_rounds, result.plain_rounds == result.rounds
    # other decisions are about a pair of workers
    about = [line for line in decisions if line.startswith("session ")]
    full = result.finish_reason == "length" and last == 1 and (not every or plain == 1)
    reasons = ["the last, which had room for a single token" if full else ""]
    if rounds := result.control_rounds:
        reasons.insert(0, f"{rounds} to measure the target alone")
    reasons.append(missing or (about[-1] if about else ""))
    left = plain - result.control_rounds - full
    if left > 0 and not about and not missing:
        reasons.append(f"{left} in which {NOTHING_OFFERED if insists else NOTHING_PAID}")
    which = "every round" if every else f"{plain} of {counted(result.rounds, 'round')}"
    told = "; ".join(filter(None, reasons))
    return f"without speculation in {which}{f': {told}' if told else ''}"


@dataclass
class _Dialogue:
    """One prompt of a file in progress: the history so far, and the results of the answered
    turns."""

    prompt: Prompt
    history: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    def next_turns(self) -> tuple[str, ...]:
        self.history.append(self.prompt.turns[len(self.results)])
        return tuple(self.history)

    def answered(self, result: Result) -> bool:
        """Take the answer to a turn; return whether it was the last turn."""
        self.history.append(result.text)
        self.results.append(result)
        return len(self.results) == len(self.prompt.turns)


def decode_file(
    wish: RequestSettings, connect: str | None, prompts: list[Prompt], out: Path, parallel: int
) -> None:
    if wish.raw and (several := next((p for p in prompts if len(p.turns) > 1), None)):
        raise UserError(f"prompt {several.id!r} has {len(several.turns)} turns: leave --raw out")
    with open_answers(out) as answers:
        left = [prompt for prompt in prompts if prompt.id not in answers.done]
        if len(left) < len(prompts):
            note(f"{len(prompts) - len(left)} of {len(prompts)} prompts are already done")
        if not left:
            return
        with (
            connected_by_target(wish.configuration, connect) as (connection, configuration),
            progress_bar(len(left), "prompts") as step,
        ):
            tell_what_travels(connection)
            wish = wish.to(connection, configuration)
            batch, began_s = _Batch(wish, connection, answers), time.monotonic()
            errors = batch.run(left, parallel, step)
            taken_s = time.monotonic() - began_s
    for prompt, error in errors:
        note(f"{prompt.id}: {error}")
    answered, tokens = counted(len(left) - len(errors), "prompt"), counted(batch.tokens, "token")
    rate = batch.tokens / taken_s
    note(f"{answered} answered: {tokens} in {taken_s:.2f} s · {rate:.1f} tokens/s")
    if batch.failure is not None:
        replies = counted(batch.failures, "reply", "replies")
        note(f"the draft failed in {replies}; the first: {failure_told(batch.failure)}")
    if errors:
        mistakes = all(isinstance(error, UserError) for _, error in errors)
        kind = UserError if mistakes else DovetailError
        raise kind(f"{len(errors)} of {len(prompts)} prompts were not answered")


class _Batch:
    """Several concurrent dialogues over one client."""

    def __init__(self, wish: RequestSettings, connection: Connection, answers: Answers) -> None:
        self._wish, self._connection, self._answers = wish, connection, answers
        self._flying: dict[int, _Dialogue] = {}
        self.tokens = 0  # tokens of all replies so far
        self.failures = 0  # replies whose draft failed, and the failure of the first one
        self.failure: DraftFailure | None = None

    def run(
        self, prompts: list[Prompt], parallel: int, step: Callable[[str], None]
    ) -> list[tuple[Prompt, DovetailError]]:
        """Decode all; returns those that failed, and why."""
        waiting = deque(_Dialogue(prompt) for prompt in prompts)
        errors: list[tuple[Prompt, DovetailError]] = []
        try:
            while waiting or self._flying:
                while waiting and len(self._flying) < parallel:
                    self._send(waiting.popleft())
                reply = self._connection.client.receive(None)
                if isinstance(reply, Finished):
                    dialogue = self._flying.pop(reply.request)
                    self.tokens += reply.result.completion_tokens
                    self.failures += reply.result.draft_failure is not None
                    self.failure = self.failure or reply.result.draft_failure
                    if not dialogue.answered(reply.result):
                        self._send(dialogue)
                        continue
                    self._answers.write(dialogue.prompt.id, dialogue.results)
                    step(dialogue.prompt.id)
                elif isinstance(reply, Recorded) and self._wish.records is not None:
                    dialogue = self._flying[reply.request]
                    self._wish.records.write(
                        dialogue.prompt.id, len(dialogue.results), reply.record
                    )
                elif isinstance(reply, Failed):
                    errors.append((self._fallen(reply).prompt, self._connection.failure(reply)))
                    step("")
        except KeyboardInterrupt:
            cancel(self._connection, list(self._flying))
            raise
        return errors

    def _send(self, dialogue: _Dialogue) -> None:
        self._flying[self._wish.submit(self._connection, dialogue.next_turns())] = dialogue

    def _fallen(self, reply: Failed) -> _Dialogue:
        """The dialogue to which a failure belongs; a failure without one ends the whole command."""
        if reply.session not in self._flying:
            raise self._connection.failure(reply)
        return self._flying.pop(reply.session)
