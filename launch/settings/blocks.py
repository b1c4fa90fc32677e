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
"""Weights -> what they compute of a file; others compute another function."""
EXACT = "the checkpoint's exact weights; activations are not quantised"
ROUNDED = "weights rounded once more"


def blocks_in_words(target: TargetSettings) -> str:
    """Return one line for a quantised target; empty for any other."""
    folder = Path(target.model).expanduser()
    mix, scheme = (mix_of(folder), _scheme_in(folder)) if target.model else ("", "")
    if not mix and (not scheme or target.weights == "half"):
        return ""
    said = FUNCTIONS.get(target.weights, "another function")
    if not mix:
        said = EXACT if target.weights == "fp32" else ROUNDED
    less = "; --weights int8 takes a quarter" if target.weights == "fp32" else ""
    return f"{folder.name} ({mix or scheme}) in {target.weights}, {said}{less}"


def _scheme_in(folder: Path) -> str:
    """The method that the weights of a folder are quantised by; empty where there is none that is
    read, and whoever loads them says the rest."""
    try:
        scheme = scheme_of(text_part(read_json(folder / "config.json")))
    except (CheckpointError, ValueError):
        return ""
    return "" if scheme is None else scheme.method
