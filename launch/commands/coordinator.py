"""`dovetail coordinator`: the process that owns the token logs, by hand or under a supervisor.
Never imports torch."""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click

from dovetail.launch.console.help import HelpCommand
from dovetail.launch.console.logs import log_to_stderr
from dovetail.launch.files.deployment.notification import Notifier
from dovetail.launch.files.directory import announced, journal_path, remove_old_journals
from dovetail.launch.machine.binding import Place, bind
from dovetail.launch.machine.cores import parse_cores
from dovetail.launch.processes.child import end_when_told, end_with, show_stacks_when_asked
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import settings_flags
from dovetail.protocol.errors import LinkClosed, LinkRefused, UserError
from dovetail.protocol.keys import STANDBY
from dovetail.protocol.links import Hub, Link, open_hub, open_link
from dovetail.protocol.links.sockets import CONNECT_TIMEOUT_S
from dovetail.protocol.settings import CoordinatorSettings
from dovetail.runtime.engine.loop import coordinate
from dovetail.runtime.journal.journal import KEEP_S, Journal
from dovetail.runtime.journal.segments import Segments
from dovetail.runtime.record.recorder import Recorder
from dovetail.runtime.standby.watching import call_on, stand_by

log = logging.getLogger("dovetail.coordinator")

STDIN = 0


@click.command(cls=HelpCommand)
@click.option(
    "--cores", metavar="LIST", help="Cores to bind to, such as 0,2-3.  [default: not bound]"
)
@click.option(
    "--standby-of",
    metavar="ADDRESS",
    help="Copy the journal of the coordinator at tcp://HOST:PORT, and take over when it is lost.",
)
@click.option(
    "--own-folder",
    is_flag=True,
    hidden=True,
    help="The folder of an ipc address belongs to this coordinator alone and is removed with it.",
)
@click.option(
    "--parent",
    type=int,
    hidden=True,
    help="End when this process, which started us, ends; announce nothing.",
)
@click.option(
    "--supervised",
    is_flag=True,
    hidden=True,
    help="Standard input is the pipe of a supervisor, which reports the state of the other parts.",
)
@settings_flags("coordinator")
def command(
    configuration: Configuration,
    cores: str | None,
    standby_of: str | None,
    own_folder: bool,
    parent: int | None,
    supervised: bool,
) -> None:
    """Run a coordinator until SIGTERM, SIGHUP, Ctrl-C or a client's Stop.

    Its address goes to stdout as one line. Other commands of this user on this machine find it
    without --connect.

    A standby on another machine has the same keys as the coordinator that it follows, and serves
    nobody until it takes over. Started again without --standby-of it does so at once.
    """
    if parent is not None:
        end_with(parent)
    end_when_told()
    show_stacks_when_asked()
    if cores is not None:
        bind(Place(parse_cores(cores)))
    log_to_stderr(logging.WARNING if parent else logging.INFO)
    settings, notifier = configuration.settings.coordinator, Notifier()
    with ExitStack() as opened:
        recorder = Recorder(Path(settings.record).expanduser()) if settings.record else None
        if recorder is not None:
            opened.callback(recorder.close)
        hub = open_hub(
            settings.listen,
            keys=Path(settings.keys) if settings.keys else None,
            own_folder=own_folder,
        )
        opened.callback(hub.close)
        journal = _journal(settings, hub.address)
        if journal is not None:
            alone = own_folder or settings.listen == "ipc"  # nobody else will have this address
            opened.callback(journal.close, remove=alone and settings.journal == "auto")
        if parent is None:
            opened.enter_context(announced(hub.address, keys=settings.keys))

        def ready() -> None:
            _introduce(hub.address, by_hand=parent is None)
            notifier.ready()

        lead = partial(
            coordinate,
            hub,
            settings=settings,
            recorder=recorder,
            journal=journal,
            progress=notifier.progress,
            supervised=STDIN if supervised else None,
        )
        if standby_of is None:
            asyncio.run(lead(ready=ready))
        else:
            asyncio.run(_follow(hub, journal, standby_of, settings.keys, notifier, lead))


async def _follow(
    hub: Hub,
    journal: Journal | None,
    address: str,
    keys: str,
    notifier: Notifier,
    lead: Callable[..., Coroutine[Any, Any, None]],
) -> None:
    """Follow the coordinator at an address, and lead when it is time to."""
    if not address.startswith("tcp://") or not hub.address.startswith("tcp://"):
        raise UserError(
            f"the standby of {address} would listen at {hub.address}: both are on machines of "
            "their own, at tcp://HOST:PORT; name one with --listen, the other with --standby-of"
        )
    if journal is None:
        raise UserError(
            "a standby keeps a copy of the journal: name a folder for it with coordinator.journal"
        )
    folder = Path(keys) if keys else None

    def connect(timeout_s: float) -> Link:
        return open_link(address, keys=folder, role=STANDBY, timeout_s=timeout_s)

    try:
        connect(CONNECT_TIMEOUT_S).close()  # a wrong address or key is told at once
    except LinkRefused:
        raise
    except LinkClosed as absent:
        log.warning("%s: it is waited for", absent)

    def ready() -> None:
        click.echo(hub.address)
        notifier.ready()

    greetings = await stand_by(
        hub, journal, address, connect, ready=ready, progress=notifier.progress
    )
    await lead(ready=lambda: call_on(connect, hub, journal.term), greetings=greetings)


def _journal(settings: CoordinatorSettings, address: str) -> Journal | None:
    """Return the journal of a coordinator at this address; None: it has none."""
    if settings.journal == "off":
        return None
    named = settings.journal != "auto"
    folder = Path(settings.journal).expanduser() if named else journal_path(address)
    if folder is None:
        text = "this user has no home for a journal, so requests end with the coordinator"
        log.warning("%s: name a folder with coordinator.journal", text)
        return None
    if not named:
        remove_old_journals(folder.parent, max(settings.journal_s, KEEP_S))
    journal = Journal(Segments(folder), keep_s=settings.journal_s)
    if journal.found:
        log.info("the journal in %s has %d requests to go on with", folder, journal.found)
    return journal


def _introduce(address: str, *, by_hand: bool) -> None:
    """Say where we are, and what to type on the machines of the workers."""
    click.echo(address)
    if not by_hand:
        return
    for anywhere in ("//0.0.0.0:", "//[::]:"):
        address = address.replace(anywhere, f"//{socket.gethostname()}:")
    over_tcp = address.startswith("tcp://")
    keys = " --keys FOLDER" if over_tcp else ""
    for role in ("target", "draft"):
        click.echo(
            f"  dovetail worker --role {role} --{role} MODEL --connect {address}{keys}", err=True
        )
    if over_tcp:
        click.echo(
            "FOLDER holds, on a worker's machine, its own NAME.key and coordinator.pub, both "
            "made by `dovetail keygen`.",
            err=True,
        )
