"""The ranking kernel against torch's operations, on every instruction set."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dovetail.protocol.messages import Open
from dovetail.protocol.noise import GOLDEN, MASK, MULTIPLIERS, mix
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.tree import ROOT, TokenTree
from dovetail.workers import kernels
from dovetail.workers.drafters.ranking import Ranking
from dovetail.workers.kernels import Isa, ranking
from dovetail.workers.models.cache import KVCache
from dovetail.workers.sessions.choosing import Asked, outcomes_of
from dovetail.workers.sessions.session import TargetSession
from dovetail.workers.speculation.growth import GrowingTree
from dovetail.workers.speculation.noise import Noise, NoiseCache
from dovetail.workers.speculation.rejection import ProposalProbabilities
from dovetail.workers.speculation.sampling import choose, process_logits
from dovetail.workers.speculation.score_calibration import Scale, ScoreCalibration
from support.cases import everyday
from support.kernels import every_isa, needs_kernels, use
from support.opening import opening

pytestmark = [needs_kernels, pytest.mark.usefixtures("kernels_as_before")]

KEY = bytes(range(16))
PLAIN = Sampling(temperature=1.0)
SAMPLINGS = [
    Sampling(),
    PLAIN,
    Sampling(temperature=1e-50),
    Sampling(temperature=100.0),
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(temperature=0.8, top_k=40),
    Sampling(temperature=0.8, min_p=0.05),
    Sampling(temperature=1.5, top_k=300, top_p=0.7, min_p=0.01),
    Sampling(temperature=2.0, top_p=0.9999, min_p=1e-6),
    Sampling(temperature=1.0, min_p=1.0),
]
VOCABULARIES = everyday([4_096, 49_152, 262_144], 4_096, 49_152)


def draw(rows: int, size: int, *, seed: int = 0) -> Tensor:
    """Logits of rows that lie further apart than they are long; of the second row every third token
    is masked."""
    logits = (
        3.0 * torch.randn(rows, size + 3, generator=torch.Generator().manual_seed(seed))[:, :size]
    )
    logits[1, 1::3] = -torch.inf
    return logits


def like_a_model(size: int, seed: int, *, coarse: bool = False) -> Tensor:
    """One row of logits, a few of which stand out; `coarse`: with many equals."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.5 * torch.randn(size, generator=generator)
    logits[torch.randint(size, (20,), generator=generator)] += 9.0
    return (logits * 2).round() / 2 if coarse else logits


def by_definition(logits: Tensor, sampling: Sampling, noise: Noise) -> tuple[int, float]:
    """The choice after logits [V] as it is defined, over the whole vocabulary."""
    z = process_logits(logits.unsqueeze(0), sampling)
    ids, margins = choose(z, noise.row.unsqueeze(0) if sampling.temperature > 0.0 else None)
    return int(ids[0]), float(margins[0])


def session_of(sampling: Sampling, size: int, key: bytes = KEY) -> TargetSession:
    """A session whose log is one token, so that the next is chosen with the noise of position 1."""
    cache = KVCache(layers=1, kv_heads=1, head_dim=4, capacity=8, dtype=torch.float32, device=CPU)
    noise = NoiseCache(key, size) if sampling.temperature > 0.0 else None
    return TargetSession([0], cache, 8, sampling, TreeSettings(), key, noise, None, None, None)


CPU = torch.device("cpu")


def chosen(rows: Sequence[tuple[TargetSession, Tensor]]) -> list[Any]:
    """What sessions choose after logits [V], in one pass."""
    nothing = ProposalProbabilities.nothing()
    outcomes = outcomes_of(
        [Asked(session, logits.unsqueeze(0), TokenTree(), nothing) for session, logits in rows]
    )
    return [
        outcome if isinstance(outcome, Exception) else (outcome[1], *outcome[2])
        for outcome in outcomes
    ]


# -- what a target chooses -------------------------------------------------------------------------


@every_isa
@pytest.mark.parametrize("size", VOCABULARIES)
def test_sessions_choose_in_one_pass_what_each_would_by_all_of_its_noise(
    isa: Isa, size: int
) -> None:
    use(isa)
    kernels.set_threads(2)
    sessions = [session_of(sampling, size, bytes([n] * 16)) for n, sampling in enumerate(SAMPLINGS)]
    rows = [like_a_model(size, seed, coarse=seed % 3 == 1) for seed in range(len(sessions))]
    rows[1][::2] = -torch.inf
    assert chosen([*zip(sessions, rows, strict=True)]) == [
        by_definition(logits, session.sampling, Noise(session.key, 1, size))
        for session, logits in zip(sessions, rows, strict=True)
    ]
    assert not any(  # nobody had all of it computed
        "row" in vars(session.noise.at(1)) for session in sessions if session.noise is not None
    )


numbers = st.floats(-40, 40, width=32) | st.sampled_from([0.0, 1.0, 1.0, 30.0, -math.inf])


@settings(deadline=None, max_examples=400)
@given(
    st.lists(numbers, min_size=2, max_size=60),
    st.sampled_from([0.0, 1e-300, 0.1, 0.7, 1.0, 3.0, 100.0]),
    st.sampled_from([0, 0, 1, 2, 7, 1000]),
    st.sampled_from([1.0, 1.0, 1e-9, 0.25, 0.5, 0.9, 0.999, 1.0 - 1e-12]) | st.floats(0.01, 1.0),
    st.sampled_from([0.0, 0.0, 1e-9, 0.05, math.exp(-1.0), 1.0]) | st.floats(0.0, 1.0),
    st.integers(0, 1 << 30),
    st.sampled_from(kernels.isas() if kernels.available() else [Isa.PLAIN]),
)
def test_of_any_row_the_token_of_the_definition_is_chosen_by_its_margin(
    logits: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    key: int,
    isa: Isa,
) -> None:
    use(isa)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = torch.tensor(logits)
    session = session_of(sampling, len(logits), key.to_bytes(16, "little"))
    (found,) = chosen([(session, row)])
    expected = by_definition(row, sampling, Noise(session.key, 1, len(logits)))
    if math.isnan(expected[1]):
        assert "NaN logits" in str(found)
    else:
        assert found == expected


@every_isa
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", SAMPLINGS[:7:2])
def test_logits_that_are_not_numbers_fail_their_session_alone(
    isa: Isa, bad: float, sampling: Sampling
) -> None:
    use(isa)
    spoilt, whole = like_a_model(300, 0), like_a_model(300, 1)
    if bad == -math.inf:
        spoilt[:] = bad
    else:
        spoilt[257] = bad
    found, other = chosen([(session_of(sampling, 300), row) for row in (spoilt, whole)])
    expected = by_definition(spoilt, sampling, Noise(KEY, 1, 300))
    assert "NaN logits" in str(found) if math.isnan(expected[1]) else found == expected
    assert other == by_definition(whole, sampling, Noise(KEY, 1, 300))


@pytest.mark.parametrize("size", [8, 4096])
def test_where_rounding_decides_about_top_p_the_definition_is_asked(size: int) -> None:
    """All tokens are equal, and half of them reach the probability exactly, or miss it by
    rounding."""
    logits, sampling = torch.zeros(size), Sampling(temperature=1.0, top_p=0.5)
    assert ranking.choose([(logits, sampling, 1)])[0][0] == -1
    session = session_of(sampling, size)
    expected = by_definition(logits, sampling, Noise(KEY, 1, size))
    assert chosen([(session, logits)]) == [expected]
    drafting = drafts(sampling, size)
    tokens, _ = drafting.children(logits[None], GrowingTree(), np.array([ROOT]), 3, 1)
    assert tokens[0, 0] == by_definition(logits, sampling, Noise(KEY, 3, size))[0]


def unmix(x: int) -> int:
    """The inverse of `mix`."""
    for shift, multiplier in ((31, MULTIPLIERS[1]), (27, MULTIPLIERS[0]), (30, 1)):
        whole = x
        for _ in range(64 // shift + 1):
            whole = x ^ (whole >> shift)
        x = whole * pow(multiplier, -1, 1 << 64) & MASK
    return x


HASHES = sorted(
    {
        min(max(edge + step, 0), MASK)
        for bits in (0, 12, 16, 17, 24, 33, 40, 41, 52, 62, 63, 64)
        for edge in (1 << bits, (1 << bits) * 3 // 2, MASK + 1 - (1 << bits))
        for step in (-(1 << 41), -(1 << 16), -(1 << 12), -1, 0, 1, 1 << 12, 1 << 16, 1 << 41)
    }
)
"""At the edges of the numbers that bounds of noise are made of, and between them."""


@every_isa
def test_no_bound_of_a_noise_is_below_it(isa: Isa) -> None:
    """A token with the noise of a hash is the best or second best by next to nothing, behind others
    that have been looked at before."""
    use(isa)
    token, size = 41, 64
    for hash in HASHES:
        word = (unmix(hash) - (token + 1) * GOLDEN) & MASK
        assert mix((word + (token + 1) * GOLDEN) & MASK) == hash
        noise = Noise(key_with(word), 0, size)
        assert noise.word == word
        rows, expected = [], []
        for ahead in (0.0, -1e-6, 1e-6, -4e-6, 4e-6):
            logits = torch.full((size,), -90.0)
            logits[token] = 0.0
            for other in (3, 20):
                logits[other] = noise.row[token] - noise.row[other] + ahead
            rows.append((logits, PLAIN, word))
            expected.append(by_definition(logits, PLAIN, noise))
        assert ranking.choose(rows) == expected


def key_with(word: int) -> bytes:
    """A key whose noise at position 0 follows from `word`."""
    return (0).to_bytes(8, "little") + (unmix(word) ^ mix(GOLDEN)).to_bytes(8, "little")


# -- the children that a draft ranks ---------------------------------------------------------------


def drafts(sampling: Sampling, size: int, scale: Scale = Scale(1.0, 1.0)) -> Ranking:  # noqa: B008
    """The ranking of a session with the noise of KEY."""
    order: Open = opening(
        1, [1, 2, 3], key=KEY, sampling=sampling, tree=TreeSettings(), vocabulary_size=size
    )
    return Ranking.begin(
        order,
        most_tokens=size,
        score_calibration=ScoreCalibration(scale),
        device=CPU,
        constrained=None,
    )


@every_isa
@pytest.mark.parametrize("size", everyday([1, 5, 16, 17, 300, 4096, 131_073], 1, 17, 4096, 131_073))
@pytest.mark.parametrize("scale", [Scale(0.3, 0.75), Scale(1.0, 1.0)], ids=["scaled", "plain"])
def test_it_ranks_as_torch_does(isa: Isa, size: int, scale: Scale) -> None:
    use(isa)
    logits, root = draw(3, size), np.array([ROOT] * 3)
    for sampling in SAMPLINGS:
        by_torch = drafts(sampling, size, scale)
        by_torch.native = False
        expected, expected_gains = by_torch.children(logits, GrowingTree(), root, 3, 10)
        tokens, gains = drafts(sampling, size, scale).children(logits, GrowingTree(), root, 3, 10)
        possible = np.isfinite(expected_gains)
        assert np.array_equal(np.isfinite(gains), possible)
        assert np.array_equal(tokens[possible], expected[possible])
        np.testing.assert_allclose(gains[possible], expected_gains[possible], rtol=2e-6, atol=1e-5)
        assert gains.max() <= 0.0


@every_isa
def test_of_equals_the_lower_id_comes_first(isa: Isa) -> None:
    use(isa)
    logits = torch.randint(0, 3, (4, 100), generator=torch.Generator().manual_seed(0)).float()
    expected = logits.sort(descending=True, stable=True).indices[:, :40]
    assert ranking.likeliest(logits, 40, sampling=Sampling())[0].tolist() == expected.tolist()


@every_isa
@pytest.mark.parametrize("place", [0, 7, 39])
@pytest.mark.parametrize("sampling", [Sampling(), PLAIN, Sampling(temperature=1.0, top_p=0.9)])
def test_what_is_not_a_number_is_told_by_the_gains_of_its_row(
    isa: Isa, place: int, sampling: Sampling
) -> None:
    use(isa)
    logits = draw(3, 40)
    logits[2, place] = torch.nan
    gains = ranking.likeliest(logits, 5, sampling=sampling, words=[1, 2, 3])[1]
    assert np.isnan(gains).tolist() == [[False] * 5, [False] * 5, [True] * 5]


def test_every_instruction_set_and_thread_count_gives_the_same_bytes() -> None:
    size = 131_073
    logits = torch.stack([like_a_model(size, seed) for seed in range(4)])
    found = set()
    for isa in kernels.isas():
        for threads in (1, 2):
            kernels.use_isa(isa)
            kernels.set_threads(threads)
            for sampling in SAMPLINGS[:6]:
                tokens, gains = ranking.likeliest(
                    logits, 10, sampling=sampling, words=[7, 7, 8, 8], share=0.7, sharpening=0.9
                )
                found.add((sampling, tokens.tobytes(), gains.tobytes()))
    assert len(found) == 6


def test_logits_and_noise_of_another_shape_or_type_are_refused() -> None:
    logits = draw(2, 8)
    for wrong, words in ((logits, [1]), (logits.double(), None), (logits.T, None)):
        with pytest.raises(ValueError, match="expected"):
            ranking.likeliest(wrong, 2, sampling=PLAIN, words=words)
