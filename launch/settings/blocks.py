"""Describes a quantised target, in GGUF files or safetensors: its formats, and what is computed
from them."""

from pathlib import Path

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.settings import TargetSettings
from dovetail.workers import kernels
from dovetail.workers.models.checkpoints.composite import text_part
from dovetail.workers.models.checkpoints.files import read_json
from dovetail.workers.models.checkpoints.footprint import in_blocks
from dovetail.workers.models.checkpoints.gguf.view import blocks_kept, mix_of
from dovetail.workers.models.checkpoints.quantised.schemes import scheme_of

FUNCTIONS = {"fp32": "the file's exact function", "half": "exact for 16-bit files alone"}
"""Weights -> what they compute from a GGUF file; others compute another function."""
BLOCKS = {"int8": "its blocks, times activations in int8", "fp32": FUNCTIONS["fp32"]}
"""Activations -> the function that weights `file` compute."""
LESS = "--weights file takes less"
EXACT, ROUNDED = "the checkpoint's exact weights", "weights rounded once more"


def why_not_blocks(target: TargetSettings) -> str:
    """Return why a target in a GGUF file is not computed from its blocks; empty if it can be, or
    has none."""
    if not in_blocks(Path(target.model)):
        return ""
    alone = "blocks are computed by the C++ kernels alone"
    if target.backend == "library":
        return alone
    return f"{alone}, and {why}" if (why := kernels.why_not()) else ""


def keeps_blocks(target: TargetSettings) -> bool:
    """True if a target is computed from the blocks of its GGUF file by default."""
    return blocks_kept(Path(target.model)) and not why_not_blocks(target)


def blocks_in_words(target: TargetSettings) -> str:
    """Return one line for a quantised target; empty for any other."""
    if not target.model:
        return ""
    folder, weights = Path(target.model).expanduser(), target.weights
    if mix := mix_of(folder):
        other = FUNCTIONS.get(weights, "another function")
        said = BLOCKS[target.activations] if weights == "file" else other
        less = why_not_blocks(target) or (LESS if blocks_kept(folder) else "")
    elif in_blocks(folder):
        mix = "experts in MXFP4"
        exact = {"fp32": EXACT, "half": EXACT, "file": BLOCKS[target.activations]}
        said, less = exact.get(weights, ROUNDED), why_not_blocks(target) or LESS
    elif (mix := _scheme_in(folder)) and weights != "half":  # refused later
        said, less = EXACT if weights == "fp32" else ROUNDED, "--weights int8 takes a quarter"
    else:
        return ""
    remedy = f"; {less}" if weights in ("fp32", "half") and less else ""
    return f"{folder.name} ({mix}) in {weights}, {said}{remedy}"


def _scheme_in(folder: Path) -> str:
    """The quantisation method of a folder's weights; empty if we read none (loading reports it)."""
    try:
        scheme = scheme_of(text_part(read_json(folder / "config.json")))
    except (CheckpointError, ValueError):
        return ""
    return "" if scheme is None else scheme.method
