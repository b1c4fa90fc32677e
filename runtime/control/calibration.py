"""Calibration: how many tokens a session's proposals bring, compared with their scores.

The scores of a proposal are log-probabilities of paths, so the sum of their exponentials is the
number of its nodes that are expected to be accepted. A draft may be too sure of itself, or not sure
enough. Pure: numbers in, numbers out.
"""

WINDOW = 16  # rounds over which a session's own figures are taken
PRIOR_NODES = 2.0
"""Expected nodes for which the pair's calibration counts before the session's own does."""
MOST_CALIBRATION = 2.0


class Calibration:
    """Compares the nodes that scores let expect with those that were accepted."""

    def __init__(self, prior: float) -> None:
        """`prior`: the calibration of the pair of workers."""
        self._expected, self._accepted = PRIOR_NODES, PRIOR_NODES * prior
        self.factor = min(MOST_CALIBRATION, prior)  # accepted nodes for each expected node

    def learn(self, tokens: int, expected_nodes: float) -> float:
        """Count a round and return the tokens it brought with half of the chance taken out: the
        mean of what it committed and what it was expected to."""
        kept = 1.0 - 1.0 / WINDOW
        self._expected = kept * self._expected + expected_nodes
        self._accepted = kept * self._accepted + tokens - 1.0
        self.factor = min(MOST_CALIBRATION, self._accepted / self._expected)
        return 0.5 * (tokens + 1.0 + expected_nodes * self.factor)
