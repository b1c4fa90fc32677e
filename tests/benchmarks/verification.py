"""T_V(M) and prefill of two engines that take turns, pass by pass, on the same cores and the same
model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.child import Side
from benchmarks.measure import Estimate, estimate, ratio, take_turns

WARM_UP = 2


@dataclass(frozen=True)
class Pass:
    """The pass that both sides compute: `verify` so many rows behind a filled cache, or `prefill`
    so many."""

    do: str
    rows: int


@dataclass(frozen=True)
class Comparison:
    """Seconds of both sides for one kind of pass, pair by pair."""

    kind: Pass
    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratio(self) -> Estimate:
        return ratio(self.ours, self.theirs)

    def as_json(self) -> dict[str, Any]:
        seconds = {
            "ours_s": estimate(self.ours).as_json(),
            "theirs_s": estimate(self.theirs).as_json(),
        }
        return {
            "pass": self.kind.do,
            "rows": self.kind.rows,
            "pairs": len(self.ours),
            **seconds,
            "ratio": self.ratio.as_json(),
        }


@dataclass(frozen=True)
class Turn:
    """One pass of one side; calling it gives its seconds. `clock`: wall or processor."""

    side: Side
    do: str
    rows: int
    clock: str

    def __call__(self) -> float:
        seconds: float = self.side.ask(self.do, rows=self.rows)[f"{self.clock}_s"]
        return seconds


def take_rounds(
    turns: Sequence[Sequence[Turn]], *, pairs: int, step: Callable[[str], None]
) -> list[list[tuple[float, ...]]]:
    """`pairs` rounds over all of `turns`, after some that are not counted; the turns of each take
    place one after the other. `step`: before every round."""
    measured: list[list[tuple[float, ...]]] = [[] for _ in turns]
    for number in range(-WARM_UP, pairs):
        step("warming up" if number < 0 else "")
        for seconds, sides in zip(measured, turns, strict=True):
            seconds.append(take_turns(sides, number))
    return [seconds[WARM_UP:] for seconds in measured]


def compare(
    ours: Side,
    theirs: Side,
    passes: Sequence[Pass],
    *,
    pairs: int,
    clock: str,
    step: Callable[[str], None],
) -> list[Comparison]:
    """All passes of both sides, alternating."""
    turns = [[Turn(side, kind.do, kind.rows, clock) for side in (ours, theirs)] for kind in passes]
    found = take_rounds(turns, pairs=pairs, step=step)
    return [
        Comparison(kind, tuple(a for a, _ in seconds), tuple(b for _, b in seconds))
        for kind, seconds in zip(passes, found, strict=True)
    ]
