"""Calibration: how many tokens a session's proposals yield, compared with their scores. Scores are
log-probabilities of paths, so the sum of their exponentials is the expected number of accepted
nodes; a draft may be over- or underconfident. Pure: numbers in, numbers out."""

WINDOW = 16  # rounds over which a session's own figures are taken
PRIOR_NODES = 2.0  # expected nodes for which the pair's calibration outweighs the session's own
MOST_CALIBRATION = 2.0


class Calibration:
    """Compares the nodes expected by scores with those accepted."""

    def __init__(self, prior: float) -> None:
        """`prior`: the calibration of the pair of workers."""
        self._expected, self._accepted = PRIOR_NODES, PRIOR_NODES * prior
        self.factor = min(MOST_CALIBRATION, prior)  # accepted nodes for each expected node

    def learn(self, tokens: int, expected_nodes: float) -> float:
        """Count a round. Return its tokens with half of the chance removed: the mean of committed
        and expected tokens."""
        kept = 1.0 - 1.0 / WINDOW
        self._expected = kept * self._expected + expected_nodes
        self._accepted = kept * self._accepted + tokens - 1.0
        self.factor = min(MOST_CALIBRATION, self._accepted / self._expected)
        return 0.5 * (tokens + 1.0 + expected_nodes * self.factor)
