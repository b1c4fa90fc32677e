"""A target in GGUF files in words: which formats they hold, and what is computed of them."""

from pathlib import Path

from dovetail.protocol.settings import TargetSettings
from dovetail.workers.models.checkpoints.gguf.view import mix_of

FUNCTIONS = {"fp32": "the file's exact function", "half": "exact for 16-bit files alone"}
"""Weights -> what they compute of a file; others compute another function."""


def blocks_in_words(target: TargetSettings) -> str:
    """Return one line for a target in GGUF files; empty for any other."""
    folder = Path(target.model).expanduser()
    mix = mix_of(folder) if target.model else ""
    if not mix:
        return ""
    said = FUNCTIONS.get(target.weights, "another function")
    less = "; --weights int8 takes a quarter" if target.weights == "fp32" else ""
    return f"{folder.name} ({mix}) in {target.weights}, {said}{less}"
