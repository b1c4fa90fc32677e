"""Positions at which a model is compared: the beginning, around every number of the configuration
that may be a position, and the end."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

DENSE = 8  # positions at the beginning without gaps: smaller windows are really crossed
LANDMARK = re.compile("position|window|chunk|floor|context|block|length|segment|stride|scale_")
"""Names of settings that may be positions at which a function changes."""
MOST_LANDMARKS = 12
SHORT, BEYOND = 64, 4
"""A whole model is run over some tokens beyond the last landmark up to this position."""
SPREAD = (32, 256, 2048, 16384, 65536)  # positions that are always compared


@dataclass(frozen=True)
class LandmarkRun:
    """Positions first, first + 1, ... that exist."""

    first: int
    count: int

    @property
    def stop(self) -> int:
        """The first position after it."""
        return self.first + self.count


def runs_of(config: Mapping[str, Any], context: int) -> list[LandmarkRun]:
    """Return the positions of a proof, in runs."""
    marks = sorted({mark for mark in landmarks(config) if DENSE <= mark < context})[:MOST_LANDMARKS]
    wanted = {*range(min(DENSE, context)), *range(max(0, context - 2), context)}
    wanted |= {place for mark in marks for place in (mark - 1, mark)} | {
        place for place in SPREAD if place < context
    }
    runs: list[LandmarkRun] = []
    for position in sorted(wanted):
        if runs and runs[-1].stop == position:
            runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
        else:
            runs.append(LandmarkRun(position, 1))
    return runs


def short_text(config: Mapping[str, Any], context: int) -> int:
    """The number of tokens that cross every near landmark of a configuration."""
    return min(
        context, max([DENSE, *(mark for mark in landmarks(config) if mark <= SHORT)]) + BEYOND
    )


def landmarks(value: Any, named: bool = False) -> Iterator[int]:
    """Yield all whole numbers whose names suggest positions, at any depth."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from landmarks(part, named or bool(LANDMARK.search(str(name))))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from landmarks(part, named)
    elif (
        named
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 < value < 1 << 40
        and value == int(value)
    ):
        yield int(value)
