"""Measures the milliseconds that the host takes for a level of a draft's tree beside the device, on
a machine without a GPU.

    python tests/measures/host_level.py                # a head, and a small model of 22 layers
    python tests/measures/host_level.py --kind eagle --look

The CPU stands for a device: what a graph would compute is computed once, and a replay returns it
again. What is left is rows, copies, ranking and growth of the tree, with all that Python does. The
time of a level is that of a proposal of nine levels less that of one, divided by eight; times are
medians of the processor's time. `--look` lists where Python spends it.
"""

import argparse
import cProfile
import importlib.util
import pstats
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[0] = str(TESTS)
if importlib.util.find_spec("dovetail") is None:
    importlib.import_module("conftest")  # gives a bare checkout its import name

import torch  # noqa: E402

from dovetail.workers.drafters.head import HeadDrafter  # noqa: E402
from dovetail.workers.drafters.model import Drafter  # noqa: E402
from support.drafts import DEEP, Drafts, of_a_level, opened  # noqa: E402

BUDGETS_MS = {"eagle": 0.25, "eagle3": 0.25, "dovetail": 0.25, "jakiro": 0.25, "small": 0.4}
WIDTHS, TIMES, WARM = (1, 8), 41, 3


@dataclass(frozen=True)
class Drafted:
    """A level of a draft, as it is measured."""

    engine: HeadDrafter | Drafter
    width: int
    temperature: float

    def ms(self) -> float:
        """Return the host's time of a level."""
        return of_a_level(self._proposal_ms)

    def _proposal_ms(self, depth: int) -> float:
        drafts, found = Drafts(self.engine, self.width, self.temperature), []
        for _ in range(WARM + TIMES):
            drafts.begin(depth)
            began = time.process_time_ns()
            drafts.draft()
            found.append(time.process_time_ns() - began)
        return statistics.median(found[WARM:]) / 1e6

    def look(self) -> None:
        """List where Python spends the time of proposals of nine levels."""
        drafts, seen = Drafts(self.engine, self.width, self.temperature), cProfile.Profile()
        for number in range(WARM + TIMES):
            drafts.begin(DEEP)
            seen.runcall(drafts.draft) if number >= WARM else drafts.draft()
        pstats.Stats(seen).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=BUDGETS_MS, help="kind of draft; all if left out")
    parser.add_argument("--look", action="store_true", help="list where the time goes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for kind in [given.kind] if given.kind else BUDGETS_MS:
        with tempfile.TemporaryDirectory() as folder:
            engine = opened(kind, Path(folder))
        for width in WIDTHS:
            greedy, sampled = (Drafted(engine, width, temperature).ms() for temperature in (0, 1))
            print(
                f"{kind:>8} {width} rows: {greedy:.3f} ms of the host a level at T = 0, "
                f"{sampled:.3f} at T = 1; at most {BUDGETS_MS[kind]} is the aim",
                flush=True,
            )
        if given.look:
            Drafted(engine, WIDTHS[-1], 0.0).look()


if __name__ == "__main__":
    main()
