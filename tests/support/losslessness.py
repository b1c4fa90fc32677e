"""Comparing outputs token by token: equal, or different at a near-tie, or wrong."""

from collections.abc import Sequence

from dovetail.protocol.messages import Finished
from dovetail.protocol.settings import TreeSettings
from dovetail.runtime.session.comparison import NEAR_TIE


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return where two token sequences part; None if they are equal."""
    parted = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
    return None if list(left) == list(right) else parted


def difference(ours: Finished, reference: Sequence[int]) -> str | None:
    """None if equal or parted at a near-tie, which is printed with its margin; else what is
    wrong."""
    at = first_difference(ours.result.token_ids, reference)
    if at is None:
        return None
    margin = ours.margins[at] if at < len(ours.margins) else float("inf")
    words = (
        f"token {at} differs with a margin of {margin:.3g}: "
        f"{ours.result.token_ids[at : at + 5]} here, {tuple(reference[at : at + 5])} there"
    )
    if margin < NEAR_TIE:
        print(f"near-tie: {words}")
        return None
    return words


def given_up(finished: Finished, tree: TreeSettings) -> int:
    """Return how many proposals of a reply may have come too late: none if its rounds wait for
    them, else one for each round that was verified without a tree."""
    return 0 if tree.insist else finished.result.plain_rounds
