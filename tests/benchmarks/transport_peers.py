"""The processes of the transport's measurement: a bare relay, and workers that answer at once."""

import os
import secrets
import select
import socket
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import click

from dovetail.launch.machine.binding import Place, bind
from dovetail.launch.machine.cores import parse_cores
from dovetail.launch.processes.child import end_when_told, end_with
from dovetail.launch.settings.embedded import DEMO_FOLDER
from dovetail.protocol.arrays import Array
from dovetail.protocol.codec import COMMAND, encode
from dovetail.protocol.errors import LinkError
from dovetail.protocol.links import Hub, Link, open_hub, open_link
from dovetail.protocol.messages import (
    MAX_TOKENS,
    Close,
    Closed,
    Command,
    Draft,
    Drafted,
    Drain,
    Fingerprint,
    Hello,
    Limits,
    Message,
    Open,
    Opened,
    Probe,
    Probed,
    SpanFields,
    Verified,
    VerifiedItem,
    Verify,
    VocabularyFacts,
)
from dovetail.protocol.vocabulary import read_vocabulary, vocabulary_digest

Role = Literal["draft", "target"]
NODES = 15
ACCEPTED = 2
"""Nodes that the echo target accepts of every tree: the tau of a fair draft, 3."""
FIRST_TOKEN = 300
NO_SPANS: SpanFields = (("echo", 0, 0),)
"""Spans as long as the ones that a worker of the real coordinator sends."""
RELAY_POLL_S = 1.0


# -- the processes ---------------------------------------------------------------------------------


@click.group()
def processes() -> None:
    """The processes of the measurement."""


@processes.command()
@click.option("--cores", required=True)
@click.option("--parent", type=int, required=True)
def relay(cores: str, parent: int) -> None:
    """Forward frames between the two echo workers, undecoded, as a coordinator would at best."""
    end_with(parent)
    end_when_told()
    bind(Place(parse_cores(cores)))
    hub = open_hub("ipc")
    try:
        click.echo(hub.address)
        _forward(hub)
    finally:
        hub.close()


def _forward(hub: Hub) -> None:
    """Draft to target, target to draft, until the client says end. Its "run" goes to the draft,
    whose "done" comes back to it."""
    workers: dict[bytes, bytes] = {}
    other: dict[bytes, bytes] = {}
    early: list[tuple[bytes, list[bytes]]] = []
    client = b""
    for peer, frames in _messages(hub):
        if peer in other:
            hub.send(client if frames[0] == b"done" else other[peer], frames)
        elif frames[0] in (b"draft", b"target"):
            workers[frames[0]] = peer
            if len(workers) == 2:
                other = {
                    workers[b"draft"]: workers[b"target"],
                    workers[b"target"]: workers[b"draft"],
                }
                for asker, waiting in early:
                    client = asker
                    hub.send(workers[b"draft"], waiting)
        elif frames[0] == b"end":
            for worker in other:
                hub.send(worker, frames)
            return
        elif not other:
            early.append((peer, frames))
        else:
            client = peer
            hub.send(workers[b"draft"], frames)


def _messages(hub: Hub) -> Iterator[tuple[bytes, list[bytes]]]:
    """Everything that arrives."""
    poller = select.poll()
    poller.register(hub.fileno(), select.POLLIN)
    while True:
        while (arrived := hub.receive()) is not None:
            yield arrived
        poller.poll(RELAY_POLL_S * 1000)


@processes.command()
@click.option("--role", type=click.Choice(["draft", "target"]), required=True)
@click.option("--behind", type=click.Choice(["coordinator", "relay"]), required=True)
@click.option("--connect", required=True)
@click.option("--stamps", type=click.Path(path_type=Path), required=True)
@click.option("--cores", required=True)
@click.option("--parent", type=int, required=True)
def echo(role: Role, behind: str, connect: str, stamps: Path, cores: str, parent: int) -> None:
    """A worker that answers at once and notes when."""
    end_with(parent)
    end_when_told()
    bind(Place(parse_cores(cores)))
    link = open_link(connect, role=role)
    worker = _Echo(link, role)
    try:
        with suppress(LinkError):
            worker.serve() if behind == "coordinator" else worker.bounce()
        with stamps.open("wb") as file:
            worker.stamps.tofile(file)
    finally:
        link.close()


class _Echo:
    """Proposes the same tree and gives the same verdict in every round."""

    def __init__(self, link: Link, role: Role) -> None:
        self._link, self._role = link, role
        self._epoch = secrets.randbits(62)
        self.stamps = array("q")
        """(arrival, departure) in nanoseconds of every round."""

    def serve(self) -> None:
        """Work for a real coordinator until it says Drain."""
        self._link.send(encode(self._hello()))
        while True:
            frames = self._link.receive(None)
            arrived_ns = time.monotonic_ns()
            assert frames is not None
            command = COMMAND.decode(frames)
            if isinstance(command, Drain):
                return
            answer = self._answer(command, arrived_ns)
            if answer is None:
                continue
            encoded = encode(answer)
            if isinstance(command, Draft | Verify):
                self.stamps.extend((arrived_ns, time.monotonic_ns()))
            self._link.send(encoded)

    def bounce(self) -> None:
        """Behind the relay: answer whatever comes with a message of this role, until it says end.
        The draft counts the rounds."""
        self._link.send([self._role.encode()])
        answer = encode(
            self._proposal(0, 1, NO_SPANS)
            if self._role == "draft"
            else self._verdict(0, 1, NO_SPANS)
        )
        left = 0
        while True:
            frames = self._link.receive(None)
            arrived_ns = time.monotonic_ns()
            assert frames is not None
            if frames[0] == b"end":
                return
            if frames[0] == b"run":
                left = int(frames[1])
            elif self._role == "draft" and left == 0:
                self._link.send([b"done"])
                continue
            left -= self._role == "draft"
            self.stamps.extend((arrived_ns, time.monotonic_ns()))
            self._link.send(answer)

    def _answer(self, command: Command, arrived_ns: int) -> Message | None:
        spans = (
            (
                "draft" if self._role == "draft" else "verify",
                arrived_ns,
                time.monotonic_ns() - arrived_ns,
            ),
        )
        match command:
            case Open():
                return Opened(
                    epoch=self._epoch,
                    session=command.session,
                    bonus=FIRST_TOKEN if self._role == "target" else None,
                    margin=1.0,
                )
            case Draft():
                return self._proposal(command.session, command.round, spans)
            case Verify():
                return self._verdict(command.items[0].session, command.items[0].round, spans)
            case Probe():
                now_ns = time.monotonic_ns()
                return Probed(
                    epoch=self._epoch,
                    sent_ns=command.sent_ns,
                    clock_ns=now_ns,
                    busy_ns=0,
                    stale=0,
                    sessions=1,
                    rss_bytes=0,
                )
            case Close():
                return Closed(epoch=self._epoch, session=command.session)
        return None

    def _proposal(self, session: int, round_: int, spans: SpanFields) -> Drafted:
        """A path of as many nodes as are accepted, and the rest beside it."""
        parents = (*range(-1, ACCEPTED - 1), *[-1] * (NODES - ACCEPTED))
        scores = tuple(-float(n) for n in range(NODES))
        tokens = tuple(range(FIRST_TOKEN, FIRST_TOKEN + NODES))
        return Drafted(
            epoch=self._epoch,
            session=session,
            round=round_,
            tokens=tokens,
            parents=parents,
            scores=scores,
            grown=NODES,
            hit=False,
            spans=spans,
        )

    def _verdict(self, session: int, round_: int, spans: SpanFields) -> Verified:
        accepted = tuple(range(ACCEPTED))
        item = VerifiedItem(
            session=session,
            round=round_,
            accepted=accepted,
            bonus=FIRST_TOKEN,
            margins=(1.0,) * (ACCEPTED + 1),
        )
        return Verified(epoch=self._epoch, items=(item,), spans=spans)

    def _hello(self) -> Hello:
        tokenizer = (DEMO_FOLDER / "target" / "tokenizer.json").read_bytes()
        vocabulary = read_vocabulary(tokenizer)
        return Hello(
            epoch=self._epoch,
            roles=(self._role,),
            name=f"{self._role}-echo",
            host=socket.gethostname(),
            pid=os.getpid(),
            model="echo",
            fingerprint=Fingerprint(checkpoint="echo", weights="none", kernels="none"),
            limits=Limits(context=MAX_TOKENS),
            vocabulary=VocabularyFacts(
                digest=vocabulary_digest(vocabulary), size=max(vocabulary) + 1
            ),
            tokenizer=Array(dtype="uint8", shape=(len(tokenizer),), data=tokenizer),
        )


if __name__ == "__main__":
    processes()
