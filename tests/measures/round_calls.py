"""Measures what the coordinator does in a round: its calls, its moves between files, its time.

    python tests/measures/round_calls.py

A real coordinator decodes with scripted workers in virtual time. Calls are counted by
`sys.setprofile`, from the arrival of a verdict until the next Draft is sent, and from the arrival
of a proposal until its Verify is sent. A call is one of a named function in protocol or runtime; a
move is a call from one of these files into another, and returns are counted beside it. Microseconds
are the coordinator's processor time from one verdict to the next, without profiling, for each
session in the pass: those that a worker waits for, from the arrival of an answer until the first
command behind it leaves, and all of them, with what is done while workers compute. Counts are
exact; times are of this machine at this hour.
"""

import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

TESTS = Path(__file__).resolve().parent.parent
if str(TESTS) not in sys.path:
    sys.path[0] = str(TESTS)
if importlib.util.find_spec("dovetail") is None:
    importlib.import_module("conftest")  # gives a bare checkout its import name

from dovetail.protocol.codec import COMMAND, EVENT  # noqa: E402
from dovetail.protocol.messages import Draft, Drafted, Verified, Verify  # noqa: E402
from support.loaded import CLIENT, FIXED, Crowded, Pace  # noqa: E402

ROOMS = "/protocol/", "/runtime/"
"""Folders of the files that are counted; the scripted workers and their hub are in others."""
FOLLOWS: dict[type, type] = {Verified: Draft, Drafted: Verify}  # the command that follows an answer
PROMPTS = range(8, 248, 8)  # tokens of the first prompt of each run
WARM = 3  # passes of a run that are not looked at


@dataclass
class Calls:
    """Calls, files and moves between files since a message arrived."""

    calls: int = 0
    files: set[str] = field(default_factory=set)
    moves: int = 0  # calls from one file into another
    returns: int = 0  # returns from one file into another
    _stack: list[str] = field(default_factory=list)

    def hear(self, frame: FrameType, what: str, _: object) -> None:
        """Count an event of `sys.setprofile`."""
        file = frame.f_code.co_filename
        inner = frame.f_code.co_name.startswith("<")  # a comprehension, or a lambda
        if inner or "/tests/" in file or not any(room in file for room in ROOMS):
            return
        if what == "call":
            self.calls += 1
            self.files.add(file)
            self.moves += bool(self._stack) and self._stack[-1] != file
            self._stack.append(file)
        elif what == "return" and self._stack:
            self._stack.pop()
            self.returns += bool(self._stack) and self._stack[-1] != file


def crowd() -> Crowded:
    """A coordinator whose workers wait for nothing but each other."""
    return Crowded(Pace(level_s=1e-5, hop_s=1e-5, right=lambda *_: 0.7), profiled=True)


def arriving(house: Crowded) -> object:
    """The event that is to be handled next, None if it is no worker's."""
    peer, frames = house.hub._arrived[0]
    known = peer in house.coordinator.registry.workers
    return EVENT.decode(frames) if known else None


def count(prompt: int) -> dict[type, list[Calls]]:
    """The calls of one session's rounds, by what arrived."""
    house, found = crowd(), dict[type, list[Calls]]({kind: [] for kind in FOLLOWS})
    pump, send = house.hub.pump, house.hub.send
    kind: type | None = None
    calls = Calls()

    def counted() -> None:
        nonlocal kind, calls
        event = arriving(house)
        kind, calls = (type(event), Calls()) if type(event) in FOLLOWS else (None, calls)
        sys.setprofile(calls.hear if kind else None)
        pump()
        sys.setprofile(None)

    def noted(peer: bytes, frames: Sequence[bytes]) -> None:
        nonlocal kind
        heard = sys.getprofile()
        sys.setprofile(None)
        if kind and peer != CLIENT and isinstance(COMMAND.decode(frames), FOLLOWS[kind]):
            found[kind].append(calls)
            kind = heard = None
        send(peer, frames)
        sys.setprofile(heard)

    house.hub.pump, house.hub.send = counted, noted  # type: ignore[method-assign]
    house.run(1, 200, tree=FIXED, prompt=prompt)
    return {kind: several[WARM:] for kind, several in found.items()}


def spend(sessions: int, prompt: int) -> list[tuple[float, float]]:
    """Microseconds of the coordinator's processor time a session, until workers were asked and in
    all, for every round with all of them in its pass."""
    house, found = crowd(), list[tuple[float, float]]()
    pump, send = house.hub.pump, house.hub.send
    spent_ns = waited_ns = passes = items = 0
    began_ns = asked_ns = 0

    def timed() -> None:
        nonlocal spent_ns, waited_ns, passes, items, began_ns, asked_ns
        event = arriving(house)
        if isinstance(event, Verified):
            if items == len(event.items) == sessions and passes > WARM:
                found.append((waited_ns / sessions / 1000, spent_ns / sessions / 1000))
            spent_ns, waited_ns, passes, items = 0, 0, passes + 1, len(event.items)
        asked_ns, began_ns = 0, time.thread_time_ns()
        pump()
        spent_ns += time.thread_time_ns() - began_ns
        waited_ns += asked_ns

    def noted(peer: bytes, frames: Sequence[bytes]) -> None:
        nonlocal asked_ns
        if peer != CLIENT and not asked_ns:
            asked_ns = time.thread_time_ns() - began_ns
        send(peer, frames)

    house.hub.pump, house.hub.send = timed, noted  # type: ignore[method-assign]
    house.run(sessions, 200, tree=FIXED, prompt=prompt)
    return found


def main() -> None:
    gc.freeze()  # as the coordinator's loop does before it serves
    say: Callable[[str], object] = lambda line: sys.stdout.write(line + "\n")  # noqa: E731
    runs = [count(prompt) for prompt in PROMPTS[:5]]
    say(f"{'medians':34}{'calls':>8}{'files':>8}{'moves':>8}{'returns':>9}{'rounds':>8}")
    for kind, command in FOLLOWS.items():
        rounds = [calls for run in runs for calls in run[kind]]
        medians = [
            statistics.median(values)
            for values in zip(
                *((one.calls, len(one.files), one.moves, one.returns) for one in rounds),
                strict=True,
            )
        ]
        calls, files, moves, returns = medians
        name = f"from {kind.__name__} to {command.__name__}"
        say(f"{name:34}{calls:8.0f}{files:8.0f}{moves:8.0f}{returns:9.0f}{len(rounds):8}")
    for sessions in (1, 8):
        times = [us for prompt in PROMPTS for us in spend(sessions, prompt)]
        for what, several in zip(("waited for", "in all"), zip(*times, strict=True), strict=True):
            name = f"us a session, {sessions} in a pass, {what}"
            say(f"{name:42}{statistics.median(several):8.0f}{'':17}{len(several):8}")


if __name__ == "__main__":
    main()
