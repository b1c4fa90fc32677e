"""A process that loads one model and tells what memory that took, each number above what the
process held before: torch alone is hundreds of megabytes."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.child import obey, timed
from benchmarks.ours import packed_matrices
from dovetail.workers.models.loading import load_language_model

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""proc(5): sets VmHWM back to what is resident now."""


def prepare(folder: Path, weights: str, backend: str, warm_up: Path) -> tuple[Any, Any]:
    """`warm_up`: a small model of the same kind that is loaded first, so that libraries are in
    memory and what they keep of their own is not counted."""
    torch.set_num_threads(1)
    load_language_model(str(warm_up), weights=weights, device="cpu", backend=backend)

    def load() -> Mapping[str, Any]:
        before = _memory("VmRSS")
        CLEAR.write_text(RESET_PEAK, encoding="ascii")
        models = []
        seconds = timed(
            lambda: models.append(
                load_language_model(str(folder), weights=weights, device="cpu", backend=backend)
            )
        )
        packed = sum(matrix.nbytes for matrix in packed_matrices(models[0]))
        told = {
            "backend": models[0].backend,
            "kernels": models[0].kernels,
            "seconds": seconds["wall_s"],
        }
        return {
            **told,
            "packed_bytes": packed or None,
            "peak_bytes": _memory("VmHWM") - before,
            "kept_bytes": _memory("VmRSS") - before,
        }

    return {}, {"load": load}


def _memory(name: str) -> int:
    """Bytes that /proc/self/status tells under a name."""
    line = next(
        line
        for line in STATUS.read_text(encoding="ascii").splitlines()
        if line.startswith(f"{name}:")
    )
    return 1024 * int(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--warm-up", type=Path, required=True)
    arguments = parser.parse_args()
    obey(lambda: prepare(**vars(arguments)))


if __name__ == "__main__":
    main()
