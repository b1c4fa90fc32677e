"""The types of weights that a target can have on this machine, and the function that each
computes."""

from collections.abc import Sequence
from pathlib import Path

from dovetail.launch.planning.designs import read_config
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.experts import count_experts
from dovetail.workers import kernels
from dovetail.workers.models.backends.sizes import INT4
from dovetail.workers.models.checkpoints.composite import text_part
from dovetail.workers.models.checkpoints.files import read_json
from dovetail.workers.models.checkpoints.footprint import (
    Tensor,
    half_of,
    in_blocks,
    in_pieces,
    read_tensors,
)
from dovetail.workers.models.checkpoints.gguf.view import FILE
from dovetail.workers.models.families.names import DESCRIBED

LOSSES = {
    "fp32": "the checkpoint's function",
    "half": "the checkpoint's function; keys and values in fp16 move logits by 1e-4 to 2e-3",
    "int8": "another function: logits move by about 4 %",
    INT4: "another function: logits move by about 10 %; the first load takes longer",
    FILE: "the file's blocks; activations in int8 move logits by about 1 %",
}
"""Types of weights, and their loss of accuracy in words: measured on the embedded target (`dovetail
selftest --card`)."""
EXACT = "the file's function; keys and values in fp16 move logits by 1e-4 to 2e-3"
"""Weights `file` with activations in fp32, in words."""


def on_kernels(folder: Path) -> bool:
    """Return whether the kernels are here and compute models of a folder's family."""
    if not kernels.available():
        return False
    return text_part(read_json(folder / "config.json")).get("model_type") in DESCRIBED


def planned_types(configuration: Configuration, folder: Path) -> list[str]:
    """Return the types of weights to plan with: the one that is named, or all that the target in a
    folder can have, its own numbers first."""
    target = configuration.settings.target
    if configuration.given("target.weights"):
        return [target.weights]
    if target.backend == "library" or not on_kernels(folder):
        return ["fp32"]
    half = _in_16_bits(folder, read_tensors(folder))
    plain = [*(["half"] if half else []), "fp32", "int8"]
    if in_blocks(folder):
        return [FILE, *plain]
    whole = count_experts(read_config(folder, "target model"))[0] > 1 and not in_pieces(folder)
    return plain if whole else [*plain, INT4]


def _in_16_bits(folder: Path, tensors: Sequence[Tensor]) -> bool:
    if tensors:
        return half_of(tensors)
    config = read_config(folder, "target model")
    return str(config.get("dtype") or config.get("torch_dtype")).endswith("16")


def loss_of(weights: str, activations: str) -> str:
    """Describe the loss of accuracy with weights of a type; empty if nothing was measured."""
    return EXACT if (weights, activations) == (FILE, "fp32") else LOSSES.get(weights, "")
