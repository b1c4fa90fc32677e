"""`dovetail generate`: one prompt, streamed; or a file of prompts, several at a time."""

import json
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
from pydantic import ValidationError

from dovetail.launch.chat.conversation import Manner
from dovetail.launch.chat.web import WebAnswerer, api_key, check_flags
from dovetail.launch.console.failed import failure_told
from dovetail.launch.console.help import Rare
from dovetail.launch.console.terminal import counted, note, progress_bar
from dovetail.launch.console.travels import leaves_the_machine, of_request
from dovetail.launch.files.answers import Answers, open_answers
from dovetail.launch.files.outputs import check_output
from dovetail.launch.files.prompts import Prompt, is_unicode, read_prompts
from dovetail.launch.files.records import RecordFile, open_records
from dovetail.launch.processes.connection import (
    Connection,
    ahead_of,
    connected,
    is_url,
    speaks_http,
)
from dovetail.launch.settings.catalog import ALL_SECTIONS
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import SettingsCommand, settings_flags
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
from dovetail.runtime.trace import write_trace

CANCEL_GRACE_S = 2.0
QUIET_S = 1.0
"""When nothing has come for so long, the coordinator is asked whether the reply waits for a
target."""
STOP_CHARACTERS = 1024
"""The longest stop that `messages.Submit` takes."""
TOLD_SHARE = 0.05
"""Above this share of the time, the summary tells of the prefill, and of waiting for workers."""
NOTHING_PAID = "no node promised to pay, or the draft had not read the prompt yet"
NOTHING_OFFERED = "the draft offered nothing"
"""Why a round has no tree where nothing was decided: a policy that does not ask what pays always
asks the draft, and waits for it."""


@dataclass(frozen=True)
class Wish:
    """What holds for every request of a command."""

    configuration: Configuration
    raw: bool = False
    seed: int | None = None
    stop: tuple[str, ...] = ()
    trace: bool = False
    records: RecordFile | None = None
    """Gets every round."""

    @property
    def speculates(self) -> bool:
        return self.configuration.settings.draft.kind != "none"

    def submit(self, connection: Connection, turns: tuple[str, ...]) -> int:
        """Ask for the reply to these turns (user first, then alternating), or for the plain
        continuation of a text."""
        settings = self.configuration.settings
        try:
            return connection.client.submit(
                text=turns[0] if self.raw else None,
                turns=None if self.raw else turns,
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


@click.command(cls=SettingsCommand)
@click.argument("prompt", required=False)
@click.option(
    "--connect",
    metavar="ADDRESS|URL",
    help="The coordinator or server to use.  [default: the only coordinator of this user, else "
    "one of our own]",
)
@click.option(
    "--prompts",
    type=click.Path(dir_okay=False, path_type=Path),
    help='File of prompts, a line {"id", "turns"} each.',
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help='File that gets a line {"id", "results"} for each; what it holds already is skipped.',
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    cls=Rare,
    help="Prompts of a file that are decoded at a time.",
)
@click.option(
    "--raw", is_flag=True, cls=Rare, help="Continue the text as it is, without the chat template."
)
@click.option(
    "--seed",
    type=click.IntRange(0, (1 << 63) - 1),
    help="Seed of the sampling.  [default: a random one, reported]",
)
@click.option(
    "--stop",
    multiple=True,
    metavar="TEXT",
    help="Text before which the reply ends; can be given several times.",
)
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    cls=Rare,
    help="Write the time line of all processes, for ui.perfetto.dev.",
)
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    cls=Rare,
    help="File that gets a line for every round: offered, verified, accepted, times.",
)
@click.option("--json", "as_json", is_flag=True, help="The result as one JSON object on stdout.")
@settings_flags(*ALL_SECTIONS)
def command(
    configuration: Configuration,
    prompt: str | None,
    connect: str | None,
    prompts: Path | None,
    out: Path | None,
    parallel: int,
    raw: bool,
    seed: int | None,
    stop: tuple[str, ...],
    trace: Path | None,
    record: Path | None,
    as_json: bool,
) -> None:
    """Decode PROMPT, or what stands on standard input, and stream the reply; or a file of prompts.

    The text goes to stdout, a summary to stderr, with a warning where the draft failed, which
    changes no token. A server over HTTP is sent the first API key of the file --http.api_key_file,
    else $DOVETAIL_API_KEY.
    """
    check_stops(stop)
    wish = Wish(configuration, raw=raw, seed=seed, stop=stop, trace=trace is not None)
    if prompts is not None:
        if connect is not None and is_url(connect):
            raise UserError(
                "--prompts needs the coordinator: connect to its address (ipc:// or tcp://) "
                f"instead of {connect}"
            )
        _check_file_mode(prompt, out, as_json=as_json, trace=trace)
        assert out is not None
        if out.exists() and prompts.exists() and out.samefile(prompts):
            raise UserError(
                f"--out {out} is the file of --prompts itself: choose another one for the answers"
            )
        if record is not None and record.resolve() == out.resolve():
            raise UserError(f"--out and --record both name {out}: choose a file for each")
        asked = read_prompts(prompts)
        with open_records(record, go_on=True) if record is not None else nullcontext() as records:
            _decode_file(replace(wish, records=records), connect, asked, out, parallel)
        return
    if out is not None:
        raise UserError("--out goes with --prompts FILE; a single reply goes to stdout")
    text = _read_prompt(prompt)
    wish = replace(wish, seed=secrets.randbits(63) if seed is None else seed)
    if connect is not None and speaks_http(connect):
        if raw or trace is not None or record is not None:
            raise UserError(
                "--raw, --trace and --record need the coordinator: connect to its address "
                "(ipc:// or tcp://) instead of the server's URL"
            )
        _decode_over_http(wish, connect, text, as_json=as_json)
        return
    check_output(trace, "the trace")
    with (
        open_records(record) if record is not None else nullcontext() as records,
        connected(configuration, connect) as connection,
    ):
        tell_what_travels(connection)
        finished, last = _decode_one(
            replace(wish, records=records), connection, text, as_json=as_json
        )
        for loss in connection.stack.losses() if connection.stack else []:
            note(f"the target went on alone: {loss}")
        note(summary(finished.result, connection.models()))
        if finished.result.fingerprints:
            note(other_targets(finished.result))
        if finished.result.draft_failure is not None:
            note(failure_told(finished.result.draft_failure))
        _tell_full_context(finished.result, configuration.settings.sampling.max_tokens)
        if wish.speculates and finished.result.plain_rounds:
            state = connection.client.status()
            decisions = (
                state.decisions if connection.stack is not None else ()
            )  # elsewhere they may be about others' sessions
            failed = "its draft failed" if finished.result.draft_failure is not None else ""
            unwanted = "" if configuration.settings.tree.gamma else "tree.gamma is 0"
            missing = _missing_draft(connection.state, state) or failed or unwanted
            note(
                without_speculation(
                    finished.result,
                    decisions,
                    insists=configuration.settings.tree.insist,
                    last=last,
                    missing=missing,
                )
            )
        if trace is not None:
            write_trace(
                trace,
                finished.spans,
                {worker.name: worker.clock_bound_ns for worker in connection.client.look().workers},
            )
    if as_json:
        click.echo(json.dumps(finished.result.model_dump(), ensure_ascii=False))


def tell_what_travels(connection: Connection) -> None:
    """Before anything is sent to another machine, say what."""
    address = connection.address or connection.state.address
    if leaves_the_machine(address):
        note(of_request(address, connection.state))


def _check_file_mode(
    prompt: str | None, out: Path | None, *, as_json: bool, trace: Path | None
) -> None:
    if prompt is not None:
        raise UserError("a prompt and --prompts FILE are two different jobs: leave one of them out")
    if out is None:
        raise UserError("--prompts FILE needs --out FILE for the answers")
    if as_json or trace is not None:
        raise UserError(
            "--json and --trace are for a single prompt: the answers to --prompts are JSON "
            "lines anyway"
        )


def check_stops(stops: Sequence[str]) -> None:
    """`UserError` for stop strings that no request may have."""
    if len(stops) > MAX_STOPS:
        raise UserError(
            f"--stop is given {len(stops)} times, and {MAX_STOPS} stops are possible: leave "
            "some out"
        )
    for stop in stops:
        if not stop:
            raise UserError(
                "--stop '' would end every reply before its first character: give some text, "
                "or leave it out"
            )
        if len(stop) > STOP_CHARACTERS:
            raise UserError(
                f"--stop {stop[:20]!r}... has {len(stop)} characters, and {STOP_CHARACTERS} "
                "are possible: a part of it will do"
            )
        if not is_unicode(stop):
            raise UserError(
                f"--stop {stop[:40]!r} is no valid UTF-8 text: set your terminal to UTF-8, or "
                "type it anew"
            )


def _read_prompt(prompt: str | None) -> str:
    """The argument, or standard input where there is none or it is "-"."""
    if prompt is None and sys.stdin.isatty():
        raise UserError(
            "there is no prompt: write it as an argument, pipe it in, or name a file with --prompts"
        )
    if prompt is None or prompt == "-":
        prompt = decode(sys.stdin.buffer.read(), "the prompt on standard input", zeros=True)
    if not prompt.strip():
        raise UserError("the prompt is empty: write it as an argument, or pipe it in")
    if not is_unicode(prompt):
        raise UserError(
            "the prompt is no valid UTF-8 text: set your terminal to UTF-8, or convert the "
            "text with iconv"
        )
    if len(prompt) > MAX_TEXT:
        raise UserError(
            f"the prompt has {len(prompt)} characters, and {MAX_TEXT} are possible: shorten it"
        )
    return prompt


# -- one prompt ------------------------------------------------------------------------------------


def _decode_one(
    wish: Wish, connection: Connection, text: str, *, as_json: bool
) -> tuple[Finished, int]:
    """Decode, streamed to stdout unless the whole result is wanted; the reply, and how many tokens
    came last. Ctrl-C cancels the request, and says what was decoded by then."""
    request = wish.submit(connection, (text,))
    shown, last = "", 0
    asked = waiting = False
    try:
        while True:
            reply = connection.client.receive(QUIET_S)
            if reply is None:
                if not asked:
                    connection.client.inquire()
                asked = True
            elif isinstance(reply, Reported):
                asked = False
                if reply.totals.waiting and not waiting:
                    note(
                        ("\n" if shown else "")
                        + f"waiting: {'; '.join(map(printable, reply.reasons))}"
                    )
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
                _break_off(shown, wish.seed if last else None)
                raise connection.failure(reply)
    except LinkClosed as lost:
        _break_off(shown, wish.seed if last else None)
        if connection.stack is not None:
            raise
        raise LinkClosed(
            f"{lost}, and the reply is not finished: ask again when there is a coordinator "
            "(`dovetail serve`)"
        ) from None
    except KeyboardInterrupt:
        cancelled = _cancel(connection, [request])
        _break_off(shown, None if cancelled else wish.seed)
        for finished in cancelled:
            note(f"interrupted: {summary(finished.result, connection.models())}")
            if as_json:
                click.echo(json.dumps(finished.result.model_dump(), ensure_ascii=False))
        raise


def _break_off(shown: str, seed: int | None) -> None:
    """End the line of a reply that breaks off, and tell the seed that begins it in the same way."""
    if shown and not shown.endswith("\n"):
        click.echo()
    if seed is not None:
        note(f"the reply breaks off here; seed {seed}")


def _decode_over_http(wish: Wish, url: str, text: str, *, as_json: bool) -> None:
    """Decode one prompt with a server, streamed to stdout unless the whole result is wanted."""
    check_flags(wish.configuration)
    settings = wish.configuration.settings
    manner = Manner(
        settings.sampling,
        settings.sampling.max_tokens,
        settings.tree,
        wish.seed,
        wish.stop,
        speculate=wish.speculates,
    )
    server = WebAnswerer(url, api_key(wish.configuration))
    shown: list[str] = []

    def show(piece: str, _drafted: bool) -> None:
        shown.append(piece)
        if not as_json:
            click.echo(piece, nl=False)

    try:
        answer = server.answer((text,), manner, show)
    except DovetailError:
        _break_off("" if as_json else "".join(shown), wish.seed if shown else None)
        raise
    if answer.interrupted:
        _break_off("" if as_json else answer.text, wish.seed)
        raise KeyboardInterrupt
    if not as_json and not answer.text.endswith("\n"):
        click.echo()
    if answer.result is None:
        raise DovetailError(
            f"the server at {url} tells no figures of its replies: it is no dovetail server, "
            "or of another version"
        )
    note(summary(answer.result, server.models()))
    if answer.result.fingerprints:
        note(other_targets(answer.result))
    if answer.result.draft_failure is not None:
        note(failure_told(answer.result.draft_failure))
    _tell_full_context(answer.result, manner.max_tokens)
    if as_json:
        click.echo(json.dumps(answer.result.model_dump(), ensure_ascii=False))


def _tell_full_context(result: Result, most: int) -> None:
    """Say so if a reply of at most `most` tokens ended earlier because the context was full."""
    if result.finish_reason == "length" and result.completion_tokens < most:
        note(
            "the reply ends where the context of the target is full, before --max-tokens "
            f"{most}: prompt and reply share it"
        )


def _cancel(connection: Connection, requests: list[int]) -> list[Finished]:
    """Cancel what is under way and wait until the coordinator has heard it. Returns the results of
    what was decoded by then."""
    finished: list[Finished] = []
    try:
        for request in requests:
            connection.client.cancel(request)
        left = set(requests)
        for reply in connection.client.replies(CANCEL_GRACE_S):
            if isinstance(reply, Finished):
                finished.append(reply)
                left.discard(reply.request)
            elif isinstance(reply, Failed) and reply.session is not None:
                left.discard(reply.session)
            if not left:
                break
    except LinkClosed:
        pass
    return finished


def summary(result: Result, models: str) -> str:
    """One line on what a request cost, in the field's words."""
    parts = [
        f"{counted(result.completion_tokens, 'token')} in {result.wall_s:.2f} s",
        f"{result.tokens_per_s:.1f} tokens/s{_predicted(result)}",
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
    worked = (
        ("draft", result.draft_exposed_s),
        ("verify", result.verify_s),
        ("transport", result.transport_s),
    )
    shares = (("prefill", prefill), *worked, ("waiting", waiting))
    parts.append(
        " ".join(
            f"{name} {100 * seconds / result.wall_s:.0f} %" for name, seconds in shares if seconds
        )
    )
    return " · ".join((*parts, f"seed {result.seed}", models))


def other_targets(result: Result) -> str:
    """Of a reply that began on one target and went on on others, which compute otherwise."""
    return (
        "this reply was written by targets that differ, and is none of theirs alone: "
        f"{', then '.join(result.fingerprints)}"
    )


def _predicted(result: Result) -> str:
    return (
        ""
        if result.predicted_tokens_per_s is None
        else f" ({result.predicted_tokens_per_s:.1f} predicted)"
    )


def _missing_draft(before: Reported, after: Reported) -> str:
    """In words, that nobody is there to draft; empty: somebody is."""
    had, has = (
        any(
            "draft" in worker.roles and not (worker.standby or worker.leaving)
            for worker in state.workers
        )
        for state in (before, after)
    )
    return "" if has else "its draft worker was lost" if had else "no draft worker is there"


def without_speculation(
    result: Result, decisions: Sequence[str], *, insists: bool, last: int, missing: str = ""
) -> str:
    """How many rounds the target decoded alone, and why: to be measured, for want of room behind
    the token that a round brings in any case, and by what the coordinator last decided. `insists`:
    whether the request did; `last`: tokens that the last round brought; `missing`: that there is no
    draft, in words.
    """
    plain, every = result.plain_rounds, result.plain_rounds == result.rounds
    about = [
        line for line in decisions if line.startswith("session ")
    ]  # others are about a pair of workers
    full = result.finish_reason == "length" and last == 1 and (not every or plain == 1)
    reasons = [
        f"{result.control_rounds} to measure the target's pass over a single row"
        if result.control_rounds
        else "",
        "the last, which had room for a single token" if full else "",
        missing or (about[-1] if about else ""),
    ]
    left = plain - result.control_rounds - full
    if left > 0 and not about and not missing:
        reasons.append(f"{left} in which {NOTHING_OFFERED if insists else NOTHING_PAID}")
    which = "every round" if every else f"{plain} of {counted(result.rounds, 'round')}"
    told = "; ".join(filter(None, reasons))
    return f"without speculation in {which}{f': {told}' if told else ''}"


# -- a file of prompts -----------------------------------------------------------------------------


@dataclass
class _Dialogue:
    """One prompt of a file on its way: the history so far, and the results of the turns that are
    answered."""

    prompt: Prompt
    history: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    def next_turns(self) -> tuple[str, ...]:
        self.history.append(self.prompt.turns[len(self.results)])
        return tuple(self.history)

    def answered(self, result: Result) -> bool:
        """Take the answer to a turn; whether it was the last one."""
        self.history.append(result.text)
        self.results.append(result)
        return len(self.results) == len(self.prompt.turns)


def _decode_file(
    wish: Wish, connect: str | None, prompts: list[Prompt], out: Path, parallel: int
) -> None:
    if wish.raw and (several := next((p for p in prompts if len(p.turns) > 1), None)):
        raise UserError(
            f"prompt {several.id!r} has {len(several.turns)} turns, and --raw continues a "
            "single text: leave --raw out"
        )
    with open_answers(out) as answers:
        left = [prompt for prompt in prompts if prompt.id not in answers.done]
        if len(left) < len(prompts):
            note(f"{len(prompts) - len(left)} of {len(prompts)} prompts are done already")
        if not left:
            return
        with (
            connected(wish.configuration, connect) as connection,
            progress_bar(len(left), "prompts") as step,
        ):
            tell_what_travels(connection)
            batch, began_s = _Batch(wish, connection, answers), time.monotonic()
            errors = batch.run(left, parallel, step)
            taken_s = time.monotonic() - began_s
    for prompt, error in errors:
        note(f"{prompt.id}: {error}")
    note(_batch_summary(len(left) - len(errors), batch.tokens, taken_s))
    if batch.failure is not None:
        note(
            f"the draft failed in {counted(batch.failures, 'reply', 'replies')}; the first: "
            f"{failure_told(batch.failure)}"
        )
    if errors:
        text = f"{len(errors)} of {len(prompts)} prompts were not answered"
        raise (
            UserError(text)
            if all(isinstance(error, UserError) for _, error in errors)
            else DovetailError(text)
        )


def _batch_summary(prompts: int, tokens: int, seconds: float) -> str:
    """One line on what a file of prompts cost, the reading of its prompts included."""
    return (
        f"{counted(prompts, 'prompt')} answered: {counted(tokens, 'token')} in "
        f"{seconds:.2f} s · {tokens / seconds:.1f} tokens/s"
    )


class _Batch:
    """Several dialogues in flight over one client."""

    def __init__(self, wish: Wish, connection: Connection, answers: Answers) -> None:
        self._wish, self._connection, self._answers = wish, connection, answers
        self._flying: dict[int, _Dialogue] = {}
        self.tokens = 0
        """Of all replies so far."""
        self.failures = 0
        """Replies whose draft failed, and the failure of the first one."""
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
            _cancel(self._connection, list(self._flying))
            raise
        return errors

    def _send(self, dialogue: _Dialogue) -> None:
        self._flying[self._wish.submit(self._connection, dialogue.next_turns())] = dialogue

    def _fallen(self, reply: Failed) -> _Dialogue:
        """The dialogue that a failure is about; one about none of them ends the whole command."""
        if reply.session not in self._flying:
            raise self._connection.failure(reply)
        return self._flying.pop(reply.session)
