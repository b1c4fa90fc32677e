"""The model to load."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.settings import cache_of
from dovetail.workers.models.backends.sizes import Matrices
from dovetail.workers.models.backends.staged import Staging
from dovetail.workers.models.cache import HALF
from dovetail.workers.models.weight_types import BLOCK_WEIGHTS

Stager = Callable[[Mapping[str, Any], str, Matrices], Staging]
"""(configuration, weights, matrices) -> how the model is spread over devices."""


@dataclass(frozen=True)
class Wanted:
    """The model to load."""

    asked: str  # the type of weights, as in the settings
    weights: str  # the type of weights, `half` being one of the two 16-bit types
    backend: str
    profile: Path | None = None
    stage: Stager | None = None
    cache: str = "fp32"  # the type of keys and values: one of `protocol.settings.CACHES`
    proof: str = "off"  # one of `protocol.settings.PROOFS`: whether a remembered proof is enough

    @property
    def cache_type(self) -> torch.dtype:
        """Return the type of keys and values if the kernels compute the model."""
        return HALF if cache_of(self.cache, self.asked) == "half" else torch.float32

    @property
    def rounded(self) -> bool:
        """Return whether only the kernels, if they have it, have weights of this type."""
        return self.weights in ("int8", *BLOCK_WEIGHTS) or (
            self.weights == "bf16" and self.asked == "half"
        )

    def refuse_placement(self, source: str, why_not: str) -> None:
        """`CheckpointError` for placements and caches that need the kernels; `why_not`: none
        here."""
        if self.stage is not None:
            raise CheckpointError(
                f"{source}: only what the C++ kernels can compute is split or streamed, and "
                f"{why_not}; leave target.split, target.resident, target.prefill and memory.vram "
                "out"
            )
        if self.cache == "half":
            raise CheckpointError(
                f"{source}: target.cache = 'half' needs the C++ kernels, and {why_not}: leave it "
                "out, or use fp32"
            )

    def refuse_library(self, source: str, why_not: str) -> None:
        """`CheckpointError` if settings insist on the kernels or their weights; `why_not`: none
        here."""
        if self.backend == "kernels":
            other = "backend library and weights fp32" if self.rounded else "backend library"
            raise CheckpointError(f"{source}: {why_not}; or use {other}")
        if self.weights == "int8" and self.backend == "library":
            raise CheckpointError(
                f"{source}: target.backend = 'library' has no int8 weights: leave it out, or use "
                "weights fp32"
            )
        if self.weights == "int8" or self.weights in BLOCK_WEIGHTS:
            raise CheckpointError(
                f"{source}: {self.asked} weights need the C++ kernels, and {why_not}; or use "
                "weights fp32"
            )
        if self.rounded:
            raise CheckpointError(
                f"{source}: half weights of a BF16 checkpoint need the C++ kernels, and {why_not}; "
                "or use weights fp32 or bf16"
            )
