"""`dovetail coordinator`: the process that owns the token logs, by hand or under a supervisor.
Never imports torch."""

import asyncio
import logging
import socket
from contextlib import ExitStack
from pathlib import Path

import click

from dovetail.launch.console.help import HelpCommand, parent_option
from dovetail.launch.console.logs import log_to_stderr
from dovetail.launch.extras import extra, installed
from dovetail.launch.files.directory import announced, journal_path, remove_old_journals
from dovetail.launch.machine.cores import parse_cores
from dovetail.launch.machine.topology import Place, bind
from dovetail.launch.processes.child import handle_signals, name_process
from dovetail.launch.processes.notification import Notifier
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import settings_flags
from dovetail.protocol.files import cache_folder
from dovetail.protocol.links import open_hub
from dovetail.protocol.settings import CoordinatorSettings, byte_count
from dovetail.runtime.engine.loop import coordinate
from dovetail.runtime.engine.stored import MessageRecorder, ReplyStore
from dovetail.runtime.fleet.records import PairRecords

log = logging.getLogger("dovetail.coordinator")

STDIN = 0


@click.command(cls=HelpCommand)
@click.option(
    "--cores", metavar="LIST", help="Cores to bind to, such as 0,2-3.  [default: not bound]"
)
@click.option(
    "--own-folder",
    is_flag=True,
    hidden=True,
    help="The folder of the ipc address is only for this coordinator, and is removed with it.",
)
@parent_option
@click.option(
    "--supervised",
    is_flag=True,
    hidden=True,
    help="Standard input is the pipe of a supervisor, which reports the state of the other parts.",
)
@settings_flags(
    "coordinator",
    shown=tuple(f"coordinator.{name}" for name in ("listen", "keys", "journal", "record")),
)
def command(
    configuration: Configuration,
    cores: str | None,
    own_folder: bool,
    parent: int | None,
    supervised: bool,
) -> None:
    """Run a coordinator until SIGTERM, SIGHUP, Ctrl-C or a client's Stop.

    It prints its address as one line on stdout. Other commands of this user on this machine find it
    without --connect. When restarted at the same address, it continues the requests in its journal.
    """
    handle_signals(parent)
    name_process("coordinator")
    if cores is not None:
        bind(Place(parse_cores(cores)))
    log_to_stderr(logging.WARNING if parent else logging.INFO)
    settings, notifier = configuration.settings.coordinator, Notifier()
    with ExitStack() as opened:
        recorder: MessageRecorder | None = None
        if settings.record:
            recording = extra("runtime.record.recorder")
            recorder = recording.Recorder(Path(settings.record).expanduser())
            opened.callback(recorder.close)
        hub = open_hub(
            settings.listen,
            keys=Path(settings.keys) if settings.keys else None,
            own_folder=own_folder,
        )
        opened.callback(hub.close)
        journal = _journal(settings, hub.address)
        if journal is not None:
            alone = own_folder or settings.listen == "ipc"  # no other process uses this address
            opened.callback(journal.close, remove=alone and settings.journal == "auto")
        if parent is None:
            opened.enter_context(announced(hub.address, keys=settings.keys))

        def ready() -> None:
            click.echo(hub.address)
            if parent is None:
                _introduce(hub.address)
            notifier.ready()

        asyncio.run(
            coordinate(
                hub,
                settings=settings,
                recorder=recorder,
                journal=journal,
                records=PairRecords(cache_folder()) if settings.remember else None,
                ready=ready,
                progress=notifier.progress,
                supervised=STDIN if supervised else None,
            )
        )


def _introduce(address: str) -> None:
    tcp = address.startswith("tcp://")
    keys = " --keys FOLDER" if tcp else ""
    for anywhere in ("//0.0.0.0:", "//[::]:"):
        address = address.replace(anywhere, f"//{socket.gethostname()}:")
    for role in ("target", "draft"):
        click.echo(
            f"  dovetail worker --role {role} --{role} MODEL --connect {address}{keys}", err=True
        )
    if tcp:
        click.echo(
            "On a worker's machine, FOLDER contains its NAME.key and coordinator.pub, both made by "
            "`dovetail keygen`.",
            err=True,
        )


def _journal(settings: CoordinatorSettings, address: str) -> ReplyStore | None:
    if settings.journal == "off":
        return None
    named = settings.journal != "auto"
    if not named and not installed("runtime.journal"):
        log.warning("runtime/journal is not installed: requests end with the coordinator")
        return None
    folder = Path(settings.journal).expanduser() if named else journal_path(address)
    if folder is None:
        text = "this user has no home folder for a journal, so requests end with the coordinator"
        log.warning("%s: name a folder with coordinator.journal", text)
        return None
    journal: ReplyStore = extra("runtime.journal.journal").open_journal(
        folder, keep_s=settings.journal_s, most=byte_count(settings.memory)
    )
    if not named:
        remove_old_journals(folder.parent, max(settings.journal_s, CoordinatorSettings().journal_s))
    return journal
