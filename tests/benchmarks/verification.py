"""T_V(M) and prefill of two engines that take turns, pass by pass, on the same cores and the same
model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.child import Side
from benchmarks.measure import take_turns

WARM_UP = 2


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
