"""`dovetail router`: several services behind one address, by hand or under a supervisor. Never
imports torch."""

import asyncio
import gc
import logging
import re
import sys
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import click
import uvloop

from dovetail.launch.commands.http import aliases_of, connections_of, url_of
from dovetail.launch.console.help import EXISTING_FILE, HelpCommand, parent_option
from dovetail.launch.console.logs import log_to_stderr
from dovetail.launch.processes.child import claim_stdout, handle_signals, name_process
from dovetail.launch.processes.notification import Notifier
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import settings_flags
from dovetail.launch.settings.http_keys import KeyFile
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import HttpSettings, byte_count
from dovetail.runtime.http.serving.guard import OPEN_PATHS, Guard, shared
from dovetail.runtime.http.serving.listening import listen
from dovetail.runtime.http.serving.server import Connections, serve
from dovetail.runtime.router.app import Fleet, Front, Router
from dovetail.runtime.router.loading import Pool
from dovetail.runtime.router.models import Files, ModelRouter
from dovetail.runtime.router.upstream import Upstream

log = logging.getLogger("dovetail.router")

MOST_LINE = 1 << 20  # bytes of a line of the supervisor
REPLICA = re.compile(r"http://[^/?#@\s]+:[0-9]{1,5}/?")


@click.command(cls=HelpCommand)
@click.option(
    "--connect",
    "urls",
    metavar="URL",
    multiple=True,
    help="The URL of a service, such as http://127.0.0.1:8000; can be repeated.",
)
@click.option(
    "--replicas",
    type=EXISTING_FILE,
    help="File of such URLs, one per line, reread when it changes.",
)
@click.option(
    "--models",
    is_flag=True,
    hidden=True,
    help="Serve the models that the parent loads, by lines on standard input and output.",
)
@parent_option
@settings_flags(
    "http.host",
    "http.port",
    "http.api_key_file",
    "http.receive_s",
    "http.body",
    "http.connections",
    "http.cors",
    "http.aliases",
    "http.dashboard",
    "http.page",
    "http.deadline_s",
    "http.most_models",
    "http.unload_s",
    shown=("http.host", "http.port", "http.api_key_file"),
)
def command(
    configuration: Configuration,
    urls: tuple[str, ...],
    replicas: Path | None,
    models: bool,
    parent: int | None,
) -> None:
    """Spread requests over several services until SIGTERM or Ctrl-C.

    A request goes to the service that is predicted to finish it first, by the rates that they
    report and by the beginning of the conversation, which one of them may have cached. The router
    prints its URL as one line on stdout once it listens. API keys, if any, are checked here and
    passed on, so the services need the same keys. A URL that is removed from the file of --replicas
    gets no further requests; running ones finish undisturbed.
    """
    handle_signals(parent)
    name_process("router")
    log_to_stderr(logging.WARNING if parent else logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    if not urls and replicas is None and not models:
        raise UserError(
            "a router needs services: name each with --connect URL, or a file of them with "
            "--replicas"
        )
    listed = Listed(urls, replicas)
    listed()
    http, notifier = configuration.settings.http, Notifier()
    with ExitStack() as opened:
        out = opened.enter_context(claim_stdout())
        listener = opened.enter_context(listen(http.host, http.port))
        keys = KeyFile(http)
        connections = Connections(receive_s=http.receive_s, most=connections_of(configuration))

        def ready() -> None:
            print(url_of(http.host, listener), file=out, flush=True)
            notifier.ready()

        async def run() -> None:
            files = _page_files(http) if models else {}
            if models:
                router, loop = await _open_models(http, out, files)
            else:
                router, loop = await _open_replicas(listed)
            looking = asyncio.create_task(loop())
            guard = Guard(
                router,
                keys=keys,
                most_body_bytes=byte_count(http.body),
                only_local_names=not keys,
                open_paths=(*OPEN_PATHS, *files),
            )
            gc.freeze()
            try:
                await serve(
                    shared(guard, http.cors),
                    listener,
                    connections,
                    hurry=router.end,
                    ready=ready,
                    progress=notifier.progress,
                )
            finally:
                looking.cancel()
                await asyncio.wait([looking])

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())


Opened = tuple[Front, Callable[[], Coroutine[Any, Any, None]]]
"""A router, and the loop that keeps it informed."""


async def _open_replicas(listed: "Listed") -> Opened:
    upstream = Upstream()
    fleet = Fleet(listed, upstream)
    await fleet.look()
    return Router(fleet, upstream), fleet.run


def _page_files(http: HttpSettings) -> Files:
    """Return the files of the pages, which are served whether or not a model is loaded."""
    from dovetail.runtime.http.pages.site import page_files  # imports the framework

    found = page_files(http.page, dashboard=http.dashboard != "off")
    return {
        path: ([(n.encode(), v.encode()) for n, v in file.headers.items()], file.content)
        for path, file in found.items()
    }


async def _open_models(http: HttpSettings, out: TextIO, files: Files) -> Opened:
    """Return a router for models once the supervisor has named them on stdin; it ends when stdin
    is closed."""
    pool = Pool(most=http.most_models, idle_s=http.unload_s)

    def write(line: str) -> None:
        print(line, file=out, flush=True)

    router = ModelRouter(
        pool,
        Upstream(),
        write,
        aliases=aliases_of(http.aliases),
        deadline_s=http.deadline_s,
        files=files,
    )
    reader = asyncio.StreamReader(limit=MOST_LINE)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    router.receive(await reader.readline())

    async def listen_to_supervisor() -> None:
        while line := await reader.readline():
            router.receive(line)

    async def loop() -> None:
        await asyncio.gather(router.run(), listen_to_supervisor())

    return router, loop


class Listed:
    """The URLs of the services: those named as options and the present ones of a file."""

    def __init__(self, urls: tuple[str, ...], file: Path | None) -> None:
        self._named, self._file = [_url(url, "--connect") for url in urls], file
        self._read: list[str] = []
        self._stamp: object = None
        self._said = ""

    def __call__(self) -> list[str]:
        """Return them; `UserError` for an invalid URL. If the file becomes unreadable or invalid,
        nothing changes, which is reported once."""
        if self._file is not None:
            try:
                status = self._file.stat()
                stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
                if stamp != self._stamp:
                    lines = self._file.read_text(encoding="utf-8").splitlines()
                    self._read = [
                        _url(line.strip(), str(self._file)) for line in lines if line.strip()
                    ]
                    self._stamp = stamp
                self._said = ""
            except (OSError, UnicodeError, UserError) as error:
                if self._stamp is None:
                    raise
                if str(error) != self._said:
                    self._said = str(error)
                    log.warning("the list of services is unchanged: %s", error)
        return [*dict.fromkeys([*self._named, *self._read])]


def _url(text: str, where: str) -> str:
    if not REPLICA.fullmatch(text):
        raise UserError(
            f"{where}: {text!r} is not the URL of a service, such as http://127.0.0.1:8000"
        )
    return text.rstrip("/")
