"""Measures a level of a draft's tree on a device: milliseconds, and what the host asks for.

    python tests/measures/draft_level.py --device cuda:0 --weights fp16,int8,int4
    python tests/measures/draft_level.py --device cuda:0 --kind substitute --weights int8,int4

A head of random weights drafts for a target of the shape of a 7B model, whose layers are not read;
with `--kind substitute` a substitute of nine such layers does. `--hidden` and `--units` make both
smaller. The time of a level is that of a proposal of nine levels less that of one, divided by
eight: rows, graph, ranking and growth of the tree with all that Python does. Beside it stand the
milliseconds in which the memory of the device is read at its full rate for the weights of a level.
On a CUDA device the launches, graphs, copies and waits of one proposal of nine levels are counted,
and the microseconds in which the device computes are added up. Times are medians.
"""

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[0] = str(TESTS)
if importlib.util.find_spec("dovetail") is None:
    importlib.import_module("conftest")  # gives a bare checkout its import name

import torch  # noqa: E402
from gpu.chip import memory_gb_s  # noqa: E402
from gpu.grown import Shape as Target  # noqa: E402
from gpu.grown import grow  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from dovetail.protocol.settings import DraftSettings  # noqa: E402
from dovetail.workers.devices import open_device  # noqa: E402
from dovetail.workers.drafters.head import HeadDrafter  # noqa: E402
from dovetail.workers.drafters.model import Drafter  # noqa: E402
from dovetail.workers.drafters.registry import open_draft_worker  # noqa: E402
from dovetail.workers.kernels.coded import GROUP  # noqa: E402
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint  # noqa: E402
from dovetail.workers.models.substitutes import kept  # noqa: E402
from dovetail.workers.models.substitutes.quantised import nearest_codes  # noqa: E402
from dovetail.workers.models.substitutes.quantize import BITS  # noqa: E402
from support.drafts import Drafts  # noqa: E402
from support.heads import VARIANTS, Variant, write_head  # noqa: E402

DEEP, SHALLOW, WIDTHS, TIMES = 9, 1, (1, 8), 15
BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 20 / 32}
KINDS = {
    "launches": ("LaunchKernel",),
    "graphs": ("GraphLaunch",),
    "copies": ("cudaMemcpy",),
    "waits": ("Synchronize",),
}
"""A kind of call -> words in the names of the runtime's functions that make it."""


def variant(kind: str, target: Target, vocabulary: int) -> Variant:
    """Return a head for a target of this shape."""
    heads = target.hidden // 128 or 1
    taps = {"taps": (0, 1, 1), "draft_vocabulary": vocabulary // 4} if kind == "eagle3" else {}
    sizes = {
        "hidden": target.hidden,
        "target_width": target.hidden,
        "vocabulary": vocabulary,
        "draft_vocabulary": vocabulary,
        "heads": heads,
        "kv_heads": max(1, heads // 4),
        "head_dim": 128,
        "intermediate": target.units,
        "gain": 1.0,
        "dtype": torch.float16,
        "own_embedding": False,
    }
    return replace(VARIANTS[kind], **{**sizes, **taps})  # type: ignore[arg-type]


class Timed(Drafts):
    """Proposals that are timed, or looked into."""

    def once(self, depth: int, *, look: bool = False) -> tuple[float, profile | None]:
        """Return the seconds of a proposal of so many levels; `look`: 0 and what was asked for
        meanwhile."""
        self.begin(depth)
        if look:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
                self.draft()
            return 0.0, seen
        torch.zeros(1, device=device_of(self.engine)).item()  # what came before is over
        began = time.perf_counter()
        self.draft()
        return time.perf_counter() - began, None


def device_of(engine: HeadDrafter | Drafter) -> torch.device:
    return engine.head.device if isinstance(engine, HeadDrafter) else engine.model.device


def median_ms(drafts: Timed, depth: int) -> float:
    for _ in range(3):
        drafts.once(depth)
    return 1e3 * statistics.median(drafts.once(depth)[0] for _ in range(TIMES))


def counts(seen: profile) -> str:
    """Say what a profile has counted."""
    events = seen.key_averages()
    found = {
        what: sum(e.count for e in events if any(word in e.key for word in words))
        for what, words in KINDS.items()
    }
    device_us = sum(e.self_device_time_total for e in events if not e.self_cpu_time_total)
    return ", ".join(f"{count} {what}" for what, count in found.items()) + f", {device_us:.0f} us"


def measure(engine: HeadDrafter | Drafter, weights: str, bytes_: float, gb_s: float) -> None:
    for width in WIDTHS:
        for temperature in (0.0, 1.0):
            drafts = Timed(engine, width, temperature)
            deep, shallow = (median_ms(drafts, depth) for depth in (DEEP, SHALLOW))
            level = (deep - shallow) / (DEEP - SHALLOW)
            least = 1e3 * bytes_ / (1e9 * gb_s)
            print(
                f"{weights:>5} {width} rows T = {temperature:g}: {level:.3f} ms a level, memory "
                f"{least:.3f}; root and one level {shallow:.3f} ms",
                flush=True,
            )
            if device_of(engine).type == "cuda":
                seen = drafts.once(DEEP, look=True)[1]
                assert seen is not None
                print(f"      of {DEEP} levels: {counts(seen)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--kind", default="eagle", help="of a head, or substitute")
    parser.add_argument("--weights", default="", help="fp16,int8,int4, or int4 of a substitute")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--units", type=int, default=11008)
    given = parser.parse_args()
    device = open_device(given.device, 4)
    target, apart = Target(given.hidden, given.units, 9), given.kind == "substitute"
    if apart and importlib.util.find_spec("hqq") is None:  # other codes take the same time
        kept.check_installed = lambda: None
        kept.quantise = lambda weight, _bits, device: nearest_codes(weight, device)
    with tempfile.TemporaryDirectory() as folder:
        made_on = device.torch_device if device.torch_device.type == "cuda" else "cpu"
        grow(target, Path(folder, "target"), torch.device(made_on))
        vocabulary = open_checkpoint(str(Path(folder, "target"))).vocabulary.size
        settings = DraftSettings(kind="substitute", device=given.device, ahead=False)
        if not apart:
            head = write_head(Path(folder, "head"), variant(given.kind, target, vocabulary))
            settings = DraftSettings(model=str(head), device=given.device, ahead=False)
        gb_s = memory_gb_s(device.torch_device, 1 << 28)
        output, mlp = vocabulary * target.hidden, 3 * target.hidden * target.units
        for weights in (given.weights or ("int4" if apart else "fp16,int8,int4")).split(","):
            engine = open_draft_worker(
                settings.model_copy(update={"weights": weights}),
                name=weights,
                threads=4,
                target=str(Path(folder, "target")),
            ).engine
            assert isinstance(engine, HeadDrafter | Drafter)
            if apart:
                size = target.bytes / 2 * (BITS[weights] / 8 + 4 / GROUP) + BYTES["fp16"] * output
            else:  # fusion, output, queries and a quarter as many keys and values; MLP
                size = BYTES[weights] * (4.5 * target.hidden**2 + mlp + output)
            measure(engine, weights, size, gb_s)


if __name__ == "__main__":
    main()
