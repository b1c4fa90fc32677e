"""Compares two runs of the same request: where their tokens differ, and whether that is a near-tie.

Rounding differs between a pass over one row and a pass over many, so two almost equal logits may
change places. Such a case is reported with its margin; a larger difference is an error."""

from dataclasses import dataclass

from dovetail.protocol.messages import Finished

NEAR_TIE = 1e-4
"""Margin of the two best choices below which rounding decides; logits are of the order of 10, and
float32 sums of hundreds of terms have errors of about 1e-5."""


@dataclass(frozen=True)
class Difference:
    """The first token in which two runs differ, and the larger of their margins."""

    position: int
    margin: float

    @property
    def near_tie(self) -> bool:
        return self.margin < NEAR_TIE


def first_difference(one: Finished, other: Finished) -> Difference | None:
    """Return where two runs differ; None if they are equal, token for token."""
    a, b = one.result.token_ids, other.result.token_ids
    position = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    if position == len(a) == len(b):
        return None
    margins = [run.margins[position] for run in (one, other) if position < len(run.margins)]
    return Difference(position, max(margins))
