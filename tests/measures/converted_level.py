"""Measures a level of a head on a device of OpenVINO beside torch and the C++ kernels on the CPU.

    python tests/measures/converted_level.py --hidden 1024 --units 2816
    python tests/measures/converted_level.py --head launch/demo/heads/dovetail

The head has random weights in fp32 for a target of that width, or is the one in a folder, for the
embedded target. A proposal of nine levels of eight rows and one of a single level take turns on the
three sides; a level is an eighth of their difference. Medians of milliseconds, and of the ratios of
pairs with their 95 % intervals.
"""

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[0] = str(TESTS)
if importlib.util.find_spec("dovetail") is None:
    importlib.import_module("conftest")  # gives a bare checkout its import name

import torch  # noqa: E402
from gpu.grown import Shape as Target  # noqa: E402
from gpu.grown import grow  # noqa: E402

from benchmarks.measure import estimate, ratio  # noqa: E402
from dovetail.launch.settings.embedded import DEMO_FOLDER  # noqa: E402
from dovetail.protocol.spans import Spans  # noqa: E402
from dovetail.workers.devices.opening import open_device  # noqa: E402
from dovetail.workers.drafters.converted_head import open_converted_head  # noqa: E402
from dovetail.workers.drafters.head import HeadDrafter  # noqa: E402
from dovetail.workers.heads.head import open_head  # noqa: E402
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint  # noqa: E402
from support.drafts import Timed, of_a_level, wide  # noqa: E402
from support.heads import write_head  # noqa: E402

WIDTH = 8


def level_ms(drafts: Timed) -> float:
    """Return the milliseconds of a level of one pair of proposals."""
    return 1e3 * of_a_level(drafts.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="openvino:CPU")
    parser.add_argument("--kind", default="eagle")
    parser.add_argument("--head", help="a folder, for the embedded target")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--units", type=int, default=2816)
    parser.add_argument("--pairs", type=int, default=25)
    given = parser.parse_args()
    device = open_device(given.device, 1, for_head=True)
    with tempfile.TemporaryDirectory() as folder:
        target, head = str(DEMO_FOLDER / "target"), given.head
        if head is None:
            shape, target = Target(given.hidden, given.units, 9, 32), str(Path(folder, "target"))
            grow(shape, Path(target), torch.device("cpu"))
            size = open_checkpoint(target).vocabulary.size
            head = str(
                write_head(Path(folder, "head"), wide(given.kind, given.hidden, given.units, size))
            )
        how: dict[str, Any] = {"target": target, "weights": "fp32"}
        converted = open_converted_head(head, device=device, **how)
        sides = {
            given.device: HeadDrafter(converted, Spans(), contrast=False, capture=device.capture),
            **{
                name: HeadDrafter(open_head(head, backend=name, **how), Spans(), contrast=False)
                for name in ("library", "kernels")
            },
        }
        drafts = {name: Timed(engine, WIDTH, 0.0) for name, engine in sides.items()}
        for side in drafts.values():
            level_ms(side)
        taken: dict[str, list[float]] = {name: [] for name in drafts}
        for _ in range(given.pairs):
            for name, side in drafts.items():
                taken[name].append(level_ms(side))
    print(f"{device.library}, {WIDTH} rows a level, {given.pairs} turns")
    for name, times in taken.items():
        beside = ratio(times, taken["library"])
        print(f"{name:>14}: {estimate(times).median:.3f} ms a level, {beside} of torch's")


if __name__ == "__main__":
    main()
