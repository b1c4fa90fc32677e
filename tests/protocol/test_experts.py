"""The share of a model with experts that a pass reads is held against experts drawn at random."""

import random

import pytest

from dovetail.protocol.calibration import ExpertCosts, LeastTime
from dovetail.protocol.experts import DENSE, Mixture, Routing, count_experts


@pytest.mark.parametrize(("count", "chosen"), [(8, 2), (64, 8), (128, 8)])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_pass_reads_the_experts_that_its_rows_draw(count: int, chosen: int, rows: int) -> None:
    draws, mixture = random.Random(rows), Mixture(count, chosen, share=0.9)
    drawn = [
        len({expert for _ in range(rows) for expert in draws.sample(range(count), chosen)})
        for _ in range(400)
    ]
    read = 0.1 + 0.9 * sum(drawn) / len(drawn) / count
    assert mixture.read(rows) == pytest.approx(read, rel=0.03)


def test_a_model_without_experts_is_read_whole() -> None:
    assert DENSE.active == DENSE.read(64) == 1.0


def test_with_experts_a_tree_is_bound_by_memory_for_longer() -> None:
    limits = {"size": 30e9, "operations": 60e9, "bandwidth_gb_s": 50.0, "gflop_s": 1000.0}
    dense, sparse = (LeastTime.of(**limits, mixture=one) for one in (DENSE, Mixture(128, 8, 0.95)))
    assert dense.crossover == pytest.approx(10.0)
    assert sparse.at(1) == pytest.approx(dense.at(1) * (1 - 0.95 * 120 / 128))
    assert sparse.crossover > 5 * dense.crossover
    rows = sparse.crossover
    assert sparse.reading_s(rows) == pytest.approx(rows * sparse.row_s, rel=1e-3)


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        ({}, (1, 1)),
        ({"num_experts": 128, "num_experts_per_tok": 8}, (128, 8)),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, (8, 2)),
        ({"num_experts": [16, 64], "moe_topk": [1, 8]}, (64, 8)),
        ({"n_routed_experts": None, "num_experts": True}, (1, 1)),
        ({"num_experts": 4, "num_experts_per_tok": 9}, (4, 4)),
    ],
)
def test_experts_are_counted_by_the_names_that_configurations_have(
    config: dict[str, object], counts: tuple[int, int]
) -> None:
    assert count_experts(config) == counts


def test_rows_that_choose_independently_go_through_the_experts_of_the_expectation() -> None:
    routing, mixture = Routing(row=3 * 8, most=3 * 64), Mixture(64, 8, share=1.0)
    for rows in (1, 2, 7, 30):
        assert routing.unique(rows) == pytest.approx(3 * 64 * mixture.read(rows))


def test_the_variety_of_a_pass_gives_its_experts_back() -> None:
    routing = Routing(row=48, most=768)
    for rows in (2, 5, 40):
        for unique in (48.0, 61.0, 90.0):
            found = routing.unique(rows, routing.variety(rows, unique))
            assert found == pytest.approx(unique)
        assert routing.variety(rows, routing.unique(rows)) == pytest.approx(1.0)
    everyone = Routing(row=4, most=4)
    assert everyone.unique(9, everyone.variety(9, 4)) == 4.0


def test_a_row_goes_through_no_more_experts_than_there_are() -> None:
    with pytest.raises(ValueError, match="a row goes through 9 experts, but the model has 8"):
        Routing(row=9, most=8)


def test_between_measured_passes_rows_are_as_various_as_in_the_nearest() -> None:
    routing = Routing(row=24, most=384)
    passes = tuple((rows, round(routing.unique(rows, 0.6))) for rows in (1, 4, 16))
    costs = ExpertCosts(routing=routing, passes=passes)
    assert costs.measured(4) == round(routing.unique(4, 0.6))
    assert costs.measured(9) == pytest.approx(routing.unique(9, 0.6), rel=0.02)
    with pytest.raises(ValueError, match="do not ascend"):
        ExpertCosts(routing=routing, passes=((4, 80), (1, 24)))
