"""The findings of a long measurement so far, in a file, so that one that was interrupted goes on.
Each line is a finding under its name.

The first line says what is measured; a file of another measurement is refused. A torn last line is
dropped.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.protocol.errors import UserError


class Ledger:
    """Findings by name; without a file they last as long as the command."""

    def __init__(self, path: Path | None, about: Mapping[str, Any]) -> None:
        self._path = path
        self.found: dict[str, Any] = {}
        if path is None:
            return
        heading = json.dumps({"about": about})
        lines = _lines(path)
        if not lines:
            path.write_text(heading + "\n", encoding="utf-8")
        elif lines[0] != heading:
            raise UserError(
                f"{path} holds another measurement, or one of other settings: choose another "
                "--ledger, or remove it"
            )
        else:
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            self.found = {entry["name"]: entry["found"] for entry in map(json.loads, lines[1:])}

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def add(self, name: str, found: Any) -> None:
        """Keep a finding."""
        self.found[name] = json.loads(json.dumps(found))
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"name": name, "found": found}) + "\n")


def _lines(path: Path) -> list[str]:
    """The whole lines of a file; none if there is no file."""
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read as a ledger: {getattr(error, 'strerror', None) or error}"
        ) from None
    return text.split("\n")[:-1]
