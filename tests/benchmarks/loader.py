"""A process that loads one model and tells what that took, memory above what the process held
before (torch alone is hundreds of megabytes), and how fast it then reads its weights."""

import argparse
import ctypes
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.child import obey, timed
from dovetail.workers.kernels import PackedMatrix
from dovetail.workers.kernels.probe import bandwidth_gb_s
from dovetail.workers.models.backends.fused import Kernels
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MAPS = Path("/proc/self/smaps_rollup")
RESET_PEAK = "5"
"""proc(5): sets VmHWM back to what is resident now."""
PR_SET_THP_DISABLE = 41
ROUNDS, PROBE_S = 9, 0.1


def prepare(
    model: Path, weights: str, backend: str, warm_up: Path, threads: int, cache: Path, small: bool
) -> tuple[Any, Any]:
    """`warm_up`: a small model of the same kind that is loaded first, so that libraries are in
    memory and what they keep of their own is not counted. `cache`: where what is found of a model
    is remembered. `small`: without huge pages."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    torch.set_num_threads(threads)
    if small:
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)

    def open_model(source: Path) -> LanguageModel:
        return load_language_model(
            str(source), weights=weights, device="cpu", backend=backend, proof="auto"
        )

    open_model(warm_up)

    def load() -> Mapping[str, Any]:
        before, huge = _memory(STATUS, "VmRSS"), _memory(MAPS, "AnonHugePages")
        CLEAR.write_text(RESET_PEAK, encoding="ascii")
        models: list[LanguageModel] = []
        seconds = timed(lambda: models.append(open_model(model)))
        loaded = models[0]
        read = sum(matrix.nbytes for matrix in weights_of(loaded))
        return {
            "backend": loaded.backend,
            "kernels": loaded.kernels,
            "remembered": bool(loaded.proved),
            **seconds,
            "packed_bytes": read + table_bytes(loaded) if read else None,
            "peak_bytes": _memory(STATUS, "VmHWM") - before,
            "kept_bytes": _memory(STATUS, "VmRSS") - before,
            "huge_bytes": _memory(MAPS, "AnonHugePages") - huge,
            "pass": passes(loaded, read) if read else None,
        }

    return {}, {"load": load}


def passes(model: LanguageModel, size: int) -> Mapping[str, float]:
    """Return the seconds of a pass over one row and of a plain read of so many bytes, medians of
    rounds that take turns."""
    cache, seconds, reads = model.new_cache(1), list[float](), list[float]()
    for _ in range(ROUNDS):
        reads.append(size / bandwidth_gb_s(budget_s=PROBE_S) / 1e9)
        row = (torch.tensor([3]), torch.tensor([0]), [Segment(cache, 0, 1)])
        seconds.append(timed(lambda given=row: model.forward(*given))["wall_s"])
    return {"row_s": median(seconds), "read_s": median(reads)}


def weights_of(model: LanguageModel) -> Iterator[PackedMatrix]:
    """Yield every packed matrix of a model, those of experts too; none on the library."""
    if isinstance(back_end := model.back_end, Kernels):
        for layer in back_end._layers:
            yield from layer.plan.matrices
            if (experts := layer.plan.experts) is not None:
                yield from (experts.router.logits, *experts.gate_up, *experts.down)
        yield back_end._head._matrix


def table_bytes(model: LanguageModel) -> int:
    """Return the bytes of the embedding of tokens."""
    table = model.back_end._model.get_input_embeddings()  # type: ignore[attr-defined]
    return sum(part.nbytes for part in (*table.parameters(), *table.buffers()))


def _memory(file: Path, name: str) -> int:
    """Bytes that a file of /proc tells under a name."""
    lines = file.read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--warm-up", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    obey(lambda: prepare(**vars(arguments)))


if __name__ == "__main__":
    main()
