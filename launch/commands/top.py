"""`dovetail top`: polls a coordinator, or a server over HTTP, once a second
(`runtime/telemetry/live_stats.py`), and retries without an answer. `screen.py` has the layout."""

import json
import os
import select
import socket
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from dovetail.launch.chat.web import WebServer, api_key
from dovetail.launch.console.help import HelpCommand, connect_option, json_option
from dovetail.launch.console.screen import PAGES, Standing, everything, page
from dovetail.launch.console.terminal import in_print, unwound_by_signals
from dovetail.launch.machine.others import Others
from dovetail.launch.processes.connection import call_model, find_coordinator, speaks_http
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import settings_flags
from dovetail.protocol.errors import DovetailError, RequestError, UserError
from dovetail.protocol.messages import Reported
from dovetail.runtime.client import Client
from dovetail.runtime.telemetry.live_stats import FORMAT, LiveStats
from dovetail.runtime.telemetry.picture import Spell, label
from dovetail.runtime.text.tokenizer import codec_of

EVERY_S = 1.0
MOST_WAIT_S = 15.0  # seconds between two attempts if there is no answer; at first it is EVERY_S
SILENCE_S = 10.0
MOST_LOOKS = 8  # messages read at a time; the next poll reads the rest
UP, DOWN, RIGHT, LEFT = ((b"\x1b[" + end, b"\x1bO" + end) for end in (b"A", b"B", b"C", b"D"))

Picture = dict[str, Any]


@click.command(cls=HelpCommand)
@connect_option(
    "The coordinator to watch, or a server over HTTP.  [default: the only one of this user]",
    "ADDRESS|URL",
)
@click.option("--once", is_flag=True, help="Show one second of activity, and end.")
@json_option("The same as one JSON object on stdout.")
@settings_flags("coordinator.keys", "coordinator.answer_s", "http", shown=("coordinator.keys",))
def command(configuration: Configuration, connect: str | None, once: bool, as_json: bool) -> None:
    """Show the activity of a coordinator, live.

    Shows devices and how busy they are, tokens/s, tau and acceptance by position, the time of a
    round, the current tree, sessions, workers and decisions. Keys: q quits, p pauses, left and
    right change the page, up and down choose the session. Without a terminal it measures for one
    second, prints the result and ends.
    """
    with ExitStack() as opened:
        eye: Any = (
            _WebEye(configuration, connect)
            if connect is not None and speaks_http(connect)
            else opened.enter_context(_LinkEye(configuration, connect))
        )
        eye = _WithOthers(eye)
        eye.look(None)
        if as_json or once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            time.sleep(EVERY_S)  # busy shares need an interval
            picture = eye.look(None)
            click.echo(json.dumps(picture)) if as_json else Console().print(
                everything(in_print(picture))
            )
            return
        with unwound_by_signals():
            _watch(eye)


class _WithOthers:
    """Adds the load of other programs, if workers run on this machine."""

    def __init__(self, eye: Any) -> None:
        self._eye, self._others, self._here = eye, Others(), socket.gethostname()

    def look(self, session: int | None) -> Picture:
        picture = self._eye.look(session)
        load = self._others.load(lambda _, name: name.startswith("dovetail"))
        here = any(worker["host"] == self._here for worker in picture["workers"])
        others = {**asdict(load), "words": load.words} if load is not None and here else None
        return {**picture, "others": others}


class _LinkEye:
    """Polls the coordinator, and reconnects when it is lost."""

    def __init__(self, configuration: Configuration, address: str | None) -> None:
        self._configuration, self._address = configuration, address
        self._client: Client | None = None
        self._live_stats = LiveStats()
        self._spelt: tuple[str, Spell | None] = ("", None)
        """The fingerprint of a target, and the texts of its tokens."""

    def __enter__(self) -> "_LinkEye":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def look(self, session: int | None) -> Picture:
        try:
            if self._client is None:
                self._client = find_coordinator(self._configuration, self._address)
            for _ in range(MOST_LOOKS):
                if not self._live_stats.see(self._client.look(self._live_stats.next)):
                    break
            state = self._client.status()
            self._live_stats.hear(state)
            spell = self._spell(self._client, state)
            return self._live_stats.view(spell=spell, session=session, called=call_model)
        except DovetailError:
            self._close()
            raise

    def _spell(self, client: Client, state: Reported) -> Spell | None:
        fingerprint = next(filter(None, (worker.fingerprint for worker in state.workers)), "")
        if fingerprint != self._spelt[0]:
            self._spelt = (fingerprint, _spell_of(client) if fingerprint else None)
        return self._spelt[1]

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _spell_of(client: Client) -> Spell | None:
    try:
        described = client.describe()
    except RequestError:
        return None  # the target has left in the meantime
    text = codec_of(described)
    return lambda token: label(text.piece(token))


class _WebEye:
    """Polls a server, as its dashboard does."""

    def __init__(self, configuration: Configuration, url: str) -> None:
        self._site = WebServer(url, api_key(configuration), silence_s=SILENCE_S)

    def look(self, session: int | None) -> Picture:
        asked, server = "" if session is None else f"?session={session}", self._site.url
        try:
            picture = self._site.get(f"/dashboard/state{asked}")
        except RequestError as error:
            why = f"the server at {server} has no dashboard ({error})"
            remedy = "set http.dashboard there, or connect to its coordinator"
            raise UserError(f"{why}: {remedy}") from None
        if picture.get("format") != FORMAT:
            other = f"the server at {server} is another release of dovetail"
            raise UserError(f"{other}: use the same on both")
        return picture


def _watch(eye: Any) -> None:
    console, standing = Console(), Standing()
    picture: Picture | None = None
    due_s, failures = 0.0, 0
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while not standing.ended:
            if not standing.paused and time.monotonic() >= due_s:
                try:
                    picture, failures, standing.lost = in_print(eye.look(standing.session)), 0, ""
                except DovetailError as error:
                    failures, standing.lost = failures + 1, str(error)
                wait_s = EVERY_S * 2 ** min(max(0, failures - 1), 6)
                due_s = time.monotonic() + min(MOST_WAIT_S, wait_s)
            if picture is not None:
                live.update(page(picture, standing, console), refresh=True)
            left_s = EVERY_S if standing.paused else max(0.0, due_s - time.monotonic())
            for key in keys.within(left_s):
                due_s = 0.0 if _press(key, standing, picture) else due_s


def _press(key: bytes, standing: Standing, picture: Picture | None) -> bool:
    sessions = [session["session"] for session in picture["sessions"]] if picture else []
    if key in (b"q", b"Q", b"\x03", b"\x04"):
        standing.ended = True
    elif key in (b"p", b"P", b" "):
        standing.paused = not standing.paused
        return not standing.paused
    elif key in (*LEFT, *RIGHT):
        standing.page = (standing.page + (1 if key in RIGHT else -1)) % len(PAGES)
    elif key in (*UP, *DOWN) and sessions:
        standing.session = _next(sessions, standing.session, 1 if key in DOWN else -1)
        return True
    return False


def _next(sessions: list[int], chosen: int | None, step: int) -> int | None:
    """The session after or before the chosen one; "the newest" is before the first and after the
    last."""
    places: list[int | None] = [None, *sessions]
    return places[(places.index(chosen) + step) % len(places)] if chosen in places else None


class _Keys:
    """Reads the keyboard, a key at a time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def within(self, seconds: float) -> Iterator[bytes]:
        """Wait for a key for at most this long; return it and those that arrived with it."""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return
        try:
            typed = os.read(self._descriptor, 64)
        except OSError:
            typed = b""
        if not typed:
            yield b"q"  # the terminal has gone
        while typed:
            length = 3 if typed[:2] in (b"\x1b[", b"\x1bO") else 1
            yield typed[:length]
            typed = typed[length:]


@contextmanager
def _keys() -> Iterator[_Keys]:
    """Put the terminal into unbuffered mode without echo until the block ends."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield _Keys(descriptor)
    except KeyboardInterrupt:
        return
    finally:
        with suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
