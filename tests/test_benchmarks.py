"""The pure parts of tests/benchmarks: how figures are judged, and what is measured."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from benchmarks.accuracy import judge
from benchmarks.checkpoints import tree_mask, write_model
from benchmarks.child import Side, SideError
from benchmarks.figures import llama_bound
from benchmarks.measure import Estimate, estimate, limit_s, ratio, take_turns
from benchmarks.models import Shape, draw_tree
from benchmarks.sameness import Record
from dovetail.launch.bench.llama.kinds import LLAMA_TYPES
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.verifier import tree_paths
from support.few_colours import MOST_BYTES, in_few_colours, small_png

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


def test_few_rows_are_limited_by_bytes_and_many_by_arithmetic() -> None:
    machine = {"packed_bytes": 400.0, "parameters": 100.0, "bandwidth": 40.0, "peak": 200.0}
    assert limit_s(1, **machine) == limit_s(10, **machine) == 10.0
    assert limit_s(20, **machine) == 20.0


def test_every_type_of_llama_cpp_has_a_figure_for_the_sizes_of_trees() -> None:
    assert all(
        llama_bound(kind, "verify", rows) for kind in LLAMA_TYPES.values() for rows in (2, 16, 64)
    )


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


def test_a_single_bit_is_a_difference() -> None:
    record = Record(*(torch.zeros(3, 2) for _ in range(4)))
    other = Record(*(torch.zeros(3, 2) for _ in range(4)))
    assert record.differing(other) == []
    other.features[1, 1] = -0.0
    assert record.differing(other) == ["features"]


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


@pytest.mark.slow
def test_a_missing_peer_is_named_with_the_way_to_get_it() -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS, "llama"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pip install llama-cpp-python gguf" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "file"])
def test_the_next_start_is_by_the_proof_of_the_first(weights: str, tmp_path: Path) -> None:
    size = ("--shape", "small", "--layers", "2", "--models", str(tmp_path))
    command = (BENCHMARKS, "loading", *size, "--weights", weights, "--json")
    done = subprocess.run([sys.executable, *map(str, command)], check=True, stdout=subprocess.PIPE)
    rows = json.loads(done.stdout)["rows"]
    assert [(row["start"], row["remembered"]) for row in rows] == [("first", False), ("next", True)]
    assert all(row["packed_bytes"] > 0 for row in rows)


@pytest.mark.slow
def test_a_comparison_runs_from_beginning_to_end() -> None:
    arguments = (
        "transformers",
        "--shape",
        "small",
        "--layers",
        "1",
        "--pairs",
        "2",
        "--rows",
        "1,2",
        "--json",
    )
    done = subprocess.run(
        [sys.executable, BENCHMARKS, *arguments], capture_output=True, text=True, check=True
    )
    assert '"rows"' in done.stdout


@pytest.mark.slow
def test_the_transport_is_measured_around_a_real_coordinator() -> None:
    measured = subprocess.run(
        [sys.executable, BENCHMARKS, "transport", "--rounds", "40", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(measured.stdout)
    assert report["rounds"] > 0
    assert report["transport_us"] > 0
    assert report["outside_us"] == pytest.approx(report["coordinator_us"] + report["transport_us"])


@pytest.mark.slow
def test_the_pictures_of_the_documentation_are_made_by_one_command(tmp_path: Path) -> None:
    size = (
        "--limit",
        "1",
        "--max-tokens",
        "8",
        "--inflate",
        "32MiB",
        "--values",
        "1,2",
        "--out",
        str(tmp_path),
    )
    subprocess.run(
        [sys.executable, BENCHMARKS, "pictures", "bench", "sweep-depth", *size],
        capture_output=True,
        check=True,
    )
    assert {path.name for path in tmp_path.iterdir()} == {"bench.svg", "sweep-depth.svg"}


def test_a_picture_in_few_colours_keeps_those_that_are_frequent_and_takes_the_nearest_for_others() -> (  # noqa: E501
    None
):
    pixels = np.full((40, 50, 3), 250, np.uint8)
    pixels[:20, :10], pixels[30, 30], pixels[31, 31] = (10, 20, 200), (20, 25, 190), (0, 255, 0)
    palette, indices = in_few_colours(pixels, 2)
    assert palette.tolist() == [[250, 250, 250], [10, 20, 200]]
    assert (indices[0, 0], indices[30, 30], indices[39, 49]) == (1, 1, 0)
    exact, numbers = in_few_colours(pixels, 16)
    assert (exact[numbers] == pixels).all()


def test_a_picture_of_many_colours_is_made_small_or_refused() -> None:
    smooth = np.add.outer(np.arange(600), np.arange(800))[:, :, None] // np.array([6, 8, 12])
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
