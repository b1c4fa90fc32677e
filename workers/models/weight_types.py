"""The types that weights can have, and the type of a checkpoint's own weights."""

from pathlib import Path

import torch

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.settings import BACKENDS
from dovetail.workers.kernels import Kind
from dovetail.workers.models.backends import packing
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
        raise CheckpointError(
            f"there are no weights of type {weights!r} here; choose {' or '.join(WEIGHTS)}"
        )
    if backend not in BACKENDS:
        raise CheckpointError(f"there is no back end {backend!r}; choose {' or '.join(BACKENDS)}")


def type_of(weights: str, checkpoint: Checkpoint, activations: str = "int8") -> str:
    """Return `weights` with half, file, int4 and stored replaced by the checkpoint's types."""
    own = f"file-{activations}"
    if weights == "int4":
        _refuse_search(checkpoint)
        return f"int4-{activations}"
    if weights == "file" and not checkpoint.has_blocks:
        raise CheckpointError(
            f"{checkpoint.source}: weights file are the blocks of a GGUF file or of experts in "
            "MXFP4, and this model has none: use weights fp32, half or int8"
        )
    in_blocks = checkpoint.has_blocks
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
    raise CheckpointError(
        f"{checkpoint.source}: half weights need a checkpoint of 16-bit weights, this one has "
        f"{found}: use weights {remedy}"
    )


def _refuse_search(checkpoint: Checkpoint) -> None:
    if checkpoint.has_blocks:
        raise CheckpointError(
            f"{checkpoint.source}: its numbers are blocks already, which weights int4 would round "
            "once more: use weights file"
        )


def _configured_type(weights: str, folder: Path) -> str:
    """Return the type according to a config.json's dtype; 16 bits if it has none."""
    if weights == "file":
        raise CheckpointError(
            f"{folder}: weights file are the blocks of a file, and random weights, as a "
            "calibration takes them, are in none; use weights int8"
        )
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
    raise CheckpointError(
        f"{file}: half weights need a checkpoint of 16-bit weights, and this one's are not "
        "(dtype); use weights fp32"
    )
