"""The parts of a fleet: kinds of servers, coordinators, routers, and what a load came to."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dovetail.runtime.fleet.queue import FairQueue
from dovetail.runtime.router.choice import Replica
from simulation.fleet.profile import Profile
from simulation.fleet.server import Server, Session


@dataclass(frozen=True)
class Kind:
    """Servers that are alike, and how they fail. Hours are means of exponential distributions; 0:
    never."""

    name: str
    count: int
    profile: Profile
    alone: Profile  # without a draft, which is what a lost GPU leaves
    idle_w: float
    busy_w: float
    per_node: int = 1  # servers that fail together when their node does
    worker_h: float = 0.0
    worker_back_s: float = 60.0
    node_h: float = 0.0
    node_back_s: float = 600.0
    gpu_h: float = 0.0
    gpu_back_s: float = 3600.0


@dataclass(frozen=True)
class Plan:
    """The layout of a fleet, and who decides."""

    per_coordinator: int
    per_router: int  # coordinators behind each router
    queue: int
    key_queue: int
    request_s: float
    """Seconds of a router for a request; `chunk_s`: for each chunk of its stream, which has the
    tokens of a round."""
    chunk_s: float
    tokens: tuple[float, float]
    """Mean tokens of a prompt and of a reply: a router does not know what a reply will have."""
    begin_s: float = 0.0
    """Seconds of a request beside those of its router and its server: tokenizer, coordinator."""
    coordinator_h: float = 0.0
    coordinator_back_s: float = 5.0
    seed: int = 0


@dataclass
class Group:
    """A coordinator and its servers."""

    servers: list[Server]
    queue: FairQueue[Session]
    room: int
    router: "Router"
    replica: Replica  # the coordinator as its router knows it
    decoding: int = 0  # sessions whose rounds it handles
    held: dict[str, int] = field(default_factory=dict)
    most_busy: float = 0.0

    sessions: int = 0

    @property
    def up(self) -> bool:
        return self.replica.ready

    def tell(self) -> None:
        """Tell the router who waits, if that has changed."""
        replica, queued = self.replica, len(self.queue)
        if queued != replica.load.queued:
            known = replica.in_flight
            replica.load = replace(
                replica.load, sessions=known - queued, queued=queued, in_flight=known
            )


@dataclass
class Router:
    """A router, with what it chooses from and what passes through it."""

    replicas: list[Replica] = field(default_factory=list)
    groups: dict[str, "Group"] = field(default_factory=dict)
    decoding: int = 0
    most_busy: float = 0.0


@dataclass
class Played:
    """The sessions of a load, and what became of the fleet."""

    done: list[tuple[Session, float]]  # with the time at which each ended
    refused: int
    seconds: float  # the length of the window
    busy_s: Sequence[float]
    """By kind, the seconds of all its servers within the window; `tokens` likewise."""
    tokens: Sequence[float]
    router_busy: float
    """Share of its time, of the busiest one at its busiest; `coordinator_busy` likewise."""
    coordinator_busy: float
    failures: dict[str, int]


def handled_s(host_s: float, beside_s: float, sessions: int) -> float:
    """Return how long a round is with its coordinator or router, its waiting included, if so many
    sessions come to it and are elsewhere for `beside_s` between: mean value analysis of a closed
    queue, with Schweitzer's estimate of what an arrival finds (1979)."""
    surplus_s = sessions * host_s - beside_s
    return (surplus_s + math.sqrt(surplus_s**2 + 4.0 * host_s * beside_s)) / 2.0
