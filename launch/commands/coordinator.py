"""`dovetail coordinator`: the process that owns the token logs, by hand or under a supervisor.
Never imports torch."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from dovetail.launch.console.help import HelpCommand
from dovetail.launch.console.logs import log_to_stderr
from dovetail.launch.files.deployment.notification import Notifier
from dovetail.launch.files.directory import announced, journal_path, remove_old_journals
from dovetail.launch.machine.binding import Place, bind
from dovetail.launch.machine.cores import parse_cores
from dovetail.launch.processes.addresses import check_pair, is_here, same_place
from dovetail.launch.processes.child import (
    end_when_told,
    end_with,
    name_process,
    show_stacks_when_asked,
)
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import settings_flags
from dovetail.protocol.errors import DovetailError, UserError
from dovetail.protocol.keys import STANDBY
from dovetail.protocol.links import Hub, Link, open_hub, open_link
from dovetail.protocol.links.ways import split_addresses
from dovetail.protocol.settings import CoordinatorSettings, byte_count
from dovetail.runtime.engine.loop import coordinate
from dovetail.runtime.journal.journal import KEEP_S, Journal
from dovetail.runtime.journal.segments import Segments
from dovetail.runtime.record.recorder import Recorder
from dovetail.runtime.standby.follower import Arrived
from dovetail.runtime.standby.succession import Deposed, reached_at
from dovetail.runtime.standby.watching import call_on, stand_by

log = logging.getLogger("dovetail.coordinator")

STDIN = 0
ALONE = (
    "this coordinator belongs to `dovetail serve`, whose workers and HTTP API would not find a "
    "standby: start that with --standby ADDRESS, that of the standby"
)


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
    "--standby",
    metavar="ADDRESS",
    default="",
    help="Where its standby will be, for the commands that it prints: tcp://HOST:PORT.",
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
@settings_flags(
    "coordinator",
    shown=tuple(f"coordinator.{name}" for name in ("listen", "keys", "journal", "record")),
)
def command(
    configuration: Configuration,
    cores: str | None,
    standby_of: str | None,
    standby: str,
    own_folder: bool,
    parent: int | None,
    supervised: bool,
) -> None:
    """Run a coordinator until SIGTERM, SIGHUP, Ctrl-C or a client's Stop.

    Its address goes to stdout as one line. Other commands of this user on this machine find it
    without --connect.

    A standby on another machine has the same keys as the coordinator that it follows, and serves
    nobody until it takes over. Started again without --standby-of it does so at once, unless the
    other one leads. A coordinator that was taken over from becomes the standby of the one that has.
    """
    if parent is not None:
        end_with(parent)
    end_when_told()
    show_stacks_when_asked()
    name_process("coordinator")
    if cores is not None:
        bind(Place(parse_cores(cores)))
    log_to_stderr(logging.WARNING if parent else logging.INFO)
    settings, notifier = configuration.settings.coordinator, Notifier()
    if standby and standby_of:
        raise UserError(
            f"--standby {standby} with --standby-of {standby_of}: one of a pair leads, and the "
            "other follows it; leave one of them out"
        )
    if standby:
        check_pair("--standby", standby, settings)
    with ExitStack() as opened:
        recorder = Recorder(Path(settings.record).expanduser()) if settings.record else None
        if recorder is not None:
            opened.callback(recorder.close)
        process = Process(settings, notifier, recorder, own_folder, parent, supervised, standby)
        try:
            process.run(standby_of)
        except Deposed as deposed:
            if settings.journal == "off" or process.alone:
                flag = "--standby" if supervised else "--standby-of"
                raise DovetailError(
                    f"{deposed}; start it again with a journal and {flag} {deposed.successor}"
                ) from None
            log.warning("%s: from now on it is the standby of %s", deposed, deposed.successor)
            process.stand_by_of(deposed.successor)


@dataclass
class Process:
    """The process of a coordinator: what it was started with."""

    settings: CoordinatorSettings
    notifier: Notifier
    recorder: Recorder | None
    own_folder: bool
    parent: int | None
    supervised: bool
    standby: str
    """The address of the standby; empty: nobody has said it."""
    _said: bool = False

    @property
    def alone(self) -> str:
        """Return why it is none of a pair; empty: it may be one."""
        return ALONE if self.supervised and not self.standby else ""

    def run(self, standby_of: str | None) -> None:
        """Lead, or follow the coordinator at an address until it is time to. One whose journal says
        that it led last, in a term above 0, or that it was another one's standby, leads unless the
        other one does. `Deposed` if another one has taken over."""
        with self._opened() as (hub, journal):
            followed = "" if journal is None or not _over_tcp(hub.address) else journal.followed
            if followed and not standby_of and is_here(followed, hub.address):
                raise UserError(
                    f"coordinator.journal = {self.settings.journal!r} is that of the standby of "
                    f"{followed}, which is the coordinator here: name the folder of this one"
                )
            if followed and self.alone:
                raise UserError(
                    f"this coordinator was the standby of {followed} when it ended last: start "
                    f"`dovetail serve` with --standby {followed}, or with another folder in "
                    "coordinator.journal"
                )
            if followed and self.standby and not same_place(followed, self.standby):
                log.warning(
                    "the journal was copied from the coordinator at %s last, and --standby says "
                    "%s: this one leads unless that at %s does; if it does, name that one",
                    *(followed, self.standby, followed),
                )
            if address := standby_of or followed:
                leads_on = journal is not None and (journal.led or not standby_of)
                asyncio.run(self._follow(hub, journal, address, leads_on=leads_on))
            else:
                asyncio.run(self._lead(hub, journal, lambda: None))

    def stand_by_of(self, address: str) -> None:
        """Follow the coordinator at an address that has taken over from this one, until this one
        takes over; and so on."""
        while True:
            end_when_told()
            try:
                with self._opened() as (hub, journal):
                    asyncio.run(self._follow(hub, journal, address, leads_on=False))
                return
            except Deposed as deposed:
                address = deposed.successor
                log.warning("%s: from now on it is the standby of %s", deposed, address)

    @contextmanager
    def _opened(self) -> Iterator[tuple[Hub, Journal | None]]:
        """The hub and the journal of this process, at one address for as long as it lives."""
        settings = self.settings
        with ExitStack() as opened:
            hub = open_hub(
                settings.listen,
                keys=Path(settings.keys) if settings.keys else None,
                own_folder=self.own_folder,
            )
            opened.callback(hub.close)
            journal = _journal(settings, hub.address)
            if journal is not None:
                alone = self.own_folder or settings.listen == "ipc"  # nobody else has this address
                opened.callback(journal.close, remove=alone and settings.journal == "auto")
            if self.parent is None:
                opened.enter_context(announced(hub.address, keys=settings.keys))
            if _over_tcp(hub.address):
                self.settings = settings.model_copy(update={"listen": hub.address})
            yield hub, journal

    def _say(self, say: Callable[[], None]) -> None:
        """Say where this process is, once."""
        if not self._said:
            say()
        self._said = True
        self.notifier.ready()

    def _introduce(self, address: str, *, lead: str = "", standby: str = "") -> None:
        """Say where we are, and what to type on the machines of the workers, with the address of
        whom this is the standby, or of its own standby, as far as they are known."""
        click.echo(address)
        if self.parent is not None:
            return
        keys = " --keys FOLDER" if _over_tcp(address) else ""
        own = reached_at(address, socket.gethostname())
        both = ",".join(filter(None, (lead, own, standby)))
        for role in ("target", "draft"):
            click.echo(
                f"  dovetail worker --role {role} --{role} MODEL --connect {both}{keys}", err=True
            )
        if keys:
            click.echo(
                "FOLDER holds, on a worker's machine, its own NAME.key and coordinator.pub, both "
                "made by `dovetail keygen`.",
                err=True,
            )

    async def _lead(
        self,
        hub: Hub,
        journal: Journal | None,
        ready: Callable[[], None],
        greetings: Sequence[Arrived] = (),
    ) -> None:
        def begun() -> None:
            self._say(lambda: self._introduce(hub.address, standby=self.standby))
            ready()

        await coordinate(
            hub,
            settings=self.settings,
            recorder=self.recorder,
            journal=journal,
            ready=begun,
            progress=self.notifier.progress,
            supervised=STDIN if self.supervised else None,
            greetings=greetings,
            alone=self.alone,
        )

    async def _follow(
        self, hub: Hub, journal: Journal | None, address: str, *, leads_on: bool
    ) -> None:
        """Follow the coordinator at an address, and lead when it is time to."""
        if not _over_tcp(address) or not _over_tcp(hub.address):
            raise UserError(
                f"the standby of {address} would listen at {hub.address}: both are on machines of "
                "their own, at tcp://HOST:PORT; name one with --listen, the other with --standby-of"
            )
        if len(split_addresses(address)) > 1:
            raise UserError(f"--standby-of {address}: name one address, of the one that leads")
        if is_here(address, hub.address):
            raise UserError(
                f"the standby of {address} would listen there itself: name the other coordinator "
                "with --standby-of"
            )
        if journal is None:
            raise UserError(
                "a standby keeps a copy of the journal: name a folder for it with "
                "coordinator.journal"
            )
        folder = Path(self.settings.keys) if self.settings.keys else None

        def connect(timeout_s: float) -> Link:
            return open_link(address, keys=folder, role=STANDBY, timeout_s=timeout_s)

        greetings = await stand_by(
            hub,
            journal,
            address,
            connect,
            leads_on=leads_on,
            strict=not self._said and not leads_on,  # a wrong address or key is told at once
            ready=lambda: self._say(lambda: self._introduce(hub.address, lead=address)),
            progress=self.notifier.progress,
        )
        over = threading.Event()  # one that is taken over from in turn has nothing to tell
        try:
            await self._lead(
                hub, journal, lambda: call_on(connect, hub, journal.term, over), greetings=greetings
            )
        finally:
            over.set()


def _over_tcp(address: str) -> bool:
    return address.startswith("tcp://")


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
    most = byte_count(settings.memory)
    journal = Journal(Segments(folder), keep_s=settings.journal_s, most=most)
    if journal.found:
        log.info("the journal in %s has %d requests to go on with", folder, journal.found)
    return journal
