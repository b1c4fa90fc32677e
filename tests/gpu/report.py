"""The findings of a step, one line of JSON each, written as soon as they are known: what a step
that is ended leaves behind still counts."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from dovetail.launch.console.terminal import note

Kind = Literal["note", "figure", "check"]


@dataclass(frozen=True)
class Line:
    """One of them."""

    kind: Kind
    """A note is what was measured beside; a figure is wanted to be something; a check must hold."""
    name: str
    measured: str
    wanted: str = ""
    holds: bool | None = None
    """None: nothing is wanted of it."""


@dataclass(frozen=True)
class Report:
    """The file of one step."""

    file: Path
    quick: bool = False
    """Figures are of sizes at which they mean nothing, and only the checks are wanted."""

    def note(self, name: str, measured: str) -> None:
        self._add(Line("note", name, measured))

    def figure(
        self,
        name: str,
        value: float,
        unit: str = "",
        *,
        least: float | None = None,
        most: float | None = None,
    ) -> None:
        """A number of which a bound is wanted."""
        wanted = (
            f">= {least:g}{unit}"
            if least is not None
            else f"<= {most:g}{unit}"
            if most is not None
            else ""
        )
        holds = (
            None
            if self.quick or not wanted
            else (least is None or value >= least) and (most is None or value <= most)
        )
        self._add(Line("figure", name, f"{value:.3g}{unit}", wanted, holds))

    def check(self, name: str, holds: bool, measured: str, wanted: str = "") -> None:
        self._add(Line("check", name, measured, wanted, holds))

    def _add(self, line: Line) -> None:
        note(
            f"  {line.name}: {line.measured}"
            + (
                ""
                if line.holds is None
                else f" ({'holds' if line.holds else 'DOES NOT HOLD'}: {line.wanted})"
            )
        )
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(line)) + "\n")

    def lines(self) -> Iterator[Line]:
        """All that the file has."""
        if self.file.exists():
            for text in self.file.read_text(encoding="utf-8").splitlines():
                yield Line(**json.loads(text))
