"""The speed of one server at every number of sessions, by the cost model or as it was measured."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulation.figures import Figures
from simulation.prices import PlacedCosts

CHUNK = 256  # rows of a prompt in a pass at most, the `prompt_rows` of a target on the CPU
HALF_HOPS = 2
"""Messages that the coordinator handles in a round with a draft; without one it is half as many."""


@dataclass(frozen=True)
class Profile:
    """The speed of a server with n sessions, at place n of each table."""

    rounds_s: tuple[float, ...]  # seconds of a round in which no prompt is read
    taus: tuple[float, ...]  # tokens that a round brings each session
    rows: tuple[int, ...]  # rows of the target's pass in it; `verify_s`: its seconds
    verify_s: tuple[float, ...]
    passes_s: tuple[float, ...]
    """Seconds of a pass by its rows, whether they are of trees or of prompts."""
    open_s: float  # seconds of an exchange with the target beside its pass
    host_s: float  # seconds that the coordinator is at work for a round of a session
    spread: float = 0.0  # the variance of the seconds of such a round over the square of their mean

    @property
    def most(self) -> int:
        """Sessions that a server holds at once."""
        return len(self.rounds_s) - 1

    @property
    def read_s(self) -> float:
        """Seconds that a token of a long prompt takes beside nobody."""
        return self.passes_s[CHUNK] / CHUNK

    def token_s(self, sessions: int) -> float:
        """Return the seconds of a token of each of so many sessions."""
        return self.rounds_s[sessions] / self.taus[sessions]

    def requests_per_s(self, prompt: float, reply: float) -> float:
        """Return the most requests a second of these mean lengths, in tokens."""
        best = max(n / self.token_s(n) for n in range(1, self.most + 1))
        return 1.0 / (prompt * self.read_s + (reply - 1.0) / best)


def of_costs(
    costs: PlacedCosts, sessions: int, context: float, drafted: Figures | None = None
) -> Profile:
    """Return the profile of a server by what its passes cost, behind a mean context. `drafted`:
    the figures of recorded replies played at these costs; None: the target alone. At each number of
    sessions nothing is drafted where that is faster, which is what the controller is for."""
    open_s = costs.messages.beside_s(drafted=False)
    rounds = [(0.0, 1.0, 0)]
    for count in range(1, sessions + 1):
        found = (costs.verify_s(count, context) + open_s, 1.0, count)
        if drafted is not None:
            found = min(
                found, _drafted(costs, count, context, drafted), key=lambda one: one[0] / one[1]
            )
        rounds.append(found)
    rounds_s, taus, rows = zip(*rounds, strict=True)
    passes_s = tuple(costs.t_v.table(max(rows) + CHUNK, context))
    verify_s = tuple(passes_s[its] for its in rows)
    hops = HALF_HOPS if drafted is not None else HALF_HOPS / 2
    host_s = hops * costs.messages.coordinator_s
    return Profile(rounds_s, taus, rows, verify_s, passes_s, open_s, host_s)


def _drafted(
    costs: PlacedCosts, count: int, context: float, one: Figures
) -> tuple[float, float, int]:
    """Return seconds, tokens and rows of a round of so many sessions with a draft: the rows of all
    are one pass, and levels of all trees are one pass of the draft."""
    level = max(1, round(one.rows / 2))
    draft_s = one.draft_s * costs.t_d.at(level * count) / costs.t_d.at(level)
    rows = max(1, round(one.rows * count))
    round_s = draft_s + costs.verify_s(rows, context) + costs.messages.beside_s(drafted=True)
    return round_s, one.tau, rows


def of_rounds(
    rounds_s: Mapping[int, float],
    passes_s: Mapping[int, float],
    *,
    most: int,
    open_s: float,
    spread: float = 0.0,
) -> Profile:
    """Return the profile of a server without a draft, with room for `most` sessions, whose rounds
    were measured with some numbers of them, and its passes, `passes_s`, over some numbers of rows,
    at least two. Between these, seconds are linear. Below the fewest sessions rounds take as long
    as with them; above the most they rise by a row for each session. `spread`: that of the
    rounds."""
    known = sorted(rounds_s)
    passes = _passes(passes_s, most + CHUNK)
    counts = tuple(range(most + 1))
    measured = np.interp(counts[1:], known, [rounds_s[count] for count in known])
    above = np.maximum(known[-1], counts[1:])
    measured += passes[above] - passes[known[-1]]
    verify_s = (0.0, *(measured - open_s).tolist())
    taus = (1.0,) * len(counts)
    rounds = (0.0, *measured.tolist())
    return Profile(rounds, taus, counts, verify_s, tuple(passes.tolist()), open_s, 0.0, spread)


def _passes(known_s: Mapping[int, float], most: int) -> NDArray[np.float64]:
    """Return the seconds of passes over 0 to `most - 1` rows: beyond those that are known each row
    costs what it does on average between the fewest and the most of them."""
    rows = np.arange(most)
    known = sorted(known_s)
    fewest, largest = known[0], known[-1]
    row_s = (known_s[largest] - known_s[fewest]) / (largest - fewest)
    passes = np.interp(rows, known, [known_s[count] for count in known])
    passes += row_s * (np.maximum(rows, largest) - largest + np.minimum(rows, fewest) - fewest)
    passes[0] = 0.0
    return passes
