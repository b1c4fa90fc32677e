"""The command `transport`: what coordinator and links cost a round, measured from outside with
workers that answer at once.

Two echo workers note when a command arrives and when its answer leaves, on the monotonic clock that
all processes of a machine share. What passes between a draft's answer and the target's command, and
between the target's answer and the draft's next command, is four hops and the coordinator. The same
workers then speak through a bare relay that only forwards frames: that is the four hops alone. Both
arrangements stay up and take turns.

The processes are `python -m benchmarks.transport_peers echo|relay`; nothing imports torch.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.child import TESTS
from benchmarks.options import Command, option, options, report
from benchmarks.transport_peers import ACCEPTED, FIRST_TOKEN, NODES, Role
from dovetail.launch.console.terminal import print_table
from dovetail.launch.machine.cores import lay_out_here
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes.supervise import Supervisor
from dovetail.protocol.errors import DovetailError, LinkClosed
from dovetail.protocol.links import open_link
from dovetail.protocol.messages import Result
from dovetail.protocol.settings import TreeSettings
from dovetail.runtime.client import Client

SEGMENTS = 4
"""Turns that each arrangement takes."""
WARM_ROUNDS = 50
COORDINATOR_LIMIT_US, TRANSPORT_LIMIT_US = 150.0, 400.0
START_TIMEOUT_S = 30.0
MODULE = "benchmarks.transport_peers"


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
        """Return the difference of the medians."""
        return self.outside_us - self.transport_us

    @property
    def coordinator_p99_us(self) -> float:
        """The coordinator's share estimated from above: the slowest rounds of the whole against the
        median of the hops."""
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


@click.command(cls=Command)
@option("--rounds", type=click.IntRange(min=40), default=4000, help="Rounds that are measured.")
@options("json")
def transport(rounds: int, as_json: bool) -> None:
    """Microseconds of a round beside the work: coordinator and links, with workers that answer at
    once."""
    overhead = measure_overhead(rounds)
    report(overhead.as_json(), as_json, lambda: show(overhead))


def show(overhead: Overhead) -> None:
    """Print the table."""
    hops = (overhead.transport_us, overhead.transport_p99_us, overhead.own_transport_us)
    both_own = overhead.own_coordinator_us + overhead.own_transport_us
    rows = [
        (
            "coordinator",
            overhead.coordinator_us,
            overhead.coordinator_p99_us,
            overhead.own_coordinator_us,
        ),
        ("transport, four hops", *hops),
        ("both", overhead.outside_us, overhead.outside_p99_us, both_own),
    ]
    print_table(
        (f"us a round, {overhead.rounds} rounds", "median", "p99", "coordinator's own mean"), rows
    )


def measure_overhead(rounds: int) -> Overhead:
    """Measure that many rounds of each arrangement, in turns, on the cores that the processes of a
    real stack would have."""
    per_segment = max(1, rounds // SEGMENTS)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))
    )
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
