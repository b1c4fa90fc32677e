"""What a pair has learned, in a form that can be saved: the costs of passes and messages, the yield
of rounds, and whether drafting pays at each load. It is the state of the pair itself; recalled
values weigh no more than a few new rounds. Pure."""

from collections.abc import Mapping
from typing import Any

from dovetail.runtime.control.on_off import Crowd, Experience, OnOff
from dovetail.runtime.control.pairs import AheadTrial, Pair
from dovetail.runtime.costs.rounds import Average

WEIGHT = 8  # a recalled mean counts as at most this many values


def record_of(pair: Pair) -> dict[str, Any]:
    """Return what a pair has learned, as JSON types."""
    costs = pair.costs
    return {
        "passes": [costs.target.record(), costs.draft.record()],
        "means": {
            name: [mean.value, mean.count] for name, mean in _means(pair).items() if mean.known
        },
        "lags": [costs.reading.record(), costs.prompts.record()],
        "ahead": pair.trial.decided,
        "alone": [[greedy, on_off.record()] for greedy, on_off in pair.alone.items()],
        "crowds": [
            [greedy, level, crowd.care, crowd.on_off.record()]
            for (greedy, level), crowd in pair.crowds.items()
        ],
    }


def recall(pair: Pair, record: Mapping[str, Any]) -> None:
    """Initialize a new pair with what an earlier one had learned."""
    costs, means = pair.costs, _means(pair)
    for passes, kept in zip((costs.target, costs.draft), record["passes"], strict=True):
        passes.recall(kept)
    for name, (value, count) in record["means"].items():
        mean = means[name]
        mean.known, mean.value, mean.count = True, value, min(count, WEIGHT)
    for lags, kept in zip((costs.reading, costs.prompts), record["lags"], strict=True):
        for tokens, seconds in kept:
            lags.add(tokens, seconds)
    pair.trial = AheadTrial(record["ahead"])
    for greedy, kept in record["alone"]:
        pair.experiences[greedy] = Experience(**kept)
        pair.alone[greedy] = OnOff(pair.experiences[greedy])
    for greedy, level, care, kept in record["crowds"]:
        crowd = pair.crowds[greedy, (level[0], level[1])] = Crowd(Experience(**kept))
        crowd.care = care


def _means(pair: Pair) -> dict[str, Average]:
    found = {**vars(pair), **vars(pair.costs)}
    return {name: mean for name, mean in found.items() if isinstance(mean, Average)}
