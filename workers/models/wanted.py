"""The model to load, and the types that weights can have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.settings import BACKENDS, cache_of
from dovetail.workers.kernels import BUILD, Kind
from dovetail.workers.kernels.layer_plan import CODES
from dovetail.workers.models.backends import packing
from dovetail.workers.models.backends.sizes import Matrices
from dovetail.workers.models.backends.staged import Staging
from dovetail.workers.models.cache import HALF
from dovetail.workers.models.checkpoints.checkpoint import Checkpoint
from dovetail.workers.models.checkpoints.composite import text_part
from dovetail.workers.models.checkpoints.files import read_json
from dovetail.workers.models.checkpoints.quantised.searched import TYPES
from dovetail.workers.models.checkpoints.stored import FLOAT_TYPES

WEIGHTS = ("fp32", "half", "int8", "int4", "file", "bf16", "fp16", "int8-per-tensor", "stored")
"""`stored`, for drafts: the checkpoint's blocks or 16 bits if the kernels have them, else fp32."""
GPU_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FILE_KINDS = {"file-int8": Kind.BLOCKS, "file-fp32": Kind.EXACT_BLOCKS}
"""The kinds of matrices for weights `file`, by the type of activations."""
BLOCK_WEIGHTS = {**FILE_KINDS, **dict(zip(TYPES, FILE_KINDS.values(), strict=True))}
"""The kinds of matrices for weights `file` and `int4`, by the type of activations."""
KINDS = {
    "fp32": Kind.FP32,
    "fp16": Kind.FP16,
    "bf16": Kind.BF16,
    "int8": Kind.INT8,
    **BLOCK_WEIGHTS,
}
"""The kernels' kind of matrix for weights of a type; `half` is one of the two 16-bit types."""
LINEAR_TYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.float32,
    "int8-per-tensor": torch.float32,
    **dict.fromkeys(TYPES, torch.float16),
}


def check_names(weights: str, backend: str) -> None:
    if weights not in WEIGHTS:
        raise CheckpointError(f"no weights of type {weights!r}; choose {' or '.join(WEIGHTS)}")
    if backend not in BACKENDS:
        raise CheckpointError(f"no back end {backend!r}; choose {' or '.join(BACKENDS)}")


def type_of(weights: str, checkpoint: Checkpoint, activations: str = "int8") -> str:
    """Return `weights` with half, file, int4 and stored replaced by the checkpoint's types."""
    own, in_blocks = f"file-{activations}", checkpoint.has_blocks
    if weights == "int4":
        if in_blocks:
            raise checkpoint.refusal("its numbers are blocks already: use weights file")
        return f"int4-{activations}"
    if weights == "file" and not in_blocks:
        raise checkpoint.refusal("it has no blocks (GGUF, MXFP4): use weights fp32, half or int8")
    if weights == "file" or (
        weights == "stored" and in_blocks and not packing.reason_against(KINDS[own])
    ):
        return own
    if weights not in ("half", "stored"):
        return weights
    kinds = {
        stored.kind
        for stored in checkpoint.tensors.values()
        if len(stored.shape) == 2 and stored.kind in FLOAT_TYPES
    }
    name = {"F16": "fp16", "BF16": "bf16"}.get("".join(kinds))
    if weights == "stored":
        return "fp32" if name is None or packing.reason_against(KINDS[name]) else name
    if name is not None:
        return name
    found = " and ".join(sorted(kinds)) or "none"
    remedy = "fp32 or int8" if checkpoint.is_coded else "fp32, or convert it to F16"
    if in_blocks:
        found, remedy = "blocks", f"file, {remedy}"
    need = "half weights need a checkpoint of 16-bit weights"
    raise checkpoint.refusal(f"{need}, this one has {found}: use weights {remedy}")


def _configured_type(weights: str, folder: Path) -> str:
    """Return the type according to a config.json's dtype; 16 bits if it has none."""
    if weights == "file":
        raise CheckpointError(f"{folder}: random weights are no blocks of a file; use weights int8")
    if weights == "int4":
        return "int4-int8"
    if weights not in ("half", "stored"):
        return weights
    file = folder if folder.is_file() else folder / "config.json"
    content = text_part(read_json(file))
    name = {"bfloat16": "bf16", "float16": "fp16", "None": "fp16"}.get(
        str(content.get("dtype") or content.get("torch_dtype"))
    )
    if name is not None:
        return name
    if weights == "stored":
        return "fp32"
    text = "half weights need a checkpoint of 16-bit weights, and this one's are not (dtype)"
    raise CheckpointError(f"{file}: {text}; use weights fp32")


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
        types = {"fp32": torch.float32, "half": HALF, "q8": CODES}
        return types[cache_of(self.cache, self.asked)]

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
        if self.cache in ("half", "q8"):
            text = f"target.cache = {self.cache!r} needs the C++ kernels, and {why_not}"
            raise CheckpointError(f"{source}: {text}: leave it out, or use fp32")

    def refuse_library(self, source: str, why_not: str) -> None:
        """`CheckpointError` if settings insist on the kernels or their weights; `why_not`: none
        here."""
        use = "or use" if BUILD in why_not else "use"
        if self.backend == "kernels":
            other = "backend library and weights fp32" if self.rounded else "backend library"
            raise CheckpointError(f"{source}: {why_not}; {use} {other}")
        if self.rounded:
            what, others = f"{self.asked} weights", "fp32"
            if self.weights == "bf16":
                what, others = "half weights of a BF16 checkpoint", "fp32 or bf16"
            use = "leave target.backend out, or use" if self.backend == "library" else use
            need = f"{what} need the C++ kernels, and {why_not}"
            raise CheckpointError(f"{source}: {need}; {use} weights {others}")
