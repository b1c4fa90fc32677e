"""The model that is asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dovetail.protocol.settings import cache_of
from dovetail.workers.models.backends.sizes import Matrices
from dovetail.workers.models.backends.staged import Staging
from dovetail.workers.models.cache import HALF

Stager = Callable[[Mapping[str, Any], str, Matrices], Staging]
"""A function that says how a model of a configuration (config.json's) with weights of a type (fp32,
fp16, bf16 or int8), and with these matrices, is to be spread over devices."""


@dataclass(frozen=True)
class Wanted:
    """The model that is asked for."""

    asked: str
    """The type of weights in the words of the settings."""
    weights: str
    """The type of weights, `half` being one of the two 16-bit types."""
    backend: str
    inflate_bytes: int = 0
    profile: Path | None = None
    stage: Stager | None = None
    cache: str = "fp32"
    """The type of keys and values: one of `protocol.settings.CACHES`."""
    proof: str = "off"
    """One of `protocol.settings.PROOFS`: whether a remembered proof is enough."""

    @property
    def cache_type(self) -> torch.dtype:
        """Return the type of keys and values, where the kernels compute the model."""
        return HALF if cache_of(self.cache, self.asked) == "half" else torch.float32
