"""The benchmark of reliability: what counts as a guess, how guesses are judged, and the command."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.coupling import GREEDY, SAMPLED
from benchmarks.duet import Duet, guesses, open_draft, open_target
from benchmarks.reliability import Bin, Judged, Reliability
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Drafted
from dovetail.protocol.settings import Sampling, TreeSettings
from support.models import tiny_llama

BENCHMARKS = Path(__file__).parent / "benchmarks"
PROMPT = (3, 17, 9, 30, 8, 22, 41, 5)
TREE = TreeSettings(policy="dynamic", insist=True, gamma=10, depth=4, width=3)


def drawn(count: int, sureness: float, seed: int = 0) -> list[tuple[float, bool]]:
    """Guesses that are right with a probability p, and say that it is p ** (1 / sureness)."""
    chance = np.random.default_rng(seed)
    return [
        (math.log(p) / sureness, bool(chance.random() < p))
        for p in chance.uniform(0.01, 1.0, count).tolist()
    ]


def test_below_the_nodes_that_were_reached_every_node_is_a_guess() -> None:
    drafted = Drafted(
        epoch=0,
        session=1,
        round=1,
        tokens=(5, 6, 7, 8, 9, 4),
        parents=(-1, -1, 0, 0, 1, 2),
        scores=(-0.5, -1.0, -0.75, -2.5, -1.25, -1.0),
        grown=6,
        hit=False,
    )
    assert list(guesses(drafted, (0, 2), 3)) == [
        (-0.5, True),
        (-1.0, False),
        (-0.25, True),
        (-2.0, False),
        (-0.25, False),
    ]
    assert list(guesses(drafted, (), 6)) == [(-0.5, False), (-1.0, True)]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["T=0", "T=1"])
def test_of_the_guesses_of_a_reply_as_many_are_right_as_nodes_were_accepted(
    tmp_path: Path, sampling: Sampling
) -> None:
    torch.set_num_threads(1)
    target, draft = (
        str(tiny_llama(tmp_path / "target")),
        str(tiny_llama(tmp_path / "draft", layers=1)),
    )
    duets = [Duet(open_target(target), open_draft(draft, target)) for _ in range(2)]
    frozen, learning = (
        duet.decode(PROMPT, key=bytes(16), sampling=sampling, tree=TREE, max_tokens=24, learn=learn)
        for duet, learn in zip(duets, (False, True), strict=True)
    )
    for reply in (frozen, learning):
        assert sum(was for _, was in reply.guesses) == sum(reply.reached)
        assert len(reply.guesses) >= reply.rounds
        assert all(score <= 0 for score, _ in reply.guesses)
    assert frozen.tokens == learning.tokens
    untaught, taught = (
        duet.draft.engine.score_calibration.nodes(sampled=sampling.temperature > 0)
        for duet in duets
    )
    assert sum(untaught) == 0
    assert learning.rounds - 1 <= sum(taught) <= learning.decoded


def test_guesses_are_sorted_by_what_they_say() -> None:
    found = Reliability.of(
        [
            (math.log(0.25), True),
            (math.log(0.35), False),
            (math.log(0.35), False),
            (math.log(0.9), True),
            (0.0, True),
        ],
        2,
    )
    assert [
        (bin_.count, round(bin_.predicted, 3), round(bin_.observed, 3)) for bin_ in found.bins
    ] == [(3, 0.317, 0.333), (2, 0.95, 1.0)]
    assert found.error == pytest.approx((3 * abs(0.95 / 3 - 1 / 3) + 2 * 0.05) / 5)
    assert found.log_loss == pytest.approx(
        -(math.log(0.25) + 2 * math.log(0.65) + math.log(0.9) + math.log(1 - 1e-6)) / 5
    )


def test_a_draft_that_is_right_as_often_as_it_says_has_no_error_and_one_that_is_too_sure_has() -> (
    None
):
    honest, sure = (Reliability.of(drawn(20_000, sureness), 10) for sureness in (1.0, 2.5))
    assert honest.error < 0.015
    assert sure.error > 0.1
    assert sure.log_loss > honest.log_loss
    assert all(bin_.band[0] - 0.02 <= bin_.predicted <= bin_.band[1] + 0.02 for bin_ in honest.bins)


def test_an_interval_holds_the_share_and_stays_a_share() -> None:
    for right, count in [(0, 4), (4, 4), (3, 10), (300, 1000)]:
        low, high = Bin(0.5, right / count, count).band
        assert 0.0 <= low <= right / count <= high <= 1.0
    assert np.diff(Bin(0.5, 0.3, 1000).band) < np.diff(Bin(0.5, 0.3, 10).band) / 8


def test_without_a_guess_nothing_is_judged() -> None:
    with pytest.raises(UserError, match="no node was offered in 0 replies"):
        Judged.of("fitted", [], 10)
