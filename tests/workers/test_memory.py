"""The memory of a target that is placed under limits: no more than its placement counted, and not
far less."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.child import Side
from support.inflated import kept_pair
from support.kernels import needs_kernels
from support.models import tiny_llama

LIBRARIES = 32 << 20
"""Bytes that libraries may take of the host's memory beside a target that a GPU computes, for a
moment: functions that are loaded when they are needed, and buffers that copies pass through."""
SIZE = "192MiB"
LIMITS = {
    "all on the device": {"layers": 16, "resident": None, "vram": "auto"},
    "split": {"layers": 5, "resident": None, "vram": "auto"},
    "streamed": {"layers": 16, "resident": 0, "vram": "auto"},
    "mixed": {"layers": 9, "resident": 4, "vram": "auto"},
    "as much as 150 MB hold": {"layers": 16, "resident": None, "vram": "150MB"},
    "a split as large as 100 MB hold": {"layers": None, "resident": None, "vram": "100MB"},
}


def measured(
    folder: Path,
    small: Path,
    weights: str,
    device: str,
    limit: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what one target takes, beside what its placement counted."""
    with Side(
        "placed",
        (
            str(folder),
            "--warm-up",
            str(small),
            "--weights",
            weights,
            "--device",
            device,
        ),
    ) as side:
        told = side.ask("place", **limit)
    counted = told["host_bytes"] + (told["device_bytes"] if device == "cpu" else LIBRARIES)
    kept = told["peak_bytes"] <= counted and (told["reserved_bytes"] or 0) <= told["device_bytes"]
    return {**told, "counted_bytes": counted, "share": told["peak_bytes"] / counted, "holds": kept}


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp32", "half"])
@pytest.mark.parametrize("limit", LIMITS)
def test_a_target_takes_what_its_placement_counted_and_no_more(
    tmp_path: Path, limit: str, weights: str
) -> None:
    found = measured(
        kept_pair(SIZE) / "target", tiny_llama(tmp_path), weights, "cpu", LIMITS[limit]
    )
    assert found["holds"], found
    assert found["share"] > 0.6, found


@needs_kernels
@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cuda:0", marks=pytest.mark.gpu),
        pytest.param("pretended", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("vram", ["150MB", "250MB", "auto"])
def test_a_gpu_reserves_no_more_than_was_counted(tmp_path: Path, device: str, vram: str) -> None:
    """Nor does the host, which lets go of what lies on the GPU."""
    found = measured(
        kept_pair(SIZE) / "target",
        tiny_llama(tmp_path, dtype=torch.float16),
        "half",
        device,
        {"layers": 16, "resident": None, "vram": vram},
    )
    assert found["reserved_bytes"] > 0.4 * found["device_bytes"]
    assert found["holds"], "\n".join(f"{name}: {value}" for name, value in found.items())
