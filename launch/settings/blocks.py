"""A quantised target in words, in GGUF files or safetensors: its formats, and what is computed of
them."""

from pathlib import Path

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.settings import TargetSettings
from dovetail.workers.models.checkpoints.composite import text_part
from dovetail.workers.models.checkpoints.files import read_json
from dovetail.workers.models.checkpoints.gguf.view import mix_of
from dovetail.workers.models.checkpoints.quantised.schemes import scheme_of

FUNCTIONS = {"fp32": "the file's exact function", "half": "exact for 16-bit files alone"}
"""Weights -> what they compute of a GGUF file; others compute another function."""
BLOCKS = {"int8": "its blocks, times activations in int8", "fp32": FUNCTIONS["fp32"]}
"""Activations -> what weights `file` compute."""
EXACT, ROUNDED = "the checkpoint's exact weights", "weights rounded once more"


def blocks_in_words(target: TargetSettings) -> str:
    """Return one line for a quantised target; empty for any other."""
    if not target.model:
        return ""
    folder, weights = Path(target.model).expanduser(), target.weights
    if mix := mix_of(folder):
        other = FUNCTIONS.get(weights, "another function")
        said, less = BLOCKS[target.activations] if weights == "file" else other, "file takes less"
    elif (mix := _scheme_in(folder)) and weights != "half":  # which is refused
        said, less = EXACT if weights == "fp32" else ROUNDED, "int8 takes a quarter"
    else:
        return ""
    remedy = f"; --weights {less}" if weights == "fp32" else ""
    return f"{folder.name} ({mix}) in {weights}, {said}{remedy}"


def _scheme_in(folder: Path) -> str:
    """The method that the weights of a folder are quantised by; empty where there is none that is
    read, and whoever loads them says the rest."""
    try:
        scheme = scheme_of(text_part(read_json(folder / "config.json")))
    except (CheckpointError, ValueError):
        return ""
    return "" if scheme is None else scheme.method
