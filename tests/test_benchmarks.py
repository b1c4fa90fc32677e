"""The pure parts of tests/benchmarks: how figures are judged, and what is measured."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from benchmarks.checkpoints import tree_mask, write_model
from benchmarks.child import Side, SideError
from benchmarks.logits import judge
from benchmarks.measure import Estimate, estimate, ratio, take_turns
from benchmarks.models import Shape, draw_tree
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.verifier import tree_paths
from support.few_colours import MOST_BYTES, small_png

BENCHMARKS = Path(__file__).parent / "benchmarks"
TINY = Shape(hidden=32, intermediate=48, heads=4, kv_heads=2, layers=2)


def test_an_estimate_is_the_median_inside_its_interval_and_the_same_each_time() -> None:
    samples = np.random.default_rng(1).normal(1.0, 0.1, 25).tolist()
    found = estimate(samples)
    assert found.low < found.median < found.high
    assert found.median == sorted(samples)[12]
    assert estimate(samples) == found


def test_more_pairs_narrow_the_interval() -> None:
    samples = np.random.default_rng(2).normal(1.0, 0.1, 400).tolist()
    few, many = estimate(samples[:20]), estimate(samples)
    assert many.high - many.low < few.high - few.low


def test_noise_that_meets_both_sides_of_a_pair_leaves_their_ratio_alone() -> None:
    noise = np.random.default_rng(3).uniform(1.0, 5.0, 21)
    assert ratio((0.5 * noise).tolist(), noise.tolist()) == Estimate(0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("found", "holds"),
    [
        (Estimate(0.84, 0.80, 0.90), True),
        (Estimate(0.865, 0.85, 0.88), True),
        (Estimate(0.865, 0.86, 0.87), False),
        (Estimate(0.88, 0.80, 0.95), False),
    ],
)
def test_a_bound_holds_when_the_interval_reaches_it_and_the_median_misses_by_little(
    found: Estimate, holds: bool
) -> None:
    assert found.holds(0.85) is holds


def test_who_is_first_changes_from_round_to_round() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    rounds = [
        take_turns([lambda: side("ours"), lambda: side("theirs")], number) for number in range(2)
    ]
    assert order == ["ours", "theirs", "theirs", "ours"]
    assert rounds == [(1.0, 2.0), (4.0, 3.0)]


def test_the_mask_of_a_tree_shows_what_its_paths_show() -> None:
    tree = draw_tree(24)
    paths = tree_paths(tree, 40)
    assert [(40 + row.nonzero().flatten()).tolist() for row in tree_mask(tree)] == [
        paths.row(i).tolist() for i in range(len(tree) + 1)
    ]


def test_a_random_checkpoint_can_be_loaded_and_is_written_once(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", TINY, torch.float16)
    written = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert write_model(folder, TINY, torch.float16) == folder
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == written
    assert (
        load_language_model(
            str(folder), weights="fp32", device="cpu", backend="library"
        ).vocabulary_size
        == 512
    )


def test_an_error_of_logits_does_not_count_what_is_added_to_a_whole_row() -> None:
    exact = np.array([[1.0, 2.0, 4.0], [0.0, 3.0, 1.0]])
    same, other = (
        judge("shifted", [exact + 7.0], [exact]),
        judge("other", [exact[:, ::-1]], [exact]),
    )
    assert same.error == pytest.approx(0.0)
    assert (same.agreeing, other.agreeing, other.rows) == (2, 1, 2)
    assert other.error > 0.5


def test_a_side_that_ends_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SideError, match="the side nowhere has ended"):
        Side("nowhere", ())
    assert "No module named benchmarks.nowhere" in capfd.readouterr().err


def test_a_picture_of_many_colours_is_made_small_or_refused() -> None:
    smooth = np.add.outer(np.arange(400), np.arange(500))[:, :, None] // np.array([6, 8, 12])
    assert len(small_png(smooth.astype(np.uint8))) < MOST_BYTES
    with pytest.raises(ValueError, match="in 16 colours: take a smaller one"):
        small_png(np.random.default_rng(1).integers(0, 4, (350, 400, 3), np.uint8) * 64)


@pytest.mark.parametrize(
    "picture",
    sorted((BENCHMARKS.parent.parent / "launch" / "pictures").iterdir()),
    ids=lambda path: path.name,
)
def test_a_picture_of_the_documentation_is_small_and_an_image(picture: Path) -> None:
    content = picture.read_bytes()
    assert len(content) < MOST_BYTES
    assert (
        ElementTree.fromstring(content).tag.endswith("svg")
        if picture.suffix == ".svg"
        else content.startswith(b"\x89PNG")
    )
