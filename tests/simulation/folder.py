"""The folder of a recording, being written: `dovetail.launch.planning.acceptance` reads it."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.launch.planning.acceptance import ABOUT, SUFFIX, About, Recording, read_about
from dovetail.protocol.errors import UserError
from dovetail.protocol.files import refusal, writing

PLAIN_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class Folder:
    """The folder of a recording, being written."""

    def __init__(self, path: Path, about: About) -> None:
        """Makes it, or goes on with one of the same; `UserError` if another recording is there."""
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            there = path / ABOUT
            if not there.exists():
                if any(path.iterdir()):
                    raise UserError(
                        f"{path} holds something other than a recording: name a new folder"
                    )
                there.write_text(about.model_dump_json(indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"a recording cannot be written to {path}: {refusal(error)}") from None
        if (before := read_about(path)) != about:
            changed = [
                name for name in About.model_fields if getattr(before, name) != getattr(about, name)
            ]
            raise UserError(
                f"{path} holds a recording with another {', '.join(changed)}: name a new "
                "folder, or ask for the same"
            )

    def has(self, number: int, id: str) -> bool:
        return self._file(number, id).exists()

    def write(self, number: int, recording: Recording) -> None:
        """Add a reply; the file is there whole or not at all."""
        file = self._file(number, recording.id)
        part = file.with_suffix(".part")
        with writing(part, "a recording"), part.open("wb") as stream:
            np.savez_compressed(stream, **_arrays(recording))
        part.replace(file)

    def _file(self, number: int, id: str) -> Path:
        return self.path / f"{number:05d}-{PLAIN_NAME.sub('_', id)[:80]}{SUFFIX}"


def _arrays(recording: Recording) -> dict[str, Any]:
    """Return one array of all positions for each field, and where every position ends."""
    trees = recording.positions
    return {
        "id": np.array(recording.id),
        "prompt": np.array(recording.prompt, np.int32),
        "reply": np.array(recording.tokens, np.int32),
        "stops": np.cumsum([len(tree.tokens) for tree in trees], dtype=np.int64),
        **{
            name: np.concatenate([getattr(tree, name) for tree in trees] or [np.empty(0)])
            for name in ("tokens", "parents", "gains", "expanded")
        },
    }
