"""What a round costs beside the work: the coordinator and its links, measured from outside with
workers that answer at once.

Two echo workers note when a command arrives and when its answer leaves, on the monotonic clock that
all processes of a machine share. What passes between a draft's answer and the target's command, and
between the target's answer and the draft's next command, is four hops and the coordinator. The same
workers then speak through a bare relay that only forwards frames: that is the four hops alone. Both
arrangements stay up and take turns.

`python -m dovetail.launch.bench.transport echo|relay` are the processes; nothing here is
imported by the runtime, and nothing imports torch.
"""

import os
import secrets
import select
import socket
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import numpy as np
from numpy.typing import NDArray

from dovetail.launch.machine.binding import Place, bind
from dovetail.launch.machine.cores import lay_out_here, parse_cores
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes.child import end_when_told, end_with
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.embedded import DEMO_FOLDER
from dovetail.protocol.arrays import Array
from dovetail.protocol.codec import COMMAND, encode
from dovetail.protocol.errors import DovetailError, LinkClosed, LinkError
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
    Result,
    SpanFields,
    Verified,
    VerifiedItem,
    Verify,
    VocabularyFacts,
)
from dovetail.protocol.settings import TreeSettings
from dovetail.protocol.vocabulary import read_vocabulary, vocabulary_digest
from dovetail.runtime.client import Client

Role = Literal["draft", "target"]

SEGMENTS = 4
"""Turns that each arrangement takes."""
WARM_ROUNDS = 50
NODES = 15
ACCEPTED = 2
"""Nodes that the echo target accepts of every tree: the tau of a fair draft, 3."""
FIRST_TOKEN = 300
NO_SPANS: SpanFields = (("echo", 0, 0),)
"""As long as the ones that a worker of the real coordinator sends."""
COORDINATOR_LIMIT_US, TRANSPORT_LIMIT_US = 150.0, 400.0
START_TIMEOUT_S = 30.0
RELAY_POLL_S = 1.0
MODULE = "dovetail.launch.bench.transport"


@dataclass(frozen=True)
class Overhead:
    """Microseconds a round. `outside` is everything beside the workers: four hops and the
    coordinator; `transport` the four hops alone."""

    rounds: int
    outside_us: float
    outside_p99_us: float
    transport_us: float
    transport_p99_us: float
    own_coordinator_us: float
    own_transport_us: float

    @property
    def coordinator_us(self) -> float:
        """Of the medians."""
        return self.outside_us - self.transport_us

    @property
    def coordinator_p99_us(self) -> float:
        """From above: the slowest rounds of the whole against the median of the hops."""
        return self.outside_p99_us - self.transport_us

    def as_json(self) -> dict[str, float | int | bool]:
        return {
            "coordinator_us": self.coordinator_us,
            "coordinator_p99_us": self.coordinator_p99_us,
            "transport_us": self.transport_us,
            "transport_p99_us": self.transport_p99_us,
            "outside_us": self.outside_us,
            "outside_p99_us": self.outside_p99_us,
            "own_coordinator_us": self.own_coordinator_us,
            "own_transport_us": self.own_transport_us,
            "rounds": self.rounds,
            "coordinator_limit_us": COORDINATOR_LIMIT_US,
            "transport_limit_us": TRANSPORT_LIMIT_US,
            "ok": self.coordinator_us <= COORDINATOR_LIMIT_US
            and self.transport_us <= TRANSPORT_LIMIT_US,
        }


def measure_overhead(rounds: int) -> Overhead:
    """Measure that many rounds of each arrangement, in turns, on the cores that the processes of a
    real stack would have."""
    per_segment = max(1, rounds // SEGMENTS)
    with (
        Supervisor() as supervisor,
        tempfile.TemporaryDirectory(prefix="dovetail-transport-") as folder,
    ):
        real = _Arrangement(supervisor, "coordinator", Path(folder))
        bare = _Arrangement(supervisor, "relay", Path(folder))
        results = []
        with real.client() as client, bare.starter() as start:
            _wait_for_workers(supervisor, client)
            for _ in range(SEGMENTS):
                results.append(_segment(client, per_segment))
                start(per_segment)
            client.stop()
        outside, hops = real.gaps(per_segment), bare.gaps(per_segment)
    total = sum(result.rounds for result in results)
    return Overhead(
        rounds=len(outside),
        outside_us=float(np.median(outside)),
        outside_p99_us=float(np.quantile(outside, 0.99)),
        transport_us=float(np.median(hops)),
        transport_p99_us=float(np.quantile(hops, 0.99)),
        own_coordinator_us=1e6 * sum(result.coordinator_s for result in results) / total,
        own_transport_us=1e6 * sum(result.transport_s for result in results) / total,
    )


def _segment(client: Client, rounds: int) -> Result:
    """Decode so many rounds through the real coordinator."""
    tree = TreeSettings(policy="dynamic", insist=True, gamma=NODES, depth=8, width=10)
    request = client.submit(
        tokens=[FIRST_TOKEN] * 16, max_tokens=1 + rounds * (ACCEPTED + 1), tree=tree, seed=0
    )
    return client.complete(request).result


def _wait_for_workers(supervisor: Supervisor, client: Client) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while len(client.status().workers) < 2:
        supervisor.check()
        if time.monotonic() > deadline:
            raise DovetailError(f"the echo workers did not register within {START_TIMEOUT_S:.0f} s")
        time.sleep(0.05)


class _Arrangement:
    """Two echo workers around a hub: the real coordinator or the bare relay."""

    def __init__(
        self, supervisor: Supervisor, hub: Literal["coordinator", "relay"], folder: Path
    ) -> None:
        layout = lay_out_here()
        if hub == "coordinator":
            self._address = supervisor.start_coordinator(layout.coordinator.cores)
        else:
            self._address = supervisor.start_hub(
                "relay",
                ["relay", f"--cores={format_numbers(layout.coordinator.cores)}"],
                module=MODULE,
            )
        self._stamps: dict[Role, Path] = {
            "draft": folder / f"{hub}-draft",
            "target": folder / f"{hub}-target",
        }
        cores: dict[Role, Sequence[int]] = {
            "draft": layout.draft.cores,
            "target": layout.target.cores,
        }
        self._workers = []
        for role, path in self._stamps.items():
            place = [
                f"--connect={self._address}",
                f"--stamps={path}",
                f"--cores={format_numbers(cores[role])}",
            ]
            self._workers.append(
                supervisor.start(
                    f"{role} echo",
                    ["echo", f"--role={role}", f"--behind={hub}", *place],
                    module=MODULE,
                )
            )

    def client(self) -> Client:
        return Client(open_link(self._address, role="client"))

    @contextmanager
    def starter(self) -> Iterator[Callable[[int], None]]:
        """A call that has the relay's workers go so many rounds and returns when they have."""
        link = open_link(
            self._address, role="client"
        )  # the relay hears of it when both workers are there

        def start(rounds: int) -> None:
            link.send([b"run", str(rounds).encode()])
            if link.receive(START_TIMEOUT_S) != [b"done"]:
                raise DovetailError(
                    f"the relay did not finish {rounds} rounds within {START_TIMEOUT_S:.0f} s"
                )

        try:
            yield start
            link.send([b"end"])
            link.receive(START_TIMEOUT_S)
        except LinkClosed:
            return
        finally:
            link.close()

    def gaps(self, per_segment: int) -> NDArray[np.float64]:
        """Microseconds outside the workers of every round but a segment's first ones and its last,
        which no draft follows."""
        for worker in self._workers:
            worker.process.wait(START_TIMEOUT_S)
        draft, target = (
            np.fromfile(self._stamps[role], dtype=np.int64).reshape(-1, 2)
            for role in ("draft", "target")
        )
        if len(draft) != len(target) or len(draft) != SEGMENTS * per_segment:
            raise DovetailError(
                f"the echo workers saw {len(draft)} and {len(target)} rounds of "
                f"{SEGMENTS * per_segment}: nothing can be said"
            )
        there = (target[:, 0] - draft[:, 1]).reshape(SEGMENTS, per_segment)
        back = (draft[1:, 0] - target[:-1, 1]).tolist()
        back_by_segment = np.array([*back, 0]).reshape(SEGMENTS, per_segment)
        warm = min(WARM_ROUNDS, per_segment // 2)
        gaps: NDArray[np.float64] = (there + back_by_segment)[:, warm:-1].reshape(-1) / 1000.0
        return gaps


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
        """As a worker of a real coordinator, until it says Drain."""
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
