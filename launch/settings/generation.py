"""A target's sampling defaults, from its generation_config.json."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.errors import SettingsError

FILE = "generation_config.json"
TAKEN = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
"""Names in the file -> names of the settings."""


def with_generation_config(configuration: Configuration) -> tuple[Configuration, str]:
    """Return settings completed by the target's sampling defaults, and a description of these, or
    empty. `SettingsError` for a damaged file or an invalid value."""
    settings = configuration.settings
    if settings.sampling.generation_config == "none" or not settings.target.model:
        return configuration, ""
    if (folder := _folder(settings.target.model)) is None:
        return configuration, (
            f"{settings.target.model} has not been downloaded yet: the sampling defaults of "
            f"its {FILE} apply from the next start on"
        )
    return by_folder(configuration, folder)


def by_folder(configuration: Configuration, folder: Path | None) -> tuple[Configuration, str]:
    """Like `with_generation_config`, for the target in this folder; None if it is unknown."""
    if folder is None or configuration.settings.sampling.generation_config == "none":
        return configuration, ""
    file = folder / FILE
    if not file.is_file():
        return configuration, ""
    taken = {
        f"sampling.{name}": value
        for name, value in _defaults(file)
        if not configuration.given(f"sampling.{name}")
    }
    if not taken:
        return configuration, ""
    words = ", ".join(f"{name.partition('.')[2]} {value}" for name, value in taken.items())
    return (
        configuration.over(str(file), taken),
        f"sampling by the target's {FILE}: {words} (--sampling.generation_config none: without)",
    )


def fitting(configuration: Configuration) -> Configuration:
    """Return the settings of single requests: a `min_tokens` from the target's
    generation_config.json is lowered to `max_tokens`."""
    most = configuration.settings.sampling.max_tokens
    origin = configuration.origins["sampling.min_tokens"]
    if Path(origin).name != FILE or configuration.settings.sampling.min_tokens <= most:
        return configuration
    return configuration.over(origin, {"sampling.min_tokens": most})


def _defaults(file: Path) -> Iterator[tuple[str, Any]]:
    """The settings in a file. A model with `do_sample` false is decoded greedily; with true, its
    default temperature is 1."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        raise SettingsError(
            f"{file} is not JSON: correct it, or use --sampling.generation_config none"
        ) from None
    if not isinstance(content, dict):
        raise SettingsError(f"{file} is not a JSON object: use the one that belongs to the model")
    sampled = content.get("do_sample")
    if sampled is True:
        content = {"temperature": 1.0, **content}
    for theirs, ours in TAKEN.items():
        value = content.get(theirs)
        if value is not None and (sampled is not False or theirs.endswith("new_tokens")):
            yield ours, value


def _folder(source: str) -> Path | None:
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    from dovetail.workers.models.checkpoints.hub import local_folder  # half a second

    return local_folder(source)
