"""The costs that a target worker tells when it introduces itself: what was measured of this model,
as it is computed here."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.protocol.calibration import Calibration, ContextCurve, MachineLimits, RowsSeconds
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Hello
from dovetail.protocol.profile import ProfileKey, update_profile
from dovetail.protocol.settings import TargetSettings
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.serving.design import calibration_key, read_design
from dovetail.workers.serving.open_target import open_target_worker

CURVES = tuple(
    ContextCurve(context=context, t_v=RowsSeconds(rows=(1, 8), seconds=(0.01, 0.02)))
    for context in (128, 512)
)


@pytest.fixture
def introduced(llama_folder: Path, tmp_path: Path) -> Callable[..., Hello]:
    """The Hello of a target whose profile file holds a calibration under its key, with these
    changes."""
    settings, path = (
        TargetSettings(model=str(llama_folder), backend="library"),
        tmp_path / "profile.json",
    )

    def introduce(**changes: object) -> Hello:
        model = load_language_model(
            settings.model, weights="fp32", device="cpu", backend="library", profile=path
        )
        design = read_design(settings)
        key = calibration_key(model, design)
        calibration = Calibration(
            measured="2026-01-01T00:00:00+00:00",
            backend="library",
            context=512,
            t_v=CURVES[1].t_v,
            t_v_limit=CURVES[1].t_v,
            t_v_by_context=CURVES,
            layers=design.layers,
            layers_measured=design.layers,
            limits=MachineLimits(bandwidth_gb_s=10.0, peak_gflop_s={"fp32": 100.0}, probe="torch"),
        )
        update_profile(
            path,
            ProfileKey.model_validate({**key.model_dump(), **changes}),
            lambda entry: entry.having(calibration),
        )
        return open_target_worker(settings, name="target", threads=1, profile=path).hello(1)

    return introduce


def test_a_target_that_was_calibrated_tells_its_curves_and_its_cores(
    introduced: Callable[..., Hello],
) -> None:
    hello = introduced()
    assert hello.curves == CURVES
    assert hello.cores == tuple(sorted(os.sched_getaffinity(0)))


@pytest.mark.parametrize("change", [{"threads": 7}, {"machine": "another"}, {"weights": "half"}])
def test_curves_that_hold_for_something_else_are_not_told(
    introduced: Callable[..., Hello], change: dict[str, object]
) -> None:
    assert introduced(**change).curves == ()


def test_a_damaged_profile_is_one_clear_error(llama_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="damaged"):
        open_target_worker(
            TargetSettings(model=str(llama_folder)), name="target", threads=1, profile=path
        )
