"""The speed of one server at every number of sessions, by the cost model or as it was measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from dovetail.launch.simulation.figures import Figures
from dovetail.runtime.costs.rounds import PlacedCosts

READ_ROWS = 256
"""Rows of a chunk of a prompt while nobody else is served."""
HALF_HOPS = 2
"""Messages that the coordinator handles in a round with a draft; without one it is half as many."""


@dataclass(frozen=True)
class Profile:
    """The speed of a server with 1, 2, ... sessions."""

    rates: tuple[float, ...]
    """Tokens a second of each of n sessions, at place n; 0 at place 0."""
    rounds: tuple[float, ...]
    """Rounds a second of each of n sessions."""
    host_s: float
    """Seconds that the coordinator is at work for a round of a session."""
    read_s: float
    """Seconds that a token of a prompt takes to be read, beside nobody."""
    first_s: float = 0.0
    """Seconds of a request beside waiting, reading and decoding."""

    @property
    def most(self) -> int:
        """Sessions that a server holds at once."""
        return len(self.rates) - 1

    def requests_per_s(self, prompt: float, reply: float) -> float:
        """Return the most requests a second of these mean lengths, in tokens."""
        best = max(n * rate for n, rate in enumerate(self.rates))
        return 1.0 / (prompt * self.read_s + (reply - 1.0) / best)


def of_costs(
    costs: PlacedCosts, sessions: int, context: float, drafted: Figures | None = None
) -> Profile:
    """Return the profile of a server by what its passes cost, behind a mean context. `drafted`:
    the figures of recorded replies played at these costs; None: the target alone. At each number of
    sessions nothing is drafted where that is faster, which is what the controller is for."""
    rates, rounds = [0.0], [0.0]
    for count in range(1, sessions + 1):
        alone_s = costs.verify_s(count, context) + costs.beside_s(drafted=False)
        found = (1.0 / alone_s, 1.0 / alone_s)
        if drafted is not None:
            found = max(found, _drafted(costs, count, context, drafted))
        rates.append(found[0])
        rounds.append(found[1])
    rates = [0.0, *reversed([*accumulate(reversed(rates[1:]), max)])]
    read_s = costs.verify_s(READ_ROWS, context) / READ_ROWS
    hops = HALF_HOPS if drafted is not None else HALF_HOPS / 2
    return Profile(tuple(rates), tuple(rounds), hops * costs.messages.coordinator_s, read_s)


def _drafted(costs: PlacedCosts, count: int, context: float, one: Figures) -> tuple[float, float]:
    """Return tokens and rounds a second of each of so many sessions with a draft: the rows of all
    are one pass, and levels of all trees are one pass of the draft."""
    level = max(1, round(one.rows / 2))
    draft_s = one.draft_s * costs.t_d.at(level * count) / costs.t_d.at(level)
    rows = max(1, round(one.rows * count))
    round_s = draft_s + costs.verify_s(rows, context) + costs.beside_s(drafted=True)
    return one.tau / round_s, 1.0 / round_s


def of_rates(
    rates: Mapping[int, float], *, tau: float, host_s: float, read_s: float, first_s: float
) -> Profile:
    """Return the profile of a server whose tokens a second and session were measured with some
    numbers of sessions; between these, seconds a token are linear."""
    known = sorted(rates)
    seconds = [0.0]
    for count in range(1, known[-1] + 1):
        above = next(n for n in known if n >= count)
        below = max((n for n in known if n <= count), default=above)
        way = (count - below) / (above - below) if above > below else 0.0
        seconds.append((1.0 - way) / rates[below] + way / rates[above])
    found = [0.0, *(1.0 / taken for taken in seconds[1:])]
    rounds = tuple(rate / tau for rate in found)
    return Profile(tuple(found), rounds, host_s, read_s, first_s)
