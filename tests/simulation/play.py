"""Plays recorded replies through the real coordinator and the real draft worker, with the costs of
some machine.

One `Stage` is one stack: its workers and coordinator learn as they would, from reply to reply.
Knows nothing of files and tables.
"""

from dataclasses import dataclass

from dovetail.launch.planning.acceptance import About, Library, Recording
from dovetail.protocol.codec import REPLY, encode
from dovetail.protocol.errors import DovetailError
from dovetail.protocol.messages import (
    Failed,
    Finished,
    Hello,
    Recorded,
    Reply,
    Result,
    RoundRecord,
    Submit,
)
from dovetail.protocol.settings import TreeSettings
from dovetail.runtime.engine.coordinator import Coordinator
from simulation.clockwork import Agenda, Clock, Process, Simulated, StillHub
from simulation.draft import Coverage, open_draft
from simulation.prices import PlacedCosts
from simulation.target import Language, RecordedTarget

TARGET, DRAFT, CLIENT = b"\1target", b"\2draft", b"\3client"
EPOCH = 3
TICK_S = 0.25  # interval between two ticks of the coordinator's loop


@dataclass(frozen=True)
class Play:
    """The result of one reply."""

    recording: Recording
    result: Result
    rounds: tuple[RoundRecord, ...]


@dataclass(frozen=True)
class Actor:
    """A worker, and the clock that its work advances."""

    worker: Simulated
    clock: Clock


class Stage:
    """A coordinator, a target, a draft and a client on simulated clocks."""

    def __init__(self, about: About, costs: PlacedCosts, target: Actor, draft: Actor) -> None:
        """Both workers are registered when this returns."""
        self._about = about
        self._agenda = Agenda()
        self._hub = StillHub(self._agenda, costs.messages)
        self._coordinator = Coordinator(self._hub, clock_ns=self._hub.time, later=self._hub.later)
        self._hub.pump = self._coordinator.pump
        self._hub.join(CLIENT, self._hear)
        self._heard: list[Reply] = []
        self._requests = 0
        self._post(
            Hello(epoch=EPOCH, roles=("client",), name="client", host="client.simulated", pid=3)
        )
        for peer, actor in ((TARGET, target), (DRAFT, draft)):
            Process(peer, actor.worker, actor.clock, self._hub).start()
        while self._agenda.step():
            pass

    def play(
        self,
        recording: Recording,
        tree: TreeSettings,
        *,
        speculate: bool = True,
        ahead: bool | None = None,
        records: bool = False,
    ) -> Play:
        """Decode one reply as it was recorded; `DovetailError` if the coordinator refuses to."""
        about = self._about
        self._requests += 1
        self._heard.clear()
        self._post(
            Submit(
                epoch=EPOCH,
                request=self._requests,
                tokens=recording.prompt,
                sampling=about.sampling,
                max_tokens=min(about.max_tokens, about.context - len(recording.prompt)),
                seed=about.seed,
                tree=tree,
                speculate=speculate,
                record=records,
                ahead=ahead,
            )
        )
        self._tick_later()
        while not (self._heard and isinstance(self._heard[-1], Finished | Failed)):
            if not self._agenda.step():
                raise DovetailError(
                    "the simulation came to a halt: nobody has anything to do, and the reply "
                    "is not finished"
                )
        last = self._heard[-1]
        if isinstance(last, Failed):
            raise DovetailError(f"the simulated request failed: {last.text}")
        assert isinstance(last, Finished)
        if last.result.token_ids != recording.tokens:
            raise DovetailError(
                f"the simulation of {recording.id!r} came to other tokens than were recorded"
            )
        return Play(
            recording,
            last.result,
            tuple(reply.record for reply in self._heard if isinstance(reply, Recorded)),
        )

    def _post(self, message: Hello | Submit) -> None:
        self._hub.post(CLIENT, encode(message), self._hub.clock())

    def _hear(self, frames: list[bytes], _time_ns: int) -> None:
        self._heard.append(REPLY.decode(frames))

    def _tick_later(self) -> None:
        """The coordinator's loop, as long as there is a session."""

        def tick() -> None:
            self._coordinator.tick()
            if not self._coordinator.idle:
                self._tick_later()

        self._hub.later(TICK_S, tick)


def open_stage(library: Library, costs: PlacedCosts) -> tuple[Stage, Coverage]:
    """A stage whose workers have said before what they say, and what becomes known of how much of
    it was recorded."""
    about, coverage, clocks = library.about, Coverage(), (Clock(), Clock())
    target = RecordedTarget(about, Language.of(about), library.recordings, costs, clocks[0])
    draft = open_draft(about, library.recordings, costs, clocks[1], coverage)
    return Stage(about, costs, Actor(target, clocks[0]), Actor(draft, clocks[1])), coverage


def play_all(
    library: Library,
    costs: PlacedCosts,
    tree: TreeSettings,
    *,
    speculate: bool = True,
    ahead: bool | None = None,
) -> tuple[list[Play], Coverage]:
    """Every reply of a library in turn, on one stage."""
    stage, coverage = open_stage(library, costs)
    return [
        stage.play(recording, tree, speculate=speculate, ahead=ahead)
        for recording in library.recordings
    ], coverage
