"""Names of GGUF files: parts of split models (`llama-gguf-split`), models in a folder, and
sidecars."""

import re
from collections.abc import Iterable
from pathlib import Path

from dovetail.protocol.errors import CheckpointError

AGAIN = "fetch the file again"  # the remedy for a damaged file
MARK = "gguf.json"  # the file that names the source of a view
SUFFIX = ".gguf"
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
SIDECARS = re.compile(r"(^|[-_.])mmproj|^mtp[-_.]", re.IGNORECASE)
"""Names of files that belong to a model but are not models: image encoders, heads."""

DRAFTS = re.compile(r"(mtp|dflash|dspark|eagle3)[-_.]", re.IGNORECASE)
"""Beginnings of names of drafts beside their target, as llama.cpp downloads them."""


def is_gguf(source: str | Path) -> bool:
    """Return whether a name is that of a GGUF file."""
    return Path(source).name.lower().endswith(SUFFIX)


def parts_of(file: Path) -> list[Path]:
    """Return all files of a model, given one or a link to one, as in the hub's cache."""
    if (found := PART.fullmatch(file.name)) is None:
        linked = file.is_symlink() and file.exists()
        behind = parts_of(file.parent / file.readlink()) if linked else []
        return behind if len(behind) > 1 else [file]
    count = int(found[3])
    if not 1 <= int(found[2]) <= count:
        raise CheckpointError(f"{file} says that it is part {found[2]} of {found[3]}; {AGAIN}")
    names = [f"{found[1]}-{part:05d}-of-{found[3]}.gguf" for part in range(1, count + 1)]
    return [file.with_name(name) for name in names]


def models_in(names: Iterable[str]) -> list[str]:
    """Return the files among these that each name a model: first parts, and no sidecars."""
    return sorted(
        name
        for name in names
        if is_gguf(name)
        and not SIDECARS.search(name.rpartition("/")[2])
        and ((part := PART.fullmatch(name)) is None or int(part[2]) == 1)
    )


def only_model(folder: Path) -> Path:
    """Return the only model in a folder of GGUF files; `CheckpointError` lists several."""
    found = models_in(path.name for path in folder.iterdir())
    if len(found) != 1:
        sizes = [f"{name} ({_size(folder / name) / 1e9:.3g} GB)" for name in found]
        raise CheckpointError(
            f"{folder} has {len(found)} models in GGUF files: "
            + (f"name one of {', '.join(sizes[:20])}" if found else "name a file of a model")
        )
    return folder / found[0]


def _size(file: Path) -> int:
    return sum(part.stat().st_size for part in parts_of(file) if part.is_file())
