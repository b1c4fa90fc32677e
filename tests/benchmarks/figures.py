"""The figures to reach: for each kind of weights and number of rows, the largest ratio that is good
enough."""

from dataclasses import dataclass

OVER_ONE_NODE, OVER_UNDIVIDED = 1.8, 0.95
"""A pass over two shards: how many times as fast it should at least be as over the first shard
alone, and as over the same cores undivided."""


@dataclass(frozen=True)
class AheadFigure:
    """The figures for drafting ahead where drafting takes `least` to `most` of the time of a pass,
    each a ratio to drafting that waits."""

    least: float
    most: float
    rate: float
    """Tokens per second; at least."""
    tau: float | None = None
    """Committed tokens a round; at least."""
    exposed: float | None = None
    """Drafting that is waited for; at most."""


AHEAD = (
    AheadFigure(0.45, 1.1, rate=1.3, tau=0.98, exposed=0.3),
    AheadFigure(0.05, 0.15, rate=1.02),
    AheadFigure(0.0, 1e9, rate=0.98),
)
"""The first that fits counts. The bounds lie a little beyond 0.5, 1 and 0.1, since a ratio is hit
only nearly."""
BEST_FIXED, RIVALS, ADVERSARY = 0.97, 1.0, 0.95
"""goodput's tokens per second over those of the best fixed tree, of `dynamic` with the paper's
preset and of `heterospec`, and of the target alone where the draft guesses at random; at least."""
ADDS_UP, ACCOUNTED = 0.02, 0.95
"""By how much the parts of a round may miss it; the rate over tau / the parts that two workers and
the wire between them need, at least."""
RECORDING = 0.01
"""Processor time of recording spans over the time of a round; at most."""

SECOND_TURN = 0.15
"""Time to the first token of a conversation's second turn, over that of its first; at most."""


def ahead_figure(drafting: float) -> AheadFigure:
    """The figure for drafting that takes so many times a pass of the target."""
    return next(figure for figure in AHEAD if figure.least <= drafting <= figure.most)
