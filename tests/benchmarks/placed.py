"""A process that places one target under limits, has it read a long prompt and verify large trees,
and tells what that took beside what placement counted.

Anonymous memory counts, above what the process held before: torch alone is hundreds of megabytes,
and the pages of a checkpoint are the system's to take back. On a GPU it is what torch has reserved
there, and the target is placed twice: what the first time leaves of itself in the host's memory is
that of libraries, of CUDA's context and of a proof that is remembered.
"""

import argparse
import ctypes
import gc
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.child import obey
from dovetail.protocol.memory import release_memory
from dovetail.protocol.messages import VerifyItem
from dovetail.protocol.noise import session_key
from dovetail.protocol.settings import (
    MemorySettings,
    Sampling,
    SplitSettings,
    TargetSettings,
    TreeSettings,
)
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import TokenTree
from dovetail.workers.devices.opening import open_device
from dovetail.workers.models.backends.placement import Placement
from dovetail.workers.models.checkpoints.footprint import CACHED_ROWS
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.serving.spread import spread_of
from dovetail.workers.verifier import Verifier
from pretended.device import MEMORY
from support.opening import opening

M_MMAP_THRESHOLD, LARGE = -3, 1 << 16
"""glibc's parameter, and a size in bytes."""
STATUS = Path("/proc/self/status")
LOOK_S = 0.002
NODES = 288
"""The size of SubSpec's beam."""
ROUNDS = 3
BRANCHES = 6


class Peak:
    """The most anonymous memory of this process while a block is in force."""

    def __init__(self) -> None:
        self.bytes = anonymous_bytes()
        self._over = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        watcher = threading.Thread(target=self._watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            self._over.set()
            watcher.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self.bytes = max(self.bytes, anonymous_bytes())


def anonymous_bytes() -> int:
    """Return this process's own memory, without that of the pretended device."""
    elsewhere = MEMORY.used
    line = next(
        line
        for line in STATUS.read_text(encoding="ascii").splitlines()
        if line.startswith("RssAnon:")
    )
    return 1024 * int(line.split()[1]) - elsewhere


def prepare(folder: Path, warm_up: Path, weights: str, device: str) -> tuple[Any, Any]:
    """`warm_up`: a small model that is loaded first, so that libraries are in memory and what they
    keep of their own is not counted."""
    if device != "cpu":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)  # what is freed is the system's again
    load_language_model(str(warm_up), weights="fp32", device="cpu", backend="kernels")
    release_memory()

    def place(layers: int | None, resident: int | None, vram: str) -> Mapping[str, Any]:
        if device != "cpu":
            once(layers, resident, vram)
            gc.collect()
            release_memory()
            _forget_most(device)
        return once(layers, resident, vram)

    def once(layers: int | None, resident: int | None, vram: str) -> Mapping[str, Any]:
        split = SplitSettings(device=device, layers="auto" if layers is None else layers)
        target = TargetSettings(
            model=str(folder),
            weights=weights,
            split=split,
            resident="auto" if resident is None else resident,
        )
        spread = spread_of(target, MemorySettings(vram=vram), open_device("cpu", 1), 1)
        assert spread is not None
        before, peak = anonymous_bytes(), Peak()
        with peak.watched():
            model = load_language_model(
                str(folder), weights=weights, device="cpu", stage=spread.stage, cache=spread.cache
            )
            loaded = anonymous_bytes() - before
            work(Verifier(model, Spans()), model.context, model.vocabulary_size)
        placement = spread.placement
        assert isinstance(placement, Placement)
        told = {
            "placement": str(placement),
            "device_bytes": placement.device_bytes,
            "host_bytes": placement.host_bytes,
        }
        return {
            **told,
            "loaded_bytes": loaded,
            "peak_bytes": peak.bytes - before,
            "reserved_bytes": _most(device),
        }

    return {}, {"place": place}


def _most(device: str) -> int | None:
    """Return the most that was taken of a device's memory; None: it is the host's."""
    if device == "cpu":
        return None
    return MEMORY.most if device == "pretended" else torch.cuda.max_memory_reserved()


def _forget_most(device: str) -> None:
    """Count the most that is taken of a device from now on."""
    if device == "pretended":
        MEMORY.most = MEMORY.used
    else:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def work(verifier: Verifier, context: int, size: int) -> None:
    """One conversation as long as is counted: a prompt that leaves room for some rounds, then
    trees, with everything that a sampled session has done to it."""
    rounds = ROUNDS * 4
    capacity = min(context, CACHED_ROWS - NODES)
    prompt = [token % size for token in range(capacity - rounds)]
    tree = TreeSettings(
        policy="beam", insist=True, gamma=NODES, depth=NODES // BRANCHES, width=BRANCHES
    )
    sampling = Sampling(temperature=1.0, top_p=0.95, repetition_penalty=1.1, min_tokens=rounds)
    for _ in verifier.open(
        opening(
            1,
            prompt,
            key=session_key(1, 0, prompt),
            capacity=capacity,
            sampling=sampling,
            tree=tree,
        )
    ):
        pass
    nodes = TokenTree(
        tuple(node % size for node in range(NODES)),
        tuple(node - BRANCHES if node >= BRANCHES else -1 for node in range(NODES)),
    )
    for number in range(1, ROUNDS + 1):
        log, _, _ = verifier.lend(1)
        verifier.verify(
            [
                VerifyItem(
                    session=1,
                    round=number,
                    prefix=len(log),
                    tokens=nodes.tokens,
                    parents=nodes.parents,
                )
            ]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--warm-up", type=Path, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    obey(lambda: prepare(**vars(arguments)))


if __name__ == "__main__":
    main()
