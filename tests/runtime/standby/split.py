"""Splits of a network between a coordinator, its standby, and the workers with the HTTP API, each a
machine that is a network namespace: run in a network of its own by `test_split.py`, with the name
of a story.

Whatever is cut, the streams that run have the texts that they would have had, and what each
coordinator does is in its log.
"""

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from dovetail.protocol.keys import generate_keys
from support.by_hand import SLOWER, Doubled, Stream, bodies, elsewhere, ended, together
from support.machines import Machine, network

PORT = 5555
CUT_S = 6.0
"""Longer than everything that a cut could set off."""
TAKES_OVER, LAPSES, DEPOSED = "taking over", "commands nobody until", "it has been taken over from"
COPIES = "is copied"
STREAMS, TOKENS = 4, 200


class Split:
    """The service, and the machines that its coordinators are on."""

    def __init__(self, service: Doubled, first: Machine, second: Machine) -> None:
        self.service, self.first, self.second = service, first, second
        self.asked = bodies(STREAMS, TOKENS)
        self.whole = [Stream(body).read(service.url).outcome for body in self.asked]
        assert all(reason == "length" for _, reason, _ in self.whole), self.whole

    def stream_through(self, harm: Callable[[], object]) -> float:
        """Return the longest pause of streams during which something happens."""
        streams, threads = together(self.service, self.asked)
        while not all(stream.heard_s for stream in streams):
            time.sleep(0.01)
        harm()
        for thread in threads:
            thread.join()
        assert [stream.outcome for stream in streams] == self.whole
        return max(stream.longest_pause_s for stream in streams)

    def says(self, name: str, words: str) -> None:
        """Wait until a coordinator has said something."""
        said = self.service.said
        self.service.until(lambda: words in said(name), f"{name} does not say {words!r}")

    def check_workers(self) -> None:
        """Both workers serve the coordinator that the HTTP API knows."""
        state = httpx.get(f"{self.service.url}/readyz", trust_env=False).json()
        assert state["ready"], state


def first_cut_off(split: Split, **cut: bool) -> str:
    """The first is cut off: the second takes over, and the first, which commands nobody meanwhile,
    steps down when the cut is mended and is its standby from then on, also when it is started
    again as the first was."""
    pause_s = split.stream_through(lambda: split.first.lose(**cut))
    split.says("second", TAKES_OVER)
    split.says("first", LAPSES)
    split.service.until_ready()
    split.first.lose()
    split.says("first", DEPOSED)
    split.says("first", COPIES)
    split.stream_through(lambda: None)
    split.check_workers()
    before = split.service.said("second")
    split.service.kill("first")
    copied = split.service.said("first").count(COPIES)
    split.service.lead("first")
    split.service.until(
        lambda: split.service.said("first").count(COPIES) > copied, "the first follows nobody"
    )
    told = split.service.said("second").removeprefix(before)
    left = re.search(r"(draft|target) worker ", told)
    assert left is None, f"somebody has left the second: {told}"
    split.check_workers()
    return f"longest pause {pause_s:.2f} s"


def first_cut_off_both_ways(split: Split) -> str:
    """Nothing gets through."""
    return first_cut_off(split, to=True, back=True)


def first_not_heard(split: Split) -> str:
    """All that the first says is lost, and what it is told is not."""
    return first_cut_off(split, back=True)


def first_deaf(split: Split) -> str:
    """All that the first is told is lost, and what it says is not."""
    return first_cut_off(split, to=True)


def second_cut_off(split: Split) -> str:
    """The standby is cut off: the first goes on, and the standby copies anew afterwards."""
    copies = split.service.said("second").count(COPIES)

    def cut() -> None:
        split.second.lose(to=True, back=True)
        time.sleep(CUT_S)  # how long it lasts is the fault
        split.second.lose()

    pause_s = split.stream_through(cut)
    split.service.until(
        lambda: split.service.said("second").count(COPIES) > copies, "no copy is made again"
    )
    assert TAKES_OVER not in split.service.said("second")
    assert LAPSES not in split.service.said("first")
    split.service.until_ready()
    return f"longest pause {pause_s:.2f} s"


def coordinators_apart(split: Split) -> str:
    """The coordinators do not hear each other, and the workers hear both: the first goes on."""
    copies = split.service.said("second").count(COPIES)
    way = ("ip", "route")
    pause_s = split.stream_through(
        lambda: (
            split.second.run(*way, "add", "blackhole", split.first.there),
            time.sleep(CUT_S),  # how long it lasts is the fault
            split.second.run(*way, "delete", "blackhole", split.first.there),
        )
    )
    split.service.until(
        lambda: split.service.said("second").count(COPIES) > copies, "no copy is made again"
    )
    assert TAKES_OVER not in split.service.said("second")
    assert LAPSES not in split.service.said("first")
    return f"longest pause {pause_s:.2f} s"


STORIES = {
    story.__name__: story
    for story in (
        first_cut_off_both_ways,
        first_not_heard,
        first_deaf,
        second_cut_off,
        coordinators_apart,
    )
}


@contextmanager
def split_service(folder: Path) -> Iterator[Split]:
    """Two coordinators and both workers on three machines; the HTTP API is here, in their
    middle."""
    generate_keys(folder / "keys")
    with network(3, routed=True) as (first, second, third):
        service = Doubled(folder, ())
        service.addresses = {
            name: f"tcp://{machine.there}:{PORT}"
            for name, machine in (("first", first), ("second", second))
        }
        places = {"first": first, "second": second, "target": third, "draft": third}
        service.machines = {name: [*one.prefix, *elsewhere(name)] for name, one in places.items()}
        with ended(service):
            service.lead("first")
            service.work(SLOWER)
            service.serve_http()
            service.until_ready()
            service.stand_by("second", "first")
            yield Split(service, first, second)


if __name__ == "__main__":
    with TemporaryDirectory(prefix="dovetail-split-") as place, split_service(Path(place)) as house:
        try:
            print(STORIES[sys.argv[1]](house))
        except AssertionError:
            for one in house.service.addresses:
                sys.stderr.write(f"{one}: {house.service.said(one)}\n")
            raise
