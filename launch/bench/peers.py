"""Peers: other engines that `dovetail bench` measures, with the same models on the same cores. They
are not installed: a checkout has them in `tests/peers`."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from dovetail.launch.machine.cores import CoreLayout
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.messages import Result
from dovetail.protocol.settings import Sampling, Settings

CHECKOUT = Path(__file__).resolve().parents[2] / "tests"
NAMES = ("assisted", "llama.cpp", "llama-server")


@dataclass(frozen=True)
class PeerReply:
    """A reply of a peer. Its first `together` tokens came with the first round, which also computed
    the prompt."""

    result: Result
    together: int


class Peer(Protocol):
    """An engine in a separate process."""

    @property
    def identity(self) -> str:
        """The engine that decodes; the models come from the settings."""

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """The numbers of threads that it is measured with."""

    def decode(
        self, turns: Sequence[str], *, sampling: Sampling, max_tokens: int, seed: int, threads: int
    ) -> PeerReply:
        """Decode one reply to its end."""

    def peak_rss_mb(self) -> float:
        """The most memory that it ever held, in 10^6 bytes."""

    def close(self) -> None:
        """End the connection; the process ends with its supervisor."""


@dataclass
class Room:
    """Resources that the peers of a run share."""

    supervisor: Supervisor
    programs: Mapping[str, Path | None]
    """Method -> the program or the Python that the command line names for it."""
    made: dict[str, Any] = field(default_factory=dict)  # what peers create once and share


class PeerKind(Protocol):
    """A kind of peer, which a method names."""

    @property
    def exact(self) -> bool:
        """Whether it computes the target's own tokens at temperature 0."""

    @property
    def defaults(self) -> Any:
        """Its default options, a dataclass."""

    def read_option(self, options: Any, text: str) -> Any:
        """Return the options with "NAME=VALUE" applied; None if the peer has no such option,
        `UserError` for an invalid value."""

    def weights(self, settings: Settings) -> str:
        """Return the type of weights it computes with, in the engine's own terms."""

    def check(self, settings: Settings, options: Any, cores: Sequence[int]) -> None:
        """Raise `UserError` for settings that the peer does not implement as we do."""

    def find(self, program: Path | None) -> None:
        """Raise `UserError` if a named or required program is missing."""

    def open(
        self, room: Room, configuration: Configuration, layout: CoreLayout, options: Any
    ) -> Peer:
        """Start its process and return when it is ready."""


@cache
def peers() -> Mapping[str, PeerKind]:
    """Return the kinds of peers by the names of their methods; empty outside a checkout."""
    if not (CHECKOUT / "peers").is_dir():
        return {}
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))
    paths = (os.environ.get("PYTHONPATH"), str(CHECKOUT))  # for their processes
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    kinds: Mapping[str, PeerKind] = import_module("peers.kinds").KINDS
    return kinds
