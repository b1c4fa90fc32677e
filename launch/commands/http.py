"""`dovetail http`: the HTTP API of a coordinator, started by hand or by a supervisor. Never imports
torch."""

import asyncio
import gc
import logging
import os
import resource
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import click
import uvloop

from dovetail.launch.cli import installed_version
from dovetail.launch.console.help import HelpCommand, connect_option, parent_option
from dovetail.launch.console.logs import log_to_stderr
from dovetail.launch.processes.child import (
    MORE_FILES,
    claim_stdout,
    handle_signals,
    name_process,
)
from dovetail.launch.processes.connection import ahead_of, call_model, only_coordinator
from dovetail.launch.processes.notification import Notifier
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import LISTENING, REPLIES, settings_flags
from dovetail.launch.settings.http_keys import KeyFile
from dovetail.launch.settings.models import TARGET_FOLDER
from dovetail.protocol.errors import (
    CheckpointError,
    LinkClosed,
    RequestError,
    SettingsError,
    UserError,
)
from dovetail.protocol.links import open_link
from dovetail.protocol.settings import HttpSettings, Settings, byte_count, template_values
from dovetail.runtime.http.app import open_app
from dovetail.runtime.http.asked import Aliases
from dovetail.runtime.http.gateway import MOST_RETRY_S, Gateway
from dovetail.runtime.http.orders import Defaults
from dovetail.runtime.http.pages.watch import Shown
from dovetail.runtime.http.service import Service, Terms
from dovetail.runtime.http.serving.listening import listen
from dovetail.runtime.http.serving.server import Connections, serve
from dovetail.runtime.text.tokenizer import OWN_VALUES, TextCodec

OTHER_FILES, FEWEST_OTHER_FILES = 128, 48
"""Descriptors reserved for a server's other files; 24 are open at the start."""
HEARTBEAT = b"heartbeat\n"  # the line that a supervised server writes to stdout once a second
log = logging.getLogger("dovetail.http")


@click.command(cls=HelpCommand)
@connect_option(
    "The coordinator: ipc://PATH or tcp://HOST:PORT.  [default: the only one of this user]"
)
@parent_option
@click.option(
    "--supervised",
    is_flag=True,
    hidden=True,
    help="Write heartbeats to standard output for a supervisor.",
)
@click.option(
    "--model-folder",
    type=click.Path(path_type=Path),
    hidden=True,
    help="The folder of the target, whose tokenizer is read in advance.",
)
@settings_flags(
    "http",
    "sampling",
    "tree",
    "draft",
    "coordinator.keys",
    "coordinator.answer_s",
    shown=(*LISTENING, *REPLIES, "coordinator.keys"),
)
def command(
    configuration: Configuration,
    connect: str | None,
    parent: int | None,
    supervised: bool,
    model_folder: Path | None,
) -> None:
    """Serve the HTTP API of a coordinator until SIGTERM or Ctrl-C.

    It prints its URL as one line on stdout once it listens. The settings of sampling and tree,
    draft.ahead and draft.kind none are the defaults of requests. The other settings of the draft
    belong to the draft worker.
    """
    handle_signals(parent)
    log_to_stderr(logging.WARNING if parent else logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    if connect is None:
        connect, configuration = only_coordinator(configuration)
    settings, notifier = configuration.settings, Notifier()
    name_process("http")
    folder = Path(settings.coordinator.keys) if settings.coordinator.keys else None
    with ExitStack() as opened:
        said = opened.enter_context(claim_stdout())
        listener = opened.enter_context(listen(settings.http.host, settings.http.port))
        keys = KeyFile(settings.http)
        most = connections_of(configuration)
        connections = Connections(receive_s=settings.http.receive_s, most=most)
        reach = partial(open_link, connect, keys=folder, role="client")
        link = reach()  # a wrong address or key is reported at once
        again = partial(reach, timeout_s=MOST_RETRY_S)

        def ready() -> None:
            print(url_of(settings.http.host, listener), file=said, flush=True)
            os.set_blocking(said.fileno(), not supervised)
            notifier.ready()

        def progress() -> None:
            notifier.progress()
            if supervised:  # a server without heartbeats counts as stuck
                with suppress(BlockingIOError, BrokenPipeError):  # it does not read, or has gone
                    os.write(said.fileno(), HEARTBEAT)

        async def run() -> None:
            gateway = Gateway(
                again, link, settings.coordinator.answer_s, partial(_codec_in, model_folder)
            )
            service = Service(gateway, _terms(settings, keys), connections)
            tasks = [asyncio.create_task(gateway.run())]
            if service.watch is not None:
                tasks.append(asyncio.create_task(service.watch.keep()))
            try:
                if why := await gateway.first():
                    raise LinkClosed(why)
                gc.freeze()
                app, end = open_app(service), service.end
                await serve(app, listener, connections, hurry=end, ready=ready, progress=progress)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())


def url_of(host: str, listener: socket.socket) -> str:
    """Return our URL, with the real port."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def _template_values(settings: HttpSettings) -> Mapping[str, Any]:
    values = template_values(settings.chat_template_kwargs)
    if ours := sorted(OWN_VALUES.intersection(values)):
        why = f"may not name {', '.join(ours)}: requests set these"
        raise SettingsError(f"http.chat_template_kwargs {why}")
    return values


def aliases_of(text: str) -> Aliases:
    """Return `http.aliases`; `SettingsError` if it is malformed."""
    try:
        return Aliases.read(text)
    except ValueError as error:
        raise SettingsError(f"http.aliases = {text!r}: {error}") from None


def _terms(settings: Settings, keys: Sequence[str]) -> Terms:
    return Terms(
        defaults=Defaults(
            settings.sampling,
            settings.tree,
            settings.draft.kind != "none",
            ahead_of(settings.draft),
            _template_values(settings.http),
            settings.http.fit,
            settings.http.special_tokens,
            settings.http.reasoning,
            settings.http.reasoning_budget,
            settings.http.tools,
        ),
        model=settings.http.model,
        names={f"/{'/'.join(TARGET_FOLDER.parts[-3:])}": "demo"},  # the same model in any folder
        called=call_model,
        version=installed_version(),
        keys=keys,
        aliases=aliases_of(settings.http.aliases),
        deadline_s=settings.http.deadline_s,
        most_body_bytes=byte_count(settings.http.body),
        only_local_names=not keys,
        cors=settings.http.cors,
        dashboard=shown(settings.http, keyed=bool(keys)),
        page=settings.http.page,
    )


def shown(settings: HttpSettings, *, keyed: bool) -> Shown:
    """Return what the dashboard shows: tokens of requests only if a single user can see it."""
    return settings.dashboard if settings.dashboard != "auto" else "anonymous" if keyed else "full"


def connections_of(configuration: Configuration) -> int:
    """Return the possible number of connections, after raising the limit on open files. If it is
    too low, a number from the settings is refused, and the default is lowered."""
    wanted = configuration.settings.http.connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = wanted + OTHER_FILES
    others = min(OTHER_FILES, max(FEWEST_OTHER_FILES, hard // 2))
    if wanted + others > hard:
        if configuration.given("http.connections"):
            raise UserError(
                f"http.connections = {wanted} needs {wanted + others} open files, and this "
                f"process may have {hard}: lower it to at most {hard - others}, or {MORE_FILES}"
            )
        text = "http.connections is %d, not %d: this process may have %d open files (`ulimit -Hn`)"
        log.warning(text, hard - others, wanted, hard)
        wanted = hard - others
    limits = max(soft, wanted + others), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return wanted


def _codec_in(folder: Path | None) -> TextCodec | None:
    if folder is None:
        return None
    from dovetail.workers.models.checkpoints.tokenizer import read_language

    try:
        content, table, facts = read_language(folder)
        return TextCodec(content, facts, table)
    except (CheckpointError, RequestError):  # the worker reports it
        return None
