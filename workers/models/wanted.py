"""The model that is asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.workers.models.backends.staged import Staging

Stager = Callable[[Mapping[str, Any], str], Staging]
"""A function that says how a model of a configuration (config.json's) with weights of a type (fp32,
fp16, bf16 or int8) is to be spread over devices."""


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
    proof: str = "off"
    """One of `protocol.settings.PROOFS`: whether a remembered proof is enough."""
