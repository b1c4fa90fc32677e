"""The cost of a pass beside what it could be, measured on small models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.protocol.calibration import Calibration, MachineLimits, RowsSeconds
from dovetail.protocol.errors import UserError
from dovetail.protocol.profile import ProfileKey
from dovetail.protocol.settings import TargetSettings
from dovetail.workers import kernels
from dovetail.workers.calibration.limits import best_of, limit_curve
from dovetail.workers.calibration.passes import LADDER, Passes, tree_paths
from dovetail.workers.calibration.target import calibrate, open_subject
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.serving.design import read_design
from support.architectures import write_tiny
from support.models import tiny_llama

GIB = 1 << 30


def measured(settings: TargetSettings, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "threads": 1,
        "memory_bytes": GIB,
        "profile": None,
        "seconds": 0.05,
        "contexts": (),
        "say": lambda text, share: None,
        **changes,
    }
    return calibrate(settings, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model")


def test_a_checkpoint_is_measured_for_every_row_up_to_64(folder: Path) -> None:
    heard: list[float] = []
    how = {"say": lambda text, share: heard.append(share)}
    found = json.loads(json.dumps(measured(TargetSettings(model=str(folder)), **how)))
    assert heard == sorted(heard)
    assert 0.0 == heard[0] < heard[-1] <= 1.0
    assert (
        list(found["t_v"])
        == list(found["t_v_limit"])
        == list(found["achieved"])
        == [str(m) for m in range(1, 65)]
    )
    assert all(seconds > 0 for seconds in found["t_v"].values())
    assert list(found["t_v_by_context"]) == ["8", "32"]
    assert (
        found["context"],
        found["layers"],
        found["layers_measured"],
        found["random_weights"],
    ) == (32, 2, 2, False)
    assert found["bandwidth_gb_s"] > 0
    assert found["peak_gflop_s"] > 0
    kept = Calibration.model_validate_json(json.dumps(found["calibration"]))
    assert [kept.t_v.at(m) for m in range(1, 65)] == list(found["t_v"].values())
    assert kept.limits.bandwidth_gb_s == found["bandwidth_gb_s"]
    assert ProfileKey.model_validate(found["key"]).weights == "fp32"


def test_a_config_alone_is_measured_with_random_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / "tokenizer.json").unlink()
    found = measured(TargetSettings(model=str(folder)))
    assert (found["random_weights"], found["layers_measured"]) == (True, 2)


def test_a_model_that_memory_does_not_hold_is_measured_with_fewer_layers(tmp_path: Path) -> None:
    settings = TargetSettings(model=str(tiny_llama(tmp_path, layers=8)))
    design = read_design(settings)
    one, two = (read_design(settings, layers).weights for layers in (1, 2))
    subject = open_subject(
        settings, design, memory_bytes=int((one + 2.5 * (two - one)) * 4 / 0.8), profile=None
    )
    assert (subject.measured.layers, subject.whole.layers, subject.random) == (3, 8, True)
    assert subject.scale == (one + 7 * (two - one)) / (one + 2 * (two - one))
    with pytest.raises(UserError, match="not one layer"):
        open_subject(settings, design, memory_bytes=one, profile=None)


def test_the_library_says_what_each_candidate_took(folder: Path, tmp_path: Path) -> None:
    found = measured(
        TargetSettings(model=str(folder), backend="library"), profile=tmp_path / "profile.json"
    )
    assert found["backends"]["backend"] == "library"
    assert all(choice["chosen"] in choice["seconds"] for choice in found["backends"]["linears"])
    assert {(choice["n"], choice["k"]) for choice in found["backends"]["linears"]} == set(
        read_design(TargetSettings(model=str(folder))).shapes
    )


def test_lengths_of_the_cache_can_be_named(folder: Path) -> None:
    found = measured(TargetSettings(model=str(folder)), contexts=(20, 5, 20))
    assert (list(found["t_v_by_context"]), found["context"]) == (["5", "20"], 20)
    with pytest.raises(UserError, match=r"--context 40.*leaves 32"):
        measured(TargetSettings(model=str(folder)), contexts=(40,))


def test_a_model_without_room_for_the_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no room"):
        measured(TargetSettings(model=str(tiny_llama(tmp_path, max_position_embeddings=64))))


def test_the_limit_is_the_larger_of_reading_and_computing(folder: Path) -> None:
    settings = TargetSettings(model=str(folder))
    subject = open_subject(settings, read_design(settings), memory_bytes=GIB, profile=None)
    weights = subject.whole.weights
    limit = limit_curve(
        subject,
        MachineLimits(
            bandwidth_gb_s=4e-9 * weights, peak_gflop_s={"fp32": 16e-9 * weights}, probe="told"
        ),
    )
    assert [limit.at(rows) for rows in (1, 8, 16, 64)] == pytest.approx([1.0, 1.0, 2.0, 8.0])


def test_of_two_measurements_of_the_machine_the_better_one_counts() -> None:
    one, other = (
        MachineLimits(bandwidth_gb_s=b, peak_gflop_s={"fp32": f, "int8": i}, probe="told")
        for b, f, i in ((30.0, 100.0, 400.0), (25.0, 120.0, 390.0))
    )
    assert best_of(one, other) == MachineLimits(
        bandwidth_gb_s=30.0, peak_gflop_s={"fp32": 120.0, "int8": 400.0}, probe="told"
    )


def test_a_pass_leaves_the_cache_as_it_was(folder: Path) -> None:
    passes = Passes(load_language_model(str(folder), weights="fp32", device="cpu"), 96)
    passes.fill(30)
    passes.once(64)
    assert passes._cache.length == 30


def test_fewer_rows_are_measured_where_all_of_them_take_too_long(folder: Path) -> None:
    passes = Passes(load_language_model(str(folder), weights="fp32", device="cpu"), 96)
    passes.fill(8)
    assert passes.curve(range(1, 65), 0.0).rows == LADDER
    scaled, plain = passes.curve((1, 2), 0.0, scale=1e6), passes.curve((1, 2), 0.0)
    assert scaled.seconds[0] > 1e3 * plain.seconds[0]


def test_a_tree_is_filled_level_by_level() -> None:
    assert tree_paths(1) == [[0]]
    assert tree_paths(7) == [[0], [0, 1], [0, 2], [0, 3], [0, 4], [0, 1, 5], [0, 1, 6]]
    assert max(map(len, tree_paths(64))) == 4


@pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built here")
def test_a_cap_on_instructions_holds_for_the_kernels(folder: Path) -> None:
    found = measured(TargetSettings(model=str(folder), isa="plain"))
    assert (found["backends"]["isa"], found["probe"]) == ("plain", "kernels plain C++")
    assert found["key"]["software"].endswith("-plain")


@pytest.mark.slow
def test_without_kernels_torch_measures_the_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "available", lambda: False)
    found = measured(TargetSettings(model=str(folder), backend="library"))
    assert found["probe"] == "torch"
    assert set(found["peaks_gflop_s"]) == {"fp32", "bf16"}
    assert found["key"]["software"].startswith(f"torch-{torch.__version__}")


def test_curves_hold_no_more_than_they_were_told() -> None:
    assert RowsSeconds(rows=LADDER, seconds=tuple(float(m) for m in LADDER)).at(9) == 9.0


@pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")
def test_what_experts_cost_is_measured_of_a_model_that_counts_them(
    folder: Path, tmp_path: Path
) -> None:
    assert measured(TargetSettings(model=str(folder)))["experts"] is None
    write_tiny("qwen3_moe", tmp_path / "moe")
    found = json.loads(json.dumps(measured(TargetSettings(model=str(tmp_path / "moe")))))
    kept = Calibration.model_validate_json(json.dumps(found["calibration"])).experts
    assert kept is not None
    assert kept.measured(1) == kept.routing.row == found["experts"]["row"]
    assert [rows for rows, _ in kept.passes] == found["t_v_measured"]
    assert kept.routing.row < kept.measured(16) <= kept.routing.most
    assert kept.expert_s == found["experts"]["expert_s"] >= 0.0
