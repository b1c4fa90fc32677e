"""`dovetail chat`: a conversation in the terminal, or a filter that answers each line. State and
replies are in `answering.py` and `web.py`."""

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from dovetail.launch.chat.answering import (
    COMMANDS,
    Answerer,
    Command,
    Conversation,
    CoordinatorAnswerer,
    Manner,
    parse,
    template_option,
)
from dovetail.launch.chat.web import WebAnswerer, answerer_at, said_to_server
from dovetail.launch.console.help import HelpCommand, connect_option, json_option
from dovetail.launch.console.terminal import failure_told, note, print_table, unwound_by_signals
from dovetail.launch.decoding.single import check_stops
from dovetail.launch.files.directory import history_path
from dovetail.launch.files.outputs import check_output
from dovetail.launch.files.prompts import is_unicode
from dovetail.launch.processes.connection import ahead_of, connected_by_target, speaks_http
from dovetail.launch.settings.configure import Configuration, parse_setting
from dovetail.launch.settings.flags import settings_flags
from dovetail.protocol.errors import DovetailError, LinkClosed, RequestError, UserError
from dovetail.protocol.files import decode, writing
from dovetail.protocol.messages import Result

PROMPT = "you> "
KEPT_LINES = 1000
DRAFTED = "\x1b[36m"
PLAIN = "\x1b[0m"
MAX_SEED = (1 << 63) - 1
WAKE_S = 0.5


@click.command(cls=HelpCommand)
@connect_option(
    "The coordinator or server to use.  [default: the only coordinator of this user, else one "
    "is started]",
    "ADDRESS|URL",
)
@click.option(
    "--seed",
    type=click.IntRange(0, MAX_SEED),
    help="Sampling seed.  [default: a random one for each reply]",
)
@click.option(
    "--stop",
    multiple=True,
    metavar="TEXT",
    help="A reply ends before this text; can be repeated.",
)
@json_option("Without a terminal: print the result of each reply as a JSON line on stdout.")
@template_option
@settings_flags(
    *("target", "draft", "tree", "sampling", "memory", "cache", "coordinator", "http"), named=True
)
def command(
    configuration: Configuration,
    template: Mapping[str, Any],
    connect: str | None,
    seed: int | None,
    stop: tuple[str, ...],
    as_json: bool,
) -> None:
    """Chat with the model, turn by turn; /help lists the commands.

    MODEL is the target, as for `dovetail serve`; with --connect URL it is one of that server's
    models. Text that the draft proposed is in colour. Ctrl-C interrupts a reply, Ctrl-D ends.
    Standard input that is not a terminal is read line by line. The API key for a server over HTTP
    is the first in the file --http.api_key_file, else $DOVETAIL_API_KEY.
    """
    check_stops(stop)
    with unwound_by_signals(), _answerer(configuration, connect) as (answerer, configuration):
        settings = configuration.settings
        manner = Manner(
            settings.sampling,
            settings.sampling.max_tokens,
            settings.tree,
            seed,
            stop,
            speculate=settings.draft.kind != "none",
            ahead=ahead_of(settings.draft),
            template=template,
            said=said_to_server(configuration) if isinstance(answerer, WebAnswerer) else None,
        )
        if isinstance(answerer, WebAnswerer) and (held := answerer.defaults(manner)):
            note(held)
        if said := answerer.no_chats():
            note(said)
        chat = Chat(answerer, manner, as_json=as_json)
        if sys.stdin.isatty():
            chat.talk()
        else:
            chat.filter()


@contextmanager
def _answerer(
    configuration: Configuration, connect: str | None
) -> Iterator[tuple[Answerer, Configuration]]:
    if connect is not None and speaks_http(connect):
        yield answerer_at(connect, configuration), configuration
        return
    with connected_by_target(configuration, connect) as (connection, configuration):
        yield CoordinatorAnswerer(connection), configuration


class Chat:
    """A running conversation, and the display of its replies."""

    def __init__(self, answerer: Answerer, manner: Manner, *, as_json: bool) -> None:
        self._answerer, self._manner, self._as_json = answerer, manner, as_json
        self._conversation = Conversation()
        self._unanswered: str | None = None  # the last question, if it could not be answered
        self._terminal = sys.stdout.isatty()
        self._colours = (
            self._terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        )
        self._ended = self._talks = self._in_line = False

    def talk(self) -> None:
        self._talks = True
        note(self._answerer.models())
        colour = f"text proposed by the draft is in {DRAFTED}this colour{PLAIN}; "
        note(f"{colour if self._colours else ''}/help lists the commands, Ctrl-D ends")
        with line_editing():
            while not self._ended:
                try:
                    self._take(_ask())
                except EOFError:
                    click.echo()
                    return
                except KeyboardInterrupt:
                    click.echo()
                except LinkClosed:  # the coordinator is gone
                    raise
                except DovetailError as error:
                    note(str(error))

    def filter(self) -> None:
        """Answer the lines of standard input; the first error ends it."""
        for number, line in enumerate(sys.stdin.buffer, start=1):
            self._take(decode(line, f"line {number} of standard input", zeros=True))
            if self._ended:
                return

    def _take(self, line: str) -> None:
        said = parse(line)
        if isinstance(said, Command):
            self._obey(said)
        elif said is not None:
            self._answer(self._conversation, said)

    def _answer(self, before: Conversation, question: str) -> None:
        """Answer a question in the context of the conversation, which is unchanged if there is no
        answer."""
        if not is_unicode(question):
            raise UserError("this is not valid UTF-8 text: set your terminal to UTF-8")
        self._unanswered, self._in_line = None, False
        try:
            answer = self._answerer.answer(before.turns_with(question), self._manner, self._show)
        except DovetailError as error:
            self._end_line()
            if not self._talks or isinstance(error, RequestError | LinkClosed):
                raise
            self._unanswered = question
            note(f"{error}\n/retry asks the question again")
            return
        if self._as_json:
            told = {"text": answer.text} if answer.result is None else answer.result.model_dump()
            click.echo(json.dumps(told, ensure_ascii=False))
        else:
            self._in_line = not answer.text.endswith("\n")
            self._end_line()
        if answer.text or not answer.interrupted:
            self._conversation = before.with_answer(question, self._manner, answer)
        if answer.result is not None and answer.result.draft_failure is not None:
            note(failure_told(answer.result.draft_failure))
        length = answer.result is not None and answer.result.finish_reason == "length"
        if answer.interrupted and answer.text:
            note("interrupted: the reply so far is kept")
        elif answer.interrupted:
            dropped = before is self._conversation
            kept = "the question is dropped" if dropped else "the previous reply stays"
            note(f"interrupted before the first word: {kept}")
        elif length and not self._as_json:
            note("the reply was cut off: --max-tokens allows longer ones, up to the context")

    def _show(self, text: str, drafted: bool) -> None:
        if self._as_json:
            return
        self._in_line = not text.endswith("\n")
        shown = harmless(text) if self._terminal else text
        click.echo(
            f"{DRAFTED}{shown}{PLAIN}" if drafted and self._colours else shown,
            nl=False,
            color=self._colours,
        )

    def _end_line(self) -> None:
        if self._in_line:
            click.echo()
        self._in_line = False

    # -- commands ----------------------------------------------------------------------------------

    def _obey(self, command: Command) -> None:
        argument = command.argument
        match command.name:
            case "stats":
                print_stats([said.answer.result for said in self._conversation.exchanges])
            case "draft" | "temperature" | "seed":
                self._manner = _changed(self._manner, command) if argument else self._manner
                note(_in_force(self._manner, command.name))
            case "retry":
                self._retry()
            case "clear":
                self._conversation, self._unanswered = Conversation(), None
                note("the conversation is cleared")
            case "save":
                self._save(Path(argument).expanduser())
            case "help":
                for name, (wanted, meaning) in COMMANDS.items():
                    note(f"  {f'/{name} {wanted}':<17} {meaning}")
            case "quit":
                self._ended = True

    def _retry(self) -> None:
        if self._unanswered is not None:
            self._answer(self._conversation, self._unanswered)
            return
        before, last = self._conversation.taken_back()
        if last.is_repeated_in(self._manner):
            fixed = "/temperature 0.7" if self._manner.is_greedy else "/seed random"
            note(f"the reply will be the same: {fixed} allows a different one")
        self._answer(before, last.question)

    def _save(self, path: Path) -> None:
        if path.exists():
            raise UserError(f"{path} already exists: choose another name")
        check_output(path, "the conversation")
        with writing(path, "the conversation"):
            path.write_text(self._conversation.as_json(), encoding="utf-8")
        note(f"the conversation is saved in {path}")


def harmless(text: str) -> str:
    """Return a text without control characters except newline and tab, so that no terminal executes
    it."""
    return "".join(
        c if c in "\n\t" or not (ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0) else "\ufffd" for c in text
    )


def _changed(manner: Manner, command: Command) -> Manner:
    if command.name == "draft":
        return replace(manner, speculate=command.argument == "on")
    if command.name == "seed":
        return replace(manner, seed=_seed(command.argument))
    value = parse_setting("sampling.temperature", command.argument, "/temperature")
    said = None if manner.said is None else manner.said | {"temperature"}
    return replace(
        manner, sampling=manner.sampling.model_copy(update={"temperature": value}), said=said
    )


def _in_force(manner: Manner, name: str) -> str:
    heat, seed = manner.sampling.temperature, manner.seed
    if name == "draft":
        return "draft on" if manner.speculate else "draft off: the target decodes alone"
    if name == "seed":
        return f"seed {'random: another one for each reply' if seed is None else seed}"
    if not manner.decides("temperature"):
        return "temperature the server's default"
    return f"temperature {heat:g}" if heat else "temperature 0: greedy"


def _seed(argument: str) -> int | None:
    if argument == "random":
        return None
    if not (argument.isascii() and argument.isdigit() and int(argument) <= MAX_SEED):
        raise UserError(f"/seed {argument}: write a whole number from 0 to {MAX_SEED}, or random")
    return int(argument)


def _ask() -> str:
    if sys.stdout.isatty():
        with _woken():
            return input(PROMPT)
    click.echo(PROMPT, nl=False, err=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


@contextmanager
def _woken() -> Iterator[None]:
    """Handle signals within half a second while readline waits for a key: one between its prompt
    and its wait, or on another thread, does not end the wait."""
    former = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, WAKE_S, WAKE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)


@contextmanager
def line_editing() -> Iterator[None]:
    """Enable line editing and a history, which is kept in the user's state folder if that is
    writable."""
    try:
        import readline
    except ImportError:  # Python was built without it
        yield
        return
    path = history_path()
    readline.set_history_length(KEPT_LINES)
    if path is None:
        yield
        return
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)


SHOWN_REPLIES = 10


def print_stats(results: list[Result | None]) -> None:
    """The figures of the last replies, a row each: their yield, and a breakdown of their time. Two
    tables, since a terminal may have 80 columns."""
    shown = [
        (number, result) for number, result in enumerate(results, start=1) if result is not None
    ][-SHOWN_REPLIES:]
    if not shown:
        note("there is no reply yet")
        return
    rates = ("tokens/s", "tau", "accepted %", "hit %", "first ms")
    figures = ("reply", "tokens", *rates, "prompt", "reused")
    print_table(figures, [(number, *_figures(result)) for number, result in shown])
    times = ("reply", "seconds", "prefill %", "draft %", "verify %", "transport %", "queue %")
    print_table(times, [(number, *_times(result)) for number, result in shown])


def _figures(result: Result) -> tuple[object, ...]:
    tau = None if result.tau is None else round(result.tau, 2)
    shares = (_percent(result.acceptance_rate), _percent(result.hit_rate))
    first = (round(1e3 * result.time_to_first_token_s), result.prompt_tokens, result.reused_tokens)
    return (result.completion_tokens, _rounded(result.tokens_per_s), tau, *shares, *first)


def _times(result: Result) -> tuple[object, ...]:
    ours = (result.prefill_s, result.draft_exposed_s, result.verify_s)
    accounts = (*ours, result.transport_s, result.queue_s)
    shares = (_percent(seconds / result.wall_s) if result.wall_s else None for seconds in accounts)
    return (_rounded(result.wall_s), *shares)


def _percent(share: float | None) -> int | None:
    return None if share is None else round(100 * share)


def _rounded(value: float) -> float:
    return round(value) if value >= 100 else round(value, 1 if value >= 10 else 2)
